"""Runs the target on rows of many requests at once, packed into one sequence without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from transformers.modeling_utils import PreTrainedModel


__all__ = ["PackedOutputs", "PackedTarget"]

LogitsFor = Literal["all", "last", "none"]


@dataclass
class PackedOutputs:
    """What one packed forward returns, in the order in which the slots were given.

    Attributes:
        logits (`torch.Tensor` of shape `(sum(logits_counts), vocab_size)`): Rows that were asked for, in order.
        logits_counts (`list[int]`): Logit rows of each slot: all its rows, its last one, or none.
        features (`torch.Tensor` of shape `(num_rows, len(layer_ids) * hidden_size)`, *optional*):
            Outputs of the layers asked for, side by side; what [`PackedDrafter.extend`] takes.
        counts (`list[int]`): Rows of each slot.
    """

    logits: torch.Tensor
    logits_counts: list[int]
    features: torch.Tensor | None
    counts: list[int]

    def logits_by_slot(self) -> list[torch.Tensor]:
        """Views of `logits`, one per slot, of shape `(logits_counts[i], vocab_size)`."""
        return list(self.logits.split(self.logits_counts))

    def features_by_slot(self) -> list[torch.Tensor]:
        """Views of `features`, one per slot, of shape `(counts[i], len(layer_ids) * hidden_size)`."""
        assert self.features is not None
        return list(self.features.split(self.counts))


class PackedTarget:
    """The target and the cache of all requests that it serves.

    Args:
        model (`PreTrainedModel`): The target, possibly wrapped by PEFT; not changed between forward passes.

    Raises:
        UnsupportedGenerationError: If the target is not a decoder of full and sliding-window attention layers only.
    """

    def __init__(self, model: PreTrainedModel):
        raise NotImplementedError

    def allocate(self, expected_tokens: int = 0) -> int:
        """Opens a slot for a request. `expected_tokens`, if known, saves moving the slot as it grows."""
        raise NotImplementedError

    def release(self, slot: int) -> None:
        """Closes a slot."""
        raise NotImplementedError

    def length(self, slot: int) -> int:
        """Tokens of the slot that are in the cache; the next row given has this position."""
        raise NotImplementedError

    def truncate(self, slot: int, length: int) -> None:
        """Rolls a slot back to its first `length` tokens, at most by the rows of its last forward pass."""
        raise NotImplementedError

    @property
    def memory_bytes(self) -> int:
        """Bytes of the cache's buffers."""
        raise NotImplementedError

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one more token takes."""
        raise NotImplementedError

    def bytes_for(self, num_tokens: int) -> int:
        """Bytes that a request of `num_tokens` tokens takes, rounding included."""
        raise NotImplementedError

    def forward(
        self,
        slots: Sequence[int],
        token_ids: Sequence[Sequence[int] | torch.Tensor] | torch.Tensor,
        counts: Sequence[int] | None = None,
        layer_ids: Sequence[int] = (),
        logits_for: LogitsFor | Sequence[LogitsFor] = "all",
    ) -> PackedOutputs:
        """Runs new rows of some slots on top of what their slots hold, and keeps all of them in the cache.

        Decode steps (one row), verify steps and prefill chunks may be mixed. [`truncate`] what was rejected.

        Args:
            slots (`Sequence[int]`): Different slots.
            token_ids (`Sequence` or `torch.Tensor` of shape `(num_rows,)`):
                The new ids of each slot; or all of them packed, with `counts`.
            counts (`Sequence[int]`, *optional*): Rows of each slot when `token_ids` is packed.
            layer_ids (`Sequence[int]`): Zero-based layers whose outputs are wanted as `features`.
            logits_for (`str` or `Sequence[str]`):
                Which rows go through the vocabulary projection, `"all"`, `"last"` or `"none"`; one value for all
                slots or one for each.

        Returns:
            `PackedOutputs`: Logits and features.
        """
        raise NotImplementedError
