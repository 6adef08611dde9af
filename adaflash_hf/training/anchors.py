"""Anchors of a trajectory, the rows of their blocks, and who sees whom when many blocks share one forward pass.

Keys are [context | block rows of anchor 0 | of anchor 1 | ...], queries are the block rows. A row sees the context
strictly before its anchor, and its own block. Visibility goes by the anchor, never by the number of the block: blocks
that lie closer than their size would otherwise see context they do not have when drafting.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from ..errors import InvalidInputError
from ..generation.visibility import Visibility
from . import block_attention


if TYPE_CHECKING:
    from ..configuration_dflash_drafter import DFlashDrafterConfig


__all__ = [
    "AttentionChoice",
    "attending",
    "block_positions",
    "block_visibility",
    "choose_attention",
    "drafter_masks",
    "label_positions",
    "own_block_visibility",
    "sample_anchors",
]

# Fewer rows than these have a small dense mask, and FlexAttention must be compiled first.
_FLEX_MIN_ROWS = 2048
# Below it torch's kernel for CUDA is not made.
_FLEX_MIN_HEAD_DIM = 16


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
    rule = Visibility(is_causal, sliding_window)
    rows = torch.arange(anchors.shape[1] * block_size, device=anchors.device)
    block, offset = rows // block_size, rows % block_size
    sees_row = _within(rule, block[:, None] == block[None], offset[:, None], offset[None])  # [rows, rows]
    return _with_context(sees_row, rule, anchors, context_length, block_size)


def own_block_visibility(
    anchors: torch.Tensor, context_length: int, block_size: int, rule: Visibility
) -> torch.Tensor:
    """
    The mask of one layer type that [`block_attention_forward`] takes.

    Args:
        anchors (`torch.Tensor` of shape `[batch, num_anchors]`), context_length (`int`), block_size (`int`):
            See [`block_visibility`].
        rule (`Visibility`):
            Of the layer type.

    Returns:
        `torch.Tensor` of shape `[batch, 1, num_anchors * block_size, context_length + block_size]`
    """
    offset = torch.arange(block_size, device=anchors.device)
    everywhere = torch.ones(block_size, block_size, dtype=torch.bool, device=anchors.device)
    sees_row = _within(rule, everywhere, offset[:, None], offset[None]).repeat(anchors.shape[1], 1)
    return _with_context(sees_row, rule, anchors, context_length, block_size)


def drafter_masks(
    config: DFlashDrafterConfig, anchors: torch.Tensor, context_length: int, dtype: torch.dtype
) -> dict[str, Any]:
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
        `dict[str, torch.Tensor | BlockMask]`: for each layer type what the attention implementation takes, a mask
        `[batch, 1, rows, keys]` (sdpa, eager), a block mask of the same visibility (flex_attention), or what
        [`own_block_visibility`] makes.
    """
    implementation = config._attn_implementation
    build: Callable[[Visibility], Any]
    if implementation in ("sdpa", "eager"):

        def build(rule: Visibility) -> Any:
            visible = block_visibility(
                anchors, context_length, config.block_size, sliding_window=rule.window, is_causal=rule.is_causal
            )
            return visible if implementation == "sdpa" else _additive(visible, dtype)

    elif implementation == "flex_attention":

        def build(rule: Visibility) -> Any:
            return _block_mask(rule, anchors, context_length, config.block_size)

    elif implementation == block_attention.ATTENTION_NAME:

        def build(rule: Visibility) -> Any:
            return own_block_visibility(anchors, context_length, config.block_size, rule)

    else:
        raise InvalidInputError(
            f"`attn_implementation` of the drafter is {implementation!r}; blocks that share a forward pass need a "
            "mask of their own. Load the drafter with attn_implementation='sdpa', 'eager' or 'flex_attention'."
        )
    masks: dict[str, Any] = {}
    for layer_idx, layer_type in enumerate(config.layer_types or []):
        if layer_type not in masks:
            masks[layer_type] = build(Visibility(config.is_causal_layer(layer_idx), config.window_of_layer(layer_idx)))
    return masks


class AttentionChoice(NamedTuple):
    """
    How the drafter attends in training.

    Attributes:
        implementation: transformers' name of it.
        reason: Why this one, in a few words.
    """

    implementation: str
    reason: str


