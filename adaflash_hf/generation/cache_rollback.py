"""Takes rejected rows back out of a target's cache: cropping, ragged realignment, and recurrent snapshots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
    StaticLayer,
)

from ..errors import UnsupportedGenerationError


__all__ = [
    "RecurrentSnapshot",
    "check_cache_can_roll_back",
    "has_linear_attention",
    "record_past",
    "remove_slots",
    "restore_recurrent",
    "select_cache_rows",
    "shift_rows",
    "take_recurrent_snapshot",
]

REALIGNABLE_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer)


def has_linear_attention(cache: Cache) -> bool:
    """Whether any layer keeps a convolution or recurrent state, which cannot be cropped token by token."""
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers)


def check_cache_can_roll_back(cache: Any, batch_size: int) -> Cache:
    """Refuses, before the prefill, a cache from which rejected rows could not be removed.

    Args:
        cache (`object`): What `generate()` prepared or the user passed.
        batch_size (`int`): Sequences in the batch.

    Returns:
        `Cache`: The cache.

    Raises:
        UnsupportedGenerationError: If the cache is missing, of an unknown kind, or cannot be cropped.
    """
    if cache is None:
        raise UnsupportedGenerationError(
            "`use_cache` is False, but speculative decoding needs the target's cache. Leave `use_cache` on, or call "
            "`generate()` without `assistant_model`."
        )
    if not isinstance(cache, Cache):
        raise UnsupportedGenerationError(
            f"`cache` is a {type(cache).__name__}, expected a `transformers.Cache`. Pass a `DynamicCache`, or let "
            "`generate()` make one."
        )
    for layer in cache.layers:
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            continue
        if not layer.is_croppable:
            raise UnsupportedGenerationError(
                f"`cache` has layers of type {type(layer).__name__}, which cannot forget rejected tokens. Use the "
                "default dynamic cache (`cache_implementation=None`), or generate without `assistant_model`."
            )
        if batch_size > 1 and type(layer) not in REALIGNABLE_LAYERS:
            raise UnsupportedGenerationError(
                f"`cache` has layers of type {type(layer).__name__} and the batch holds {batch_size} sequences. Rows "
                "that accept different numbers of tokens can only be realigned in dynamic or static caches: use the "
                "default cache, or one prompt at a time."
            )
    if batch_size > 1 and getattr(cache, "offloading", False):
        raise UnsupportedGenerationError(
            f"`cache` is offloaded and the batch holds {batch_size} sequences. Use the default cache, or one prompt "
            "at a time."
        )
    return cache


def record_past(cache: Cache) -> None:
    """Makes sliding-window layers keep what a later crop needs. Linear layers are handled by snapshots instead."""
    for layer in cache.layers:
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.activate_past_recording()


def remove_slots(cache: Cache, count: int) -> None:
    """Removes the last `count` slots of every attention layer.

    Called every round, with 0 as well: sliding-window layers trim themselves to the window only in `crop`.

    Args:
        cache (`Cache`): The target's cache.
        count (`int`): Slots to remove.
    """
    for layer in cache.layers:
        if not getattr(layer, "is_initialized", True):
            continue
        if not isinstance(layer, LinearAttentionCacheLayerMixin):
            layer.crop(-count)
        elif isinstance(layer, DynamicSlidingWindowLayer):
            DynamicSlidingWindowLayer.crop(layer, -count)
        elif isinstance(layer, DynamicLayer):
            DynamicLayer.crop(layer, -count)


def shift_rows(cache: Cache, shifts: list[int]) -> None:
    """Moves each row's slots inside the used part of the cache; what leaves at one end returns at the other.

    Args:
        cache (`Cache`): The target's cache.
        shifts (`list[int]`): Slots to move to the right, per row; negative moves to the left.
    """
    for layer in cache.layers:
        if not layer.is_initialized:
            continue
        end = layer.get_seq_length() if isinstance(layer, StaticLayer) else layer.keys.shape[-2]
        for states in (layer.keys, layer.values):
            for row, shift in enumerate(shifts):
                if shift:
                    region = states[row, :, :end]  # (num_heads, slots, head_dim)
                    region.copy_(torch.roll(region, shift, dims=1))


def select_cache_rows(cache: Cache, rows: torch.Tensor) -> None:
    """Keeps only `rows` of a dynamic cache.

    Args:
        cache (`Cache`): The target's cache.
        rows (`torch.Tensor` of shape `(num_rows,)`): Batch indices to keep, in order.
    """
    for layer in cache.layers:
        if layer.is_initialized:
            layer.batch_select_indices(rows)


@dataclass
class RecurrentSnapshot:
    """Copies of one linear-attention layer's states before a verification."""

    layer: LinearAttentionCacheLayerMixin
    conv_states: dict[int, torch.Tensor | None]
    recurrent_states: dict[int, torch.Tensor | None]


def _copy_states(states: dict[int, torch.Tensor | None]) -> dict[int, torch.Tensor | None]:
    return {index: None if state is None else state.clone() for index, state in states.items()}


def take_recurrent_snapshot(cache: Cache) -> list[RecurrentSnapshot]:
    """Copies the states of all linear-attention layers."""
    return [
        RecurrentSnapshot(layer, _copy_states(layer.conv_states), _copy_states(layer.recurrent_states))
        for layer in cache.layers
        if isinstance(layer, LinearAttentionCacheLayerMixin)
    ]


def restore_recurrent(snapshots: list[RecurrentSnapshot]) -> None:
    """Puts the copied states back; the caller replays the accepted tokens on top of them."""
    for snapshot in snapshots:
        snapshot.layer.conv_states = snapshot.conv_states
        snapshot.layer.recurrent_states = snapshot.recurrent_states
