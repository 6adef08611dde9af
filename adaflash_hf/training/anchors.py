"""Anchors of a trajectory, the rows of their blocks, and who sees whom when many blocks share one forward pass.

Keys are [context | block rows of anchor 0 | of anchor 1 | ...], queries are the block rows. A row sees the context
strictly before its anchor, and its own block. Visibility goes by the anchor, never by the number of the block: blocks
that lie closer than their size would otherwise see context they do not have when drafting.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..errors import InvalidInputError


if TYPE_CHECKING:
    from ..configuration_dflash_drafter import DFlashDrafterConfig


__all__ = ["block_positions", "block_visibility", "drafter_masks", "label_positions", "sample_anchors"]


def sample_anchors(first: int, end: int, count: int | None, seed: tuple[int, ...]) -> torch.Tensor:
    """
    Positions in `[first, end)`, uniformly and without replacement.

    Args:
        first (`int`):
            First position that can be an anchor: that of the first response token.
        end (`int`):
            One past the last; an anchor needs at least one token after it.
        count (`int`, *optional*):
            How many; all of them if there are fewer, or if None.
        seed (`tuple[int, ...]`):
            Equal seeds give equal anchors. Made of the run's seed, the epoch and the example's index, it makes
            anchors fresh in each epoch and the same after a restart.

    Returns:
        `torch.Tensor` of shape `[min(count, end - first)]`: in ascending order.
    """
    available = max(end - first, 0)
    count = available if count is None else min(count, available)
    chosen = np.random.default_rng(seed).choice(available, size=count, replace=False) if count else np.empty(0)
    return torch.from_numpy(np.sort(chosen).astype(np.int64)) + first


def block_positions(anchors: torch.Tensor, block_size: int) -> torch.Tensor:
    """
    Positions in the target of all block rows.

    Args:
        anchors (`torch.Tensor` of shape `[batch, num_anchors]`):
            Positions of the anchors.
        block_size (`int`):
            Rows of a block.

    Returns:
        `torch.Tensor` of shape `[batch, num_anchors * block_size]`
    """
    rows = anchors[:, :, None] + torch.arange(block_size, device=anchors.device)
    return rows.flatten(1)


def label_positions(anchors: torch.Tensor, draft_length: int) -> torch.Tensor:
    """
    Positions of the tokens that the drafts of each block stand for, in either block layout.

    Args:
        anchors (`torch.Tensor` of shape `[..., num_anchors]`):
            Positions of the anchors.
        draft_length (`int`):
            Drafts of a block.

    Returns:
        `torch.Tensor` of shape `[..., num_anchors, draft_length]`
    """
    return anchors[..., None] + torch.arange(1, draft_length + 1, device=anchors.device)


def block_visibility(
    anchors: torch.Tensor,
    context_length: int,
    block_size: int,
    *,
    sliding_window: int | None = None,
    is_causal: bool = False,
) -> torch.Tensor:
    """
    The dense mask of one layer type.

    Args:
        anchors (`torch.Tensor` of shape `[batch, num_anchors]`):
            Positions of the anchors.
        context_length (`int`):
            Keys of the context, at positions 0, 1, ...; padding lies behind all anchors and so is never seen.
        block_size (`int`):
            Rows of a block.
        sliding_window (`int`, *optional*):
            A row at position q sees keys at positions above q - window.
        is_causal (`bool`, *optional*, defaults to `False`):
            Whether a row sees only itself and the rows before it in its block.

    Returns:
        `torch.Tensor` of shape `[batch, 1, num_anchors * block_size, context_length + num_anchors * block_size]`:
        true where a row (third dimension) sees a key (fourth).
    """
    rows = torch.arange(anchors.shape[1] * block_size, device=anchors.device)
    block, offset = rows // block_size, rows % block_size
    row_anchors = anchors[:, block]  # [batch, rows]
    context = torch.arange(context_length, device=anchors.device)
    sees_context = context < row_anchors[..., None]  # [batch, rows, context]
    distance = offset[:, None] - offset[None]
    sees_row = block[:, None] == block[None]  # [rows, rows]
    if is_causal:
        sees_row = sees_row & (distance >= 0)
    if sliding_window is not None:
        sees_context = sees_context & ((row_anchors + offset)[..., None] - context < sliding_window)
        sees_row = sees_row & (distance < sliding_window)
    return torch.cat([sees_context, sees_row.expand(len(anchors), -1, -1)], dim=-1)[:, None]


def drafter_masks(
    config: DFlashDrafterConfig, anchors: torch.Tensor, context_length: int, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """
    Masks for `DFlashDrafterModel.forward`, one for each layer type in use.

    Args:
        config (`DFlashDrafterConfig`):
            The drafter's.
        anchors (`torch.Tensor` of shape `[batch, num_anchors]`):
            Positions of the anchors.
        context_length (`int`):
            Keys of the context.
        dtype (`torch.dtype`):
            What the drafter computes in.

    Returns:
        `dict[str, torch.Tensor]`: masks `[batch, 1, rows, keys]` in the form the attention implementation takes.
    """
    implementation = config._attn_implementation
    finish: Callable[[torch.Tensor], torch.Tensor]
    if implementation == "sdpa":
        finish = _as_it_is
    elif implementation == "eager":
        finish = _additive(dtype)
    else:
        raise InvalidInputError(
            f"`attn_implementation` of the drafter is {implementation!r}; blocks that share a forward pass need a "
            "dense mask. Load the drafter with attn_implementation='sdpa' (or 'eager')."
        )
    masks: dict[str, torch.Tensor] = {}
    for layer_idx, layer_type in enumerate(config.layer_types or []):
        if layer_type not in masks:
            window = config.sliding_window if layer_type == "sliding_attention" else None
            visible = block_visibility(
                anchors,
                context_length,
                config.block_size,
                sliding_window=window,
                is_causal=config.is_causal_layer(layer_idx),
            )
            masks[layer_type] = finish(visible)
    return masks


def _as_it_is(visible: torch.Tensor) -> torch.Tensor:
    return visible


def _additive(dtype: torch.dtype) -> Callable[[torch.Tensor], Any]:
    lowest = torch.finfo(dtype).min
    return lambda visible: torch.zeros_like(visible, dtype=dtype).masked_fill(~visible, lowest)