def choose_attention(
    config: DFlashDrafterConfig, device: torch.device | str, rows: int, requested: str = "auto"
) -> AttentionChoice:
    """
    The attention implementation to train with.

    Args:
        config (`DFlashDrafterConfig`):
            The drafter's.
        device (`torch.device` or `str`):
            Where it is trained.
        rows (`int`):
            Block rows of one trajectory, anchors x block size.
        requested (`str`, *optional*, defaults to `"auto"`):
            `"blocks"` (see [`block_attention_forward`]), `"sdpa"`, `"eager"`, `"flex_attention"`, or `"auto"`.

    Raises:
        InvalidInputError: what is requested cannot train this drafter there.
    """
    device_type = torch.device(device).type
    obstacle = _obstacle_to_flex(config, device_type)
    if requested == "flex_attention" and obstacle is not None:
        raise InvalidInputError(
            f"The attention requested for training is 'flex_attention', but {obstacle}; choose 'blocks' or 'auto'."
        )
    if requested == "blocks":
        return AttentionChoice(block_attention.ATTENTION_NAME, "given")
    if requested != "auto":
        return AttentionChoice(requested, "given")
    if obstacle is None and rows >= _FLEX_MIN_ROWS:
        return AttentionChoice("flex_attention", f"skips the blocks that {rows} rows of a trajectory do not see")
    if config._attn_implementation == "eager":
        return AttentionChoice("eager", "what the drafter was loaded with")
    return AttentionChoice(block_attention.ATTENTION_NAME, "compares a row with the context and its own block only")


@contextlib.contextmanager
def attending(config: DFlashDrafterConfig, choice: AttentionChoice) -> Iterator[None]:
    """
    Lets a drafter attend as chosen for training, and afterwards as before.

    Args:
        config (`DFlashDrafterConfig`):
            The drafter's own.
        choice (`AttentionChoice`):
            From [`choose_attention`].
    """
    before, config._attn_implementation = config._attn_implementation, choice.implementation
    try:
        yield
    finally:
        config._attn_implementation = before


def _obstacle_to_flex(config: DFlashDrafterConfig, device_type: str) -> str | None:
    if device_type != "cuda":
        return f"FlexAttention has no backward pass on {device_type}"
    if config.attention_dropout > 0:
        return f"FlexAttention has no dropout, and `attention_dropout` is {config.attention_dropout}"
    if config.head_dim < _FLEX_MIN_HEAD_DIM:
        return f"FlexAttention needs `head_dim` of at least {_FLEX_MIN_HEAD_DIM}, and it is {config.head_dim}"
    return None


def _with_context(
    sees_row: torch.Tensor, rule: Visibility, anchors: torch.Tensor, context_length: int, block_size: int
) -> torch.Tensor:
    """Which positions of the context each row sees, and behind them which rows, `sees_row` `[rows, keys]`."""
    row_anchors = anchors.repeat_interleave(block_size, dim=1)[..., None]
    context = torch.arange(context_length, device=anchors.device)
    sees_context = _within(rule, context < row_anchors, block_positions(anchors, block_size)[..., None], context)
    return torch.cat([sees_context, sees_row.expand(len(anchors), -1, -1)], dim=-1)[:, None]


def _within(
    rule: Visibility, visible: torch.Tensor, query_positions: torch.Tensor, key_positions: torch.Tensor
) -> torch.Tensor:
    """What of the visible the layer's rule leaves."""
    return visible if rule.is_unlimited else visible & rule.mask(query_positions, key_positions)


def _mask_mod(rule: Visibility, anchors: torch.Tensor, context_length: int, block_size: int) -> Callable[..., Any]:
    """[`block_visibility`] as FlexAttention asks for it: one row and one key at a time."""
    # As a tensor, so that compiled kernels take it as an input; a number would be compiled in.
    context_end = torch.tensor(context_length, device=anchors.device)

    def sees(batch_idx: Any, head_idx: Any, row: Any, key: Any) -> Any:
        block, offset = row // block_size, row % block_size
        anchor = anchors[batch_idx, block]
        key_row = key - context_end
        is_context = key_row < 0
        visible = torch.where(is_context, key < anchor, key_row // block_size == block)
        key_position = torch.where(is_context, key, anchor + key_row % block_size)
        return _within(rule, visible, anchor + offset, key_position)

    return sees


def _block_mask(rule: Visibility, anchors: torch.Tensor, context_length: int, block_size: int) -> Any:
    rows = anchors.shape[1] * block_size
    return _create_block_mask(anchors.device.type)(
        _mask_mod(rule, anchors, context_length, block_size),
        len(anchors),
        None,
        rows,
        context_length + rows,
        device=anchors.device,
    )


@functools.cache
def _create_block_mask(device_type: str) -> Callable[..., Any]:
    # Imported here because it brings torch's compiler along.
    from torch.nn.attention.flex_attention import create_block_mask

    # Uncompiled it holds several eight-byte numbers for each pair of a row and a key.
    return torch.compile(create_block_mask, dynamic=True) if device_type == "cuda" else create_block_mask


def _additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros_like(visible, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)
