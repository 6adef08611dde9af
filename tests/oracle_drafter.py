"""A drafter that replays the right answer, with mistakes at known positions, so that tests know what gets accepted."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from tiny_models import tiny_drafter_config
from torch import nn
from transformers import PreTrainedModel

from adaflash_hf import DFlashDrafterModel


# Logit of the wanted token; all others are smaller because the head's rows have length one.
CONFIDENCE = 20.0


def give_head_unit_rows(target: PreTrainedModel) -> PreTrainedModel:
    """Scales each row of the LM head to length one, so that row t itself is the hidden state that yields token t."""
    with torch.no_grad():
        weight = target.get_output_embeddings().weight
        weight.div_(weight.norm(dim=-1, keepdim=True))
    return target


class OracleDrafter(DFlashDrafterModel):
    """Runs the real forward, then overwrites the block's hidden states with those of the tokens to draft.

    Which sequence a row belongs to is read from the anchor's embedding and position, so rows may come and go. The
    token at an absolute position in `mistakes`, or at every `wrong_every`-th one, is drafted wrong.
    """

    def memorise(
        self,
        target: PreTrainedModel,
        references: list[list[int]],
        mistakes: Collection[int] = (),
        wrong_every: int | None = None,
    ) -> OracleDrafter:
        """Takes the answers, each without padding, and copies of the weights that turn hidden states into tokens."""
        self._head_rows = target.get_output_embeddings().weight.detach().clone()
        self._embedding_rows = target.get_input_embeddings().weight.detach().clone()
        self._references = references
        self._mistakes = frozenset(mistakes)
        self._wrong_every = wrong_every
        self.calls: list[dict[str, Any]] = []
        return self

    def is_mistake(self, position: int) -> bool:
        """Whether the token at this position is drafted wrong."""
        return position in self._mistakes or (self._wrong_every is not None and position % self._wrong_every == 0)

    def expected_rounds(self, prompt_tokens: int, new_tokens: int) -> int:
        """Rounds that one sequence of this many tokens takes after the prefill, when whole blocks are verified."""
        length, end, rounds = prompt_tokens + 1, prompt_tokens + new_tokens, 0
        while length < end:
            drafts = min(self.config.draft_length, end - length - 1)
            accepted = 0
            while accepted < drafts and not self.is_mistake(length + accepted):
                accepted += 1
            length += accepted + 1
            rounds += 1
        return rounds

    def forward(self, noise_embeds: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(noise_embeds, *args, **kwargs)
        position_ids = kwargs["position_ids"]
        self.calls.append({"position_ids": position_ids, "attention_mask": kwargs.get("attention_mask")})
        # Blocks come one per row of a batch, or one after the other when they are packed.
        block_size = self.config.block_size
        first_slot = 1 if self.config.block_layout == "anchor_then_masks" else 0
        positions = position_ids[:, -noise_embeds.shape[1] :].expand(noise_embeds.shape[:2]).reshape(-1, block_size)
        anchors = noise_embeds.reshape(-1, block_size, noise_embeds.shape[-1])[:, 0]
        states = output.last_hidden_state.clone()
        blocks = states.view(-1, block_size, states.shape[-1])
        for block in range(blocks.shape[0]):
            anchor_position = int(positions[block, 0])
            reference = self._find_reference(anchors[block], anchor_position)
            for slot in range(first_slot, block_size):
                position = anchor_position + slot + 1 - first_slot
                if reference is not None and position < len(reference):
                    blocks[block, slot] = self._state_of(reference[position], self.is_mistake(position))
        output.last_hidden_state = states
        return output

    def _find_reference(self, anchor_embedding: torch.Tensor, position: int) -> list[int] | None:
        for reference in self._references:
            if position < len(reference):
                row = self._embedding_rows[reference[position]] * self.config.input_embedding_scale
                if torch.equal(row.to(anchor_embedding), anchor_embedding):
                    return reference
        return None

    def _state_of(self, token: int, is_mistake: bool) -> torch.Tensor:
        if is_mistake:
            token = (token + 1) % self._head_rows.shape[0]
        return self._head_rows[token] * CONFIDENCE


def oracle_drafter(target: PreTrainedModel, references: list[list[int]], **overrides: Any) -> OracleDrafter:
    """An oracle for `target`; `mistakes` and `wrong_every` go to the oracle, the rest to its configuration."""
    errors = {name: overrides.pop(name) for name in ("mistakes", "wrong_every") if name in overrides}
    torch.manual_seed(1)
    drafter = OracleDrafter(tiny_drafter_config(target, **overrides)).eval()
    drafter.to(dtype=_float_dtype(target))
    return drafter.memorise(target, references, **errors)


def _float_dtype(target: nn.Module) -> torch.dtype:
    return target.get_output_embeddings().weight.dtype
