"""Takes rejected rows back out of a target's cache: cropping, ragged realignment, and recurrent snapshots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    LinearAttentionCacheLayerMixin,
    QuantizedLayer,
    StaticLayer,
)
from transformers.configuration_utils import PreTrainedConfig

from ..errors import UnsupportedGenerationError
from .appending_cache import append_in_place


__all__ = [
    "RecurrentSnapshot",
    "check_cache_can_roll_back",
    "has_linear_attention",
    "remove_slots",
    "remove_slots_beyond",
    "restore_recurrent",
    "rows_by_shift",
    "select_cache_rows",
    "shift_rows",
    "start_recording",
    "stop_recording",
    "take_recurrent_snapshot",
    "working_cache",
    "write_back",
]

REALIGNABLE_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)


def has_linear_attention(cache: Cache) -> bool:
    """Whether any layer keeps a convolution or recurrent state, which cannot be cropped token by token."""
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers)


def check_cache_can_roll_back(cache: Any, batch_size: int, use_cache: bool = True) -> Cache:
    """Refuses, before the prefill, a cache from which rejected rows could not be removed.

    Args:
        cache (`object`): What `generate()` prepared or the user passed.
        batch_size (`int`): Sequences in the batch.
        use_cache (`bool`, defaults to `True`): Value of that option; only the message depends on it.

    Returns:
        `Cache`: The cache.

    Raises:
        UnsupportedGenerationError: If the cache is missing, of an unknown kind, or cannot be cropped.
    """
    if cache is None:
        reason = "`use_cache` is False" if not use_cache else "This target makes no `Cache` of its own"
        raise UnsupportedGenerationError(
            f"{reason}, but speculative decoding needs the target's cache. Leave `use_cache` on and pass "
            "`cache=DynamicCache(config=target.config)` if need be, or call `generate()` without `assistant_model`."
        )
    if not isinstance(cache, Cache) or isinstance(cache, EncoderDecoderCache):
        raise UnsupportedGenerationError(
            f"`cache` is a {type(cache).__name__}, expected the `transformers.Cache` of a decoder. Pass a "
            "`DynamicCache`, or let `generate()` make one."
        )
    if cache.layers and not any(isinstance(layer, CacheLayerMixin) for layer in cache.layers):
        raise UnsupportedGenerationError(
            f"`cache` has only recurrent layers ({type(cache.layers[0]).__name__}), which do not count the tokens "
            "they have seen. Generate without `assistant_model`."
        )
    # Where some layers are recurrent, each row of a batch gets a cache of its own.
    rows = 1 if has_linear_attention(cache) else batch_size
    for layer in cache.layers:
        if not isinstance(layer, LinearAttentionCacheLayerMixin):
            _check_layer_can_roll_back(layer, rows)
    if batch_size > 1 and getattr(cache, "offloading", False):
        raise UnsupportedGenerationError(
            f"`cache` is offloaded and the batch holds {batch_size} sequences. Use the default cache, or one prompt "
            "at a time."
        )
    return cache


def _check_layer_can_roll_back(layer: CacheLayerMixin, batch_size: int) -> None:
    # Quantised layers inherit a `crop` that is wrong for them, and before transformers 5.24 do not say so.
    can_crop = layer.is_croppable and not isinstance(layer, QuantizedLayer)
    if not can_crop and not isinstance(layer, StaticLayer):
        raise UnsupportedGenerationError(
            f"`cache` has layers of type {type(layer).__name__}, which cannot forget rejected tokens. Use the "
            "default dynamic cache (`cache_implementation=None`), or generate without `assistant_model`."
        )
    if batch_size > 1 and not isinstance(layer, StaticLayer) and type(layer) not in REALIGNABLE_LAYERS:
        raise UnsupportedGenerationError(
            f"`cache` has layers of type {type(layer).__name__} and the batch holds {batch_size} sequences. Rows "
            "that accept different numbers of tokens can only be realigned in dynamic or static caches: use the "
            "default cache, or one prompt at a time."
        )


def working_cache(cache: Cache, config: PreTrainedConfig, batch_size: int, is_returned: bool) -> Cache:
    """The cache to decode with: `cache` itself, or a dynamic stand-in for a static one.

    If nobody will look at it afterwards, its dynamic layers append in place from here on.

    A static cache has no slots to spare in which rows could be moved against each other, and before transformers 5.24
    it cannot be cropped at all.

    Args:
        cache (`Cache`): What `generate()` prepared or the user passed.
        config (`PreTrainedConfig`): The target's configuration.
        batch_size (`int`): Sequences in the batch.
        is_returned (`bool`): Whether anyone will look at `cache` afterwards; then [`write_back`] it.

    Raises:
        UnsupportedGenerationError: If the stand-in could not be written back.
    """
    static = [layer for layer in cache.layers if isinstance(layer, StaticLayer)]
    if not static or (batch_size == 1 and all(layer.is_croppable for layer in static)):
        if not is_returned:
            append_in_place(cache)
        return cache
    sliding = [layer for layer in static if type(layer) is not StaticLayer]
    if has_linear_attention(cache) or (sliding and is_returned):
        raise UnsupportedGenerationError(
            f"`cache` is static and has layers of type {type((sliding or static)[0]).__name__}, which cannot forget "
            "rejected tokens. Use the default dynamic cache (`cache_implementation=None`)."
        )
    stand_in = DynamicCache(config=config.get_text_config(decoder=True))
    length = int(cache.get_seq_length())
    if length:
        for layer_idx, layer in enumerate(cache.layers):
            stand_in.update(layer.keys[:, :, :length].clone(), layer.values[:, :, :length].clone(), layer_idx)
    return stand_in


def write_back(stand_in: Cache, cache: Cache) -> None:
    """Fills a static cache from its dynamic stand-in, see [`working_cache`].

    Args:
        stand_in (`Cache`): What was decoded with.
        cache (`Cache`): The static cache.
    """
    cache.reset()
    for source, destination in zip(stand_in.layers, cache.layers, strict=True):
        destination.update(source.keys, source.values)


def start_recording(cache: Cache) -> list[DynamicSlidingWindowLayer]:
    """Makes sliding-window layers keep what a later crop needs. Linear layers are handled by snapshots instead.

    Args:
        cache (`Cache`): The target's cache.

    Returns:
        `list[DynamicSlidingWindowLayer]`: The layers that did not record before, for [`stop_recording`].
    """
    layers = [
        layer for layer in cache.layers if isinstance(layer, DynamicSlidingWindowLayer) and not layer.record_past
    ]
    for layer in layers:
        layer.record_past = True
    return layers


def stop_recording(layers: list[DynamicSlidingWindowLayer]) -> None:
    """Lets layers forget what is outside their window again, as they did before [`start_recording`]."""
    for layer in layers:
        layer.record_past = False


def remove_slots(cache: Cache, count: int) -> None:
    """Removes the last `count` slots of every attention layer.

    Called every round, with 0 as well: sliding-window layers trim themselves to the window only in `crop`.

    Args:
        cache (`Cache`): The target's cache.
        count (`int`): Slots to remove.
    """
    for layer in cache.layers:
        if getattr(layer, "is_initialized", True):
            _crop_layer(layer, count)


def _crop_layer(layer: Any, count: int) -> None:
    if not isinstance(layer, LinearAttentionCacheLayerMixin):
        layer.crop(-count)
    elif isinstance(layer, DynamicSlidingWindowLayer):
        DynamicSlidingWindowLayer.crop(layer, -count)
    elif isinstance(layer, DynamicLayer):
        DynamicLayer.crop(layer, -count)


def remove_slots_beyond(cache: Cache, length: int) -> None:
    """As [`remove_slots`], for a forward that was broken off: some layers have its rows and others do not.

    Args:
        cache (`Cache`): The target's cache.
        length (`int`): Slots to keep, in every attention layer.
    """
    for layer in cache.layers:
        if getattr(layer, "is_initialized", True) and isinstance(layer, CacheLayerMixin):
            _crop_layer(layer, max(int(layer.get_seq_length()) - length, 0))


def rows_by_shift(shifts: list[int]) -> dict[int, list[int]]:
    """Rows that move by the same number of slots; those that stay are left out."""
    return {shift: [row for row, own in enumerate(shifts) if own == shift] for shift in set(shifts) - {0}}


def shift_rows(cache: Cache, shifts: list[int]) -> None:
    """Moves each row's slots inside the used part of the cache; what leaves at one end returns at the other.

    Args:
        cache (`Cache`): The target's cache.
        shifts (`list[int]`): Slots to move to the right, per row; negative moves to the left.
    """
    groups = rows_by_shift(shifts)
    for layer in cache.layers:
        if not layer.is_initialized:
            continue
        for states in (layer.keys, layer.values):  # (batch_size, num_heads, slots, head_dim)
            for shift, rows in groups.items():
                states[rows] = torch.roll(states[rows], shift, dims=2)


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
