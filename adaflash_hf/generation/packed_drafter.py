"""Drafts for many requests at once: one packed forward of the drafter, each request with its own context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers.modeling_utils import PreTrainedModel

from ..errors import InvalidInputError
from .acceptance import greedy_tokens
from .block_inputs import BlockEmbedder
from .compatibility import unwrap_model
from .draft_head import DraftHead, LikeliestTokens
from .packed_model import PackedModel
from .packed_plan import flat_ranges
from .visibility import drafter_visibility


__all__ = ["PackedDrafter", "PackedDrafts"]

# Features of so many tokens of a request are held until somebody drafts for it. Beyond, they are turned into keys and
# values, which take less memory.
MOST_PENDING_TOKENS = 512
# The same where memory is limited, and features would take the place of requests.
FEW_PENDING_TOKENS = 128
# Features are rows of what a round gave to all requests, which lives as long as one of them does. After so many rounds
# a request's own are put together.
_MOST_VIEWS = 32
# A round that gave more rows than this for each request, most of them a prompt's, is not kept for the sake of one.
_LARGEST_SHARE = 4
# Features of all requests that a forward pass takes in at most, beside those of one request.
_TOKENS_AT_ONCE = 4096


@dataclass
class PackedDrafts:
    """Drafted tokens of several requests.

    Attributes:
        token_ids (`torch.Tensor` of shape `(sum(counts),)`): The drafter's argmax for each kept row.
        counts (`list[int]`): Drafts of each request, its verify length minus one.
        logits (`torch.Tensor` of shape `(sum(counts), vocab_size)`, *optional*): Only if asked for.
    """

    token_ids: torch.Tensor
    counts: list[int]
    logits: torch.Tensor | None = None


@dataclass(slots=True)
class _Pending:
    """
    Features that a slot was given and no keys and values were made of.

    Attributes:
        own (`list[torch.Tensor]`): The first, of this slot alone.
        shared (`list[tuple]`): The others, in order: what a round gave to all slots, and which rows of it.
        num_tokens (`int`): Tokens of all.
    """

    own: list[torch.Tensor] = field(default_factory=list)
    shared: list[tuple[torch.Tensor, int, int]] = field(default_factory=list)
    num_tokens: int = 0

    def add(self, features: torch.Tensor, begin: int, end: int) -> None:
        # No view is made of rows that may never be read: with a hundred requests that is a millisecond a round.
        self.shared.append((features, begin, end))
        self.num_tokens += end - begin
        if len(self.shared) == _MOST_VIEWS:
            self.own.append(torch.cat(self._views()))
            self.shared.clear()

    def pieces(self) -> list[torch.Tensor]:
        """All of them, in order."""
        return self.own + self._views()

    def _views(self) -> list[torch.Tensor]:
        return [features[begin:end] for features, begin, end in self.shared]


class PackedDrafter(PackedModel):
    """The drafter and the context of all requests that it drafts for.

    What the target says of a request's tokens is only held until a draft is wanted: a request that ends without one
    costs the drafter nothing.

    Args:
        drafter (`PreTrainedModel`): A DFlash drafter, possibly wrapped by PEFT or `torch.compile`.
        target (`PreTrainedModel`): Lends its embeddings and its output projection.
        most_pending_tokens (`int`): Tokens of a request from which on its features are not held any longer.
    """

    def __init__(
        self, drafter: PreTrainedModel, target: PreTrainedModel, most_pending_tokens: int = MOST_PENDING_TOKENS
    ):
        self.most_pending_tokens = most_pending_tokens
        self.base_drafter = unwrap_model(drafter)
        self.config = self.base_drafter.config
        super().__init__(drafter, drafter_visibility(self.config), self.config)
        # Its layers ask for masks by a rule of their own that is the one of `drafter_visibility`.
        self.cache.checked_groups.update(range(len(self.cache.groups)))
        self._can_cut_blocks = self.config.is_block_causal
        self._first_draft_row = 1 if self.config.block_layout == "anchor_then_masks" else 0
        self.longest_verify_length = self.config.draft_length + 1  # rows at most, the anchor included
        self._embedder = BlockEmbedder(self.base_drafter, target.get_input_embeddings())
        self._head = DraftHead(self.base_drafter, target.get_output_embeddings())
        self._pending: dict[int, _Pending] = {}
        self.feature_bytes = self.config.context_feature_size * self.base_drafter.dtype.itemsize  # of a token

    def allocate(self, expected_tokens: int = 0) -> int:
        """Opens a slot for a request. Slots are the drafter's own, not the target's."""
        slot = super().allocate(expected_tokens + self.config.block_size if expected_tokens else 0)
        self._pending[slot] = _Pending()
        return slot

    def release(self, slot: int) -> None:
        """Closes a slot and drops its features."""
        super().release(slot)
        del self._pending[slot]

    def length(self, slot: int) -> int:
        """Committed tokens whose features the slot was given: the position of its next anchor."""
        return self.cache.length(slot) + self.num_pending(slot)

    def num_pending(self, slot: int) -> int:
        """Tokens of the slot that the next draft for it makes keys and values of."""
        return self._pending[slot].num_tokens

    @property
    def memory_bytes(self) -> int:
        """Bytes of the context's buffers and of features not drafted from yet."""
        pending = sum(pending.num_tokens for pending in self._pending.values())
        return super().memory_bytes + pending * self.feature_bytes

    def extend(self, slot: int, features: torch.Tensor, begin: int = 0, end: int | None = None) -> None:
        """Adds the target's features of newly committed tokens, in order and without gaps.

        Args:
            slot (`int`): Whose.
            features (`torch.Tensor` of shape `(n, num_features * target_hidden_size)`): From [`PackedOutputs`].
            begin (`int`, *optional*, defaults to 0): First row that is the slot's.
            end (`int`, *optional*): Row after the last.
        """
        end = features.shape[0] if end is None else end
        if slot not in self._pending:
            raise InvalidInputError(f"`slot` is {slot}, which is not open; open are {sorted(self._pending)}.")
        if begin == end:
            return
        if features.device != self.device:
            features, begin, end = features[begin:end].to(device=self.device), 0, end - begin
        elif features.shape[0] > _LARGEST_SHARE * max(len(self._pending), end - begin):
            features, begin, end = features[begin:end].clone(), 0, end - begin
        self._pending[slot].add(features, begin, end)
        if self.num_pending(slot) >= self.most_pending_tokens:
            self._absorb([slot])

    @torch.no_grad()
    def _absorb(self, slots: Sequence[int]) -> None:
        """Takes the features of slots into the cache. The blocks that go along are a fraction of the rows."""
        anchors = torch.full((len(slots),), self.config.mask_token_id, device=self.device)
        self._run_blocks(slots, anchors, self._rows_for(1))

    @torch.no_grad()
    def draft(
        self, slots: Sequence[int], anchor_ids: Sequence[int] | torch.Tensor, longest: int | None = None
    ) -> torch.Tensor:
        """Runs one block per slot.

        Args:
            slots (`Sequence[int]`): Different slots.
            anchor_ids (`Sequence[int]` or `torch.Tensor` of shape `(n,)`):
                Last committed token of each; its position is `length(slot)`, so its features are not there yet.
            longest (`int`, *optional*):
                Largest verify length that will be wanted. Where no row of a block sees a later one, rows beyond it are
                left out; otherwise blocks stay whole.

        Returns:
            `torch.Tensor` of shape `(n, rows, hidden_size)`: What length policies and [`project`] take.
        """
        anchors = torch.as_tensor(anchor_ids, device=self.device)
        if anchors.shape != (len(slots),):
            raise InvalidInputError(
                f"`anchor_ids` has shape {tuple(anchors.shape)} for {len(slots)} slots; pass one id for each."
            )
        left = sum(map(self.num_pending, slots))
        absorbed: list[int] = []
        at_once = 0
        for slot in sorted(slots, key=self.num_pending, reverse=True):
            if left <= _TOKENS_AT_ONCE:
                break
            if absorbed and at_once + self.num_pending(slot) > _TOKENS_AT_ONCE:
                self._absorb(absorbed)
                absorbed, at_once = [], 0
            absorbed.append(slot)
            at_once += self.num_pending(slot)
            left -= self.num_pending(slot)
        if absorbed:
            self._absorb(absorbed)
        return self._run_blocks(slots, anchors, self._rows_for(longest))

    def longest_in(self, hidden_states: torch.Tensor) -> int:
        """Largest verify length that drafted blocks have rows for."""
        return hidden_states.shape[1] - self._first_draft_row + 1

    def _rows_for(self, longest: int | None) -> int:
        """Rows of a block that a verify length needs."""
        if longest is None or not self._can_cut_blocks:
            return self.config.block_size
        return min(max(longest - 1 + self._first_draft_row, 1), self.config.block_size)

    def _run_blocks(self, slots: Sequence[int], anchors: torch.Tensor, num_rows: int) -> torch.Tensor:
        new = [self.num_pending(slot) for slot in slots]
        cached = [self.cache.length(slot) for slot in slots]
        # All contexts come first, then all blocks.
        anchors_at = [first + count for first, count in zip(cached, new, strict=True)]
        positions = flat_ranges(cached, new) + flat_ranges(anchors_at, [num_rows] * len(slots))
        pieces = [piece for slot in slots for piece in self._pending[slot].pieces()]
        context = torch.cat(pieces)[None] if pieces else None
        blocks = self._embedder.blocks(anchors, num_rows)  # (n, num_rows, hidden_size)
        with self._step(slots, [num_rows] * len(slots), new, keep=False):
            hidden_states = self.model(
                noise_embeds=blocks.view(1, -1, blocks.shape[-1]),
                context_hidden_states=context,
                position_ids=torch.tensor(positions, device=self.device)[None],
                cache=self.cache,
            ).last_hidden_state
        for slot in slots:
            self._pending[slot] = _Pending()
        return hidden_states.view(blocks.shape)

    @torch.no_grad()
    def likeliest(self, hidden_states: torch.Tensor) -> LikeliestTokens:
        """
        Projects all draft slots, for policies that read how sure the drafter is of each.

        Args:
            hidden_states (`torch.Tensor` of shape `(n, rows, hidden_size)`): From [`draft`].

        Returns:
            `LikeliestTokens` of shape `(n, longest_in(hidden_states) - 1)`
        """
        return self._head.likeliest(hidden_states[:, self._first_draft_row :])

    @torch.no_grad()
    def project(
        self,
        hidden_states: torch.Tensor,
        verify_lengths: Sequence[int],
        keep_logits: bool = False,
        likeliest: LikeliestTokens | None = None,
    ) -> PackedDrafts:
        """Turns the rows that will be verified into tokens; the others cost nothing.

        Args:
            hidden_states (`torch.Tensor` of shape `(n, rows, hidden_size)`): From [`draft`].
            verify_lengths (`Sequence[int]`): Per request, rows to verify, the anchor included: 1 means no drafts.
            keep_logits (`bool`): Return the logits too, for sampled drafts.
            likeliest (`LikeliestTokens`, *optional*): Of these hidden states, where they are known already.

        Returns:
            `PackedDrafts`: Draft ids, packed.
        """
        longest = self.longest_in(hidden_states)
        if len(verify_lengths) != hidden_states.shape[0] or not all(1 <= n <= longest for n in verify_lengths):
            raise InvalidInputError(
                f"`verify_lengths` is {list(verify_lengths)} for {hidden_states.shape[0]} blocks; pass one length for "
                f"each, from 1 to {longest}."
            )
        counts = [length - 1 for length in verify_lengths]
        if not any(counts):
            return PackedDrafts(torch.zeros(0, dtype=torch.long, device=self.device), counts)
        if likeliest is not None and not keep_logits:
            slots = torch.arange(longest - 1, device=self.device)
            is_kept = slots < torch.tensor(counts, device=self.device)[:, None]
            return PackedDrafts(likeliest.token_ids[is_kept], counts)
        num_rows, first = hidden_states.shape[1], self._first_draft_row
        kept = flat_ranges([index * num_rows + first for index in range(len(counts))], counts)
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        rows = rows.index_select(0, torch.tensor(kept, device=rows.device))
        if not keep_logits:
            return PackedDrafts(self._head.argmax(rows), counts)
        logits = self._head.logits(rows)
        return PackedDrafts(greedy_tokens(logits), counts, logits)
