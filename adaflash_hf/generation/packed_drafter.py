"""Drafts for many requests at once: one packed forward of the drafter, each request with its own context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers.modeling_utils import PreTrainedModel

from ..modeling_dflash_drafter import DFlashDrafterModel


__all__ = ["PackedDrafter", "PackedDrafts"]


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


class PackedDrafter:
    """The drafter and the context of all requests that it drafts for.

    Args:
        drafter (`PreTrainedModel`): A DFlash drafter, possibly wrapped by PEFT or `torch.compile`.
        target (`PreTrainedModel`): Lends its embeddings and its output projection.
    """

    base_drafter: DFlashDrafterModel
    longest_verify_length: int  # rows at most, the anchor included

    def __init__(self, drafter: PreTrainedModel, target: PreTrainedModel):
        raise NotImplementedError

    def allocate(self, expected_tokens: int = 0) -> int:
        """Opens a slot for a request. Slots are the drafter's own, not the target's."""
        raise NotImplementedError

    def release(self, slot: int) -> None:
        """Closes a slot and drops its features."""
        raise NotImplementedError

    def length(self, slot: int) -> int:
        """Committed tokens whose features the slot was given: the position of its next anchor."""
        raise NotImplementedError

    @property
    def memory_bytes(self) -> int:
        """Bytes of the context's buffers and of features not drafted from yet."""
        raise NotImplementedError

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one more token takes."""
        raise NotImplementedError

    def bytes_for(self, num_tokens: int) -> int:
        """Bytes that a request of `num_tokens` tokens takes, rounding included."""
        raise NotImplementedError

    def extend(self, slot: int, features: torch.Tensor) -> None:
        """Adds the target's features of newly committed tokens, in order and without gaps.

        Args:
            slot (`int`): Whose.
            features (`torch.Tensor` of shape `(n, num_features * target_hidden_size)`): From [`PackedOutputs`].
        """
        raise NotImplementedError

    def draft(self, slots: Sequence[int], anchor_ids: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """Runs one block per slot.

        Args:
            slots (`Sequence[int]`): Different slots.
            anchor_ids (`Sequence[int]` or `torch.Tensor` of shape `(n,)`):
                Last committed token of each; its position is `length(slot)`, so its features are not there yet.

        Returns:
            `torch.Tensor` of shape `(n, block_size, hidden_size)`: What length policies and [`project`] take.
        """
        raise NotImplementedError

    def project(
        self, hidden_states: torch.Tensor, verify_lengths: Sequence[int], keep_logits: bool = False
    ) -> PackedDrafts:
        """Turns the rows that will be verified into tokens; the others cost nothing.

        Args:
            hidden_states (`torch.Tensor` of shape `(n, block_size, hidden_size)`): From [`draft`].
            verify_lengths (`Sequence[int]`): Per request, rows to verify, the anchor included: 1 means no drafts.
            keep_logits (`bool`): Return the logits too, for sampled drafts.

        Returns:
            `PackedDrafts`: Draft ids, packed.
        """
        raise NotImplementedError
