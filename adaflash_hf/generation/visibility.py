"""Which keys a row attends to, said once for all masks that are made from positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..configuration_dflash_drafter import DFlashDrafterConfig


__all__ = ["Visibility", "drafter_visibility"]


@dataclass(frozen=True)
class Visibility:
    """The rule of one kind of attention layer.

    Attributes:
        is_causal (`bool`):
            Whether rows see only what stands before them and themselves. A bidirectional layer of a drafter sees its
            whole block; context comes before the block either way.
        window (`int`, *optional*): A row sees keys less than this far back; None if there is no limit.
    """

    is_causal: bool = True
    window: int | None = None

    @property
    def is_unlimited(self) -> bool:
        """Whether every row sees every key."""
        return not self.is_causal and self.window is None

    def mask(self, query_positions: torch.Tensor, key_positions: torch.Tensor) -> torch.Tensor:
        """
        Args:
            query_positions (`torch.Tensor` of shape `(..., rows, 1)`): Position of each row.
            key_positions (`torch.Tensor` of shape `(..., 1, keys)`): Position of each key.

        Returns:
            `torch.Tensor` of shape `(..., rows, keys)`: True where the row sees the key.
        """
        distance = query_positions - key_positions
        visible = distance >= 0 if self.is_causal else torch.ones_like(distance, dtype=torch.bool)
        return visible if self.window is None else visible & (distance < self.window)


def drafter_visibility(config: DFlashDrafterConfig) -> list[Visibility]:
    """The rule of each layer of a drafter."""
    layers = range(config.num_hidden_layers)
    return [Visibility(config.is_causal_layer(index), config.window_of_layer(index)) for index in layers]
