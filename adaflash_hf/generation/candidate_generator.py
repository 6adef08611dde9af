"""Drafts a block of tokens with a DFlash drafter: the drafter's context cache, the block forward, the projection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import DynamicCache
from transformers.generation import CandidateGenerator
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import ModelOutput

from ..modeling_dflash_drafter import DFlashDrafterModel
from .acceptance import sample_tokens
from .appending_cache import appending_cache
from .block_inputs import BlockEmbedder
from .cache_rollback import select_cache_rows
from .compatibility import unwrap_model
from .context_features import concatenate_context_features, hidden_states_to_request
from .draft_head import DraftHead, LikeliestTokens
from .length_policies import FixedLengthPolicy, LengthPolicy, RoundContext
from .statistics import StatisticsRecorder
from .visibility import drafter_visibility


__all__ = ["AdaFlashCandidateGenerator", "DraftContext", "Proposal"]


@dataclass
class DraftContext:
    """What the drafter knows of each sequence: its own cache, and the features it has not projected yet.

    The context cache holds one slot per committed token. In a ragged batch some slots are empty for some rows, so
    every slot carries its position and whether it is used.

    Attributes:
        cache (`DynamicCache`): Keys and values of the context, per drafter layer.
        positions (`torch.Tensor` of shape `(batch_size, num_slots)`): Position of each slot, pending ones included.
        used (`torch.Tensor` of shape `(batch_size, num_slots)`): Whether the slot holds a token of the row.
        pending (`list[torch.Tensor]`): Features of shape `(batch_size, n, num_features * target_hidden_size)`.
        is_dense (`bool`): Whether all slots are used, so that no mask is needed.
    """

    cache: DynamicCache
    positions: torch.Tensor
    used: torch.Tensor
    pending: list[torch.Tensor]
    is_dense: bool = True

    @classmethod
    def empty(cls, batch_size: int, device: torch.device) -> DraftContext:
        """A context that holds nothing yet."""
        positions = torch.zeros(batch_size, 0, dtype=torch.long, device=device)
        return cls(appending_cache(), positions, positions.bool(), [])

    def append(self, features: torch.Tensor, positions: torch.Tensor, used: torch.Tensor | None) -> None:
        """Adds the features of newly committed tokens.

        Args:
            features (`torch.Tensor` of shape `(batch_size, n, num_features * target_hidden_size)`): Target states.
            positions (`torch.Tensor` of shape `(batch_size, n)`): Their positions in the sequence.
            used (`torch.Tensor` of shape `(batch_size, n)`, *optional*): Which of them are tokens; all if None.
        """
        self.pending.append(features)
        self.positions = torch.cat([self.positions, positions], dim=1)
        if used is None:
            used = torch.ones_like(positions, dtype=torch.bool)
        else:
            self.is_dense = False
        self.used = torch.cat([self.used, used], dim=1)

    def truncate(self, num_tokens: torch.Tensor) -> None:
        """Forgets what lies beyond the first tokens of each sequence, after the target's cache was cropped.

        Args:
            num_tokens (`torch.Tensor` of shape `(batch_size,)`): Tokens that stay.
        """
        used = self.used & (self.positions < num_tokens[:, None].to(self.positions.device))
        if not torch.equal(used, self.used):
            self.used = used
            self.is_dense = False

    def select_rows(self, rows: torch.Tensor) -> None:
        """Keeps only the sequences `rows`, a tensor of batch indices."""
        select_cache_rows(self.cache, rows)
        self.positions, self.used = self.positions[rows], self.used[rows]
        self.pending = [features[rows] for features in self.pending]


@dataclass
class Proposal:
    """A round's drafts.

    Attributes:
        candidate_ids (`torch.Tensor` of shape `(batch_size, num_drafts)`): Drafted tokens, possibly none.
        candidate_probs (`torch.Tensor` of shape `(batch_size, num_drafts, vocab_size)`, *optional*):
            The distribution each draft was drawn from; None when drafts are the drafter's argmax.
        verify_lengths (`list[int]`): Rows the policy wants verified per sequence, the anchor included.
        drafted (`bool`): Whether the drafter ran.
    """

    candidate_ids: torch.Tensor
    candidate_probs: torch.Tensor | None
    verify_lengths: list[int]
    drafted: bool = True


class AdaFlashCandidateGenerator(CandidateGenerator):
    """Proposes blocks of tokens with a DFlash drafter and an adaptive verify length.

    `generate(assistant_model=drafter)` drives it through `extend_context` and `propose`, for whole batches. It also
    speaks transformers' own `CandidateGenerator` protocol, for one sequence.

    Args:
        drafter (`PreTrainedModel`): A DFlash drafter, possibly wrapped by PEFT or `torch.compile`.
        target (`PreTrainedModel`): The model that verifies; lends its embeddings and its output projection.
        length_policy (`LengthPolicy`, *optional*): How many rows to verify; the whole block when not given.
        draft_warper (`Callable`, *optional*):
            Maps `(rows, vocab_size)` draft logits to warped ones. When given, drafts are sampled from them and
            `Proposal.candidate_probs` is set; otherwise drafts are the argmax.
        recorder (`StatisticsRecorder`, *optional*): Times the drafting.
    """

    requires_model_outputs: bool = True

    def __init__(
        self,
        drafter: PreTrainedModel,
        target: PreTrainedModel,
        length_policy: LengthPolicy | None = None,
        draft_warper: Callable[[torch.Tensor], torch.Tensor] | None = None,
        recorder: StatisticsRecorder | None = None,
    ):
        self.drafter = drafter
        self.base_drafter: DFlashDrafterModel = unwrap_model(drafter)
        self.config = self.base_drafter.config
        # These are read every round, and a model or a configuration takes its time to find them.
        self.device, self._dtype = self.base_drafter.device, self.base_drafter.dtype
        self._block_size = self.config.block_size
        self.length_policy = length_policy or FixedLengthPolicy()
        self.recorder = recorder or StatisticsRecorder(self.device)
        self._draft_warper = draft_warper
        self._embedder = BlockEmbedder(self.base_drafter, target.get_input_embeddings())
        self._draft_head = DraftHead(self.base_drafter, target.get_output_embeddings())
        self._first_draft_slot = 1 if self.config.block_layout == "anchor_then_masks" else 0
        self.longest_verify_length = self.config.block_size + (1 - self._first_draft_slot)
        self.model_kwargs_overrides: dict[str, Any] = {
            "output_hidden_states": hidden_states_to_request(self.config.target_layer_ids)
        }
        self.context = DraftContext.empty(0, self.device)
        self._block_offsets = torch.arange(self.config.block_size, device=self.device)
        self._last_verify_length = 1
        self._visibility = dict(zip(self.config.layer_types, drafter_visibility(self.config), strict=True))
        self._sees_everything = all(visibility.is_unlimited for visibility in self._visibility.values())

    def start(self, batch_size: int, context: DraftContext | None = None) -> None:
        """Begins a batch, with an empty context or the one of an earlier turn."""
        self.context = context or DraftContext.empty(batch_size, self.device)

    def extend_context(
        self,
        hidden_states: tuple[torch.Tensor, ...],
        positions: torch.Tensor,
        used: torch.Tensor | None = None,
    ) -> None:
        """Adds the target's hidden states of newly committed tokens.

        Args:
            hidden_states (`tuple` of `torch.Tensor` of shape `(batch_size, >= n, target_hidden_size)`):
                The target's `hidden_states`, those of the layers that the drafter reads at least.
            positions (`torch.Tensor` of shape `(batch_size, n)`): Positions of the first n rows.
            used (`torch.Tensor` of shape `(batch_size, n)`, *optional*): Rows that hold committed tokens.
        """
        config = self.config
        features = concatenate_context_features(
            hidden_states, config.target_layer_ids, config.num_target_layers, positions.shape[1], self.device
        )
        used = None if used is None else used.to(self.device)
        self.context.append(features, positions.to(self.device), used)

    def propose(
        self,
        anchor_ids: torch.Tensor,
        anchor_positions: torch.Tensor,
        longest: int,
        round_context: RoundContext | None = None,
    ) -> Proposal:
        """Drafts the tokens after the anchors, unless the length policy wants none.

        Args:
            anchor_ids (`torch.Tensor` of shape `(batch_size,)`): Last committed token of each sequence.
            anchor_positions (`torch.Tensor` of shape `(batch_size,)`): Its position.
            longest (`int`): Largest verify length that the remaining budget allows.
            round_context (`RoundContext`, *optional*):
                What the policy is told; by default no more than `longest` for every sequence.

        Returns:
            `Proposal`: Drafts for the largest of the chosen verify lengths, and the lengths.
        """
        batch_size = anchor_ids.shape[0]
        longest = min(longest, self.longest_verify_length)
        if longest <= 1 or not self.length_policy.wants_draft(batch_size):
            return Proposal(anchor_ids.new_zeros(batch_size, 0), None, [1] * batch_size, drafted=False)
        if round_context is None:
            round_context = RoundContext([longest] * batch_size, batch_size, is_packed=False)
        round_context.longest = [min(length, longest) for length in round_context.longest]
        with self.recorder.phase("draft"):
            hidden_states = self.draft_hidden_states(anchor_ids, anchor_positions)
            if self.length_policy.needs_likeliest(self.base_drafter):
                round_context.likeliest = self.likeliest(hidden_states)
            lengths = self.length_policy.choose(self.base_drafter, hidden_states, round_context)
            return self.project(hidden_states, lengths, anchor_ids.device, round_context.likeliest)

    def draft_hidden_states(self, anchor_ids: torch.Tensor, anchor_positions: torch.Tensor) -> torch.Tensor:
        """The drafter's forward of [`propose`] alone: hidden states of `(batch_size, block_size, hidden_size)`."""
        context = self.context
        anchor_positions = anchor_positions.to(self.device)
        pending = torch.cat(context.pending, dim=1) if context.pending else None
        context.pending = []
        block_positions = anchor_positions[:, None] + self._block_offsets  # (batch_size, block_size)
        new = 0 if pending is None else pending.shape[1]
        new_positions = context.positions[:, context.positions.shape[1] - new :]
        hidden_states = self.drafter(
            noise_embeds=self._embedder.blocks(anchor_ids),
            context_hidden_states=pending,
            position_ids=torch.cat([new_positions, block_positions], dim=1),
            attention_mask=self._attention_mask(block_positions),
            cache=context.cache,
            return_dict=True,
        ).last_hidden_state
        context.cache.crop(-self._block_size)
        return hidden_states

    def _attention_mask(self, block_positions: torch.Tensor) -> Any:
        """Masks by position, since slots of a ragged batch do not count tokens. None when everything is visible."""
        if self.context.is_dense and self._sees_everything:
            return None
        used = torch.cat([self.context.used, torch.ones_like(block_positions, dtype=torch.bool)], dim=1)
        if "flash" in (self.config._attn_implementation or ""):
            # Flash attention takes padding out before it attends, so windows and causality count tokens by themselves.
            return None if self.context.is_dense else used
        key_positions = torch.cat([self.context.positions, block_positions], dim=1)
        query, key = block_positions[:, None, :, None], key_positions[:, None, None, :]
        return {
            layer_type: self._as_bias(used[:, None, None, :] & visibility.mask(query, key))
            for layer_type, visibility in self._visibility.items()
        }

    def _as_bias(self, visible: torch.Tensor) -> torch.Tensor:
        """Boolean for sdpa; additive otherwise, which eager attention needs."""
        if self.config._attn_implementation == "sdpa":
            return visible
        bias = torch.zeros(visible.shape, dtype=self._dtype, device=visible.device)
        return bias.masked_fill(~visible, torch.finfo(bias.dtype).min)

    def likeliest(self, hidden_states: torch.Tensor) -> LikeliestTokens:
        """The drafter's likeliest tokens in all draft slots of `(batch_size, block_size, hidden_size)`."""
        return self._draft_head.likeliest(hidden_states[:, self._first_draft_slot :])

    def project(
        self,
        hidden_states: torch.Tensor,
        verify_lengths: list[int],
        device: torch.device,
        likeliest: LikeliestTokens | None = None,
    ) -> Proposal:
        """Turns hidden states into drafts, as many for each sequence as the longest of the verify lengths asks for.

        Args:
            hidden_states (`torch.Tensor` of shape `(batch_size, block_size, hidden_size)`): Of a whole block.
            verify_lengths (`list[int]`): Rows to verify per sequence, the anchor included.
            device (`torch.device`): Where the drafts shall be.
            likeliest (`LikeliestTokens`, *optional*): Of these hidden states, where they are known already.
        """
        first, num_drafts, lengths = self._first_draft_slot, max(verify_lengths) - 1, verify_lengths
        kept = hidden_states[:, first : first + num_drafts]
        if num_drafts == 0:
            return Proposal(torch.zeros(kept.shape[:2], dtype=torch.long, device=device), None, lengths)
        if self._draft_warper is None:
            ids = self._draft_head.argmax(kept) if likeliest is None else likeliest.token_ids[:, :num_drafts]
            return Proposal(ids.to(device), None, lengths)
        logits = self._draft_head.logits(kept).to(device)
        batch, drafts, vocab = logits.shape
        # With a drafter that overflowed any distribution will do, for the target corrects it; but it must be one.
        warped = self._draft_warper(logits.reshape(-1, vocab).float().nan_to_num(posinf=1e4, neginf=float("-inf")))
        probs = warped.softmax(dim=-1).reshape(batch, drafts, vocab)
        return Proposal(sample_tokens(probs), probs, lengths)

    def select_rows(self, rows: list[int]) -> None:
        """Drops finished sequences; `rows` are the batch indices to keep."""
        self.context.select_rows(torch.tensor(rows, device=self.device))

    # transformers' protocol, one sequence at a time

    def get_candidates(
        self,
        input_ids: torch.LongTensor,
        model_kwargs: dict[str, Any] | None = None,
        model_outputs: ModelOutput | None = None,
        is_first_iteration: bool = False,
        n_last_matches: int = 0,
        **kwargs: Any,
    ) -> tuple[torch.LongTensor, torch.Tensor | None]:
        """Drafts for transformers' own assisted-decoding loop, see `CandidateGenerator`.

        Returns:
            `tuple`: `input_ids` followed by the drafts, and None in place of logits, since drafts are the argmax.
        """
        if is_first_iteration or model_outputs is None:
            self.start(input_ids.shape[0])
            return input_ids, None
        seen = self.context.positions.shape[1]
        rows = input_ids.shape[1] - 1 - seen
        positions = torch.arange(seen, seen + rows, device=self.device)[None]
        self.extend_context(model_outputs.hidden_states, positions)
        anchor_position = torch.tensor([input_ids.shape[1] - 1], device=self.device)
        proposal = self.propose(input_ids[:, -1], anchor_position, self.longest_verify_length)
        self._last_verify_length = proposal.verify_lengths[0]
        return torch.cat([input_ids, proposal.candidate_ids], dim=1), None  # type: ignore[return-value]

    def update_candidate_strategy(self, input_ids: torch.LongTensor, scores: torch.Tensor, num_matches: int) -> None:
        """Passes what was accepted on to the length policy."""
        self.length_policy.observe(self._last_verify_length, int(num_matches))
