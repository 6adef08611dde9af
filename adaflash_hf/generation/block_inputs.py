"""What a drafter's block is made of: the anchor's embedding and mask embeddings, both the target's."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from ..modeling_dflash_drafter import DFlashDrafterModel


__all__ = ["BlockEmbedder"]


class BlockEmbedder:
    """Embeds blocks for a drafter.

    Args:
        drafter (`DFlashDrafterModel`): The unwrapped drafter.
        input_embeddings (`nn.Module`): The target's token embedding.
    """

    def __init__(self, drafter: DFlashDrafterModel, input_embeddings: nn.Module):
        # A model takes its time to find these, and they are read every round.
        self._device, self._dtype = drafter.device, drafter.dtype
        self._scale = drafter.config.input_embedding_scale
        self._embeddings: Any = input_embeddings
        masks = torch.full((1, drafter.config.block_size - 1), drafter.config.mask_token_id, device="cpu")
        self._masks = self._embed(masks)

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Raw rows of the target's embedding matrix, without the scale or norm that the module itself may apply."""
        module = self._embeddings
        with _on_its_device(module):
            weight = module.weight
            rows = nn.functional.embedding(ids.to(weight.device), weight)
        rows = rows.to(device=self._device, dtype=self._dtype)
        return rows if self._scale == 1 else rows * self._scale

    def blocks(self, anchor_ids: torch.Tensor, num_rows: int | None = None) -> torch.Tensor:
        """
        Args:
            anchor_ids (`torch.Tensor` of shape `(n,)`): First token of each block.
            num_rows (`int`, *optional*): Rows of each, the anchor included; by default whole blocks.

        Returns:
            `torch.Tensor` of shape `(n, num_rows, hidden_size)`: The drafter's `noise_embeds`.
        """
        masks = self._masks if num_rows is None else self._masks[:, : num_rows - 1]
        return torch.cat([self._embed(anchor_ids[:, None]), masks.expand(anchor_ids.shape[0], -1, -1)], dim=1)


def _on_its_device(module: nn.Module) -> AbstractContextManager[Any]:
    """An offloaded embedding has its weight on the meta device outside its own forward."""
    if not hasattr(module, "_hf_hook"):
        return nullcontext()
    # accelerate, which put the hook there, is not needed otherwise.
    from accelerate.utils import align_module_device

    return align_module_device(module)
