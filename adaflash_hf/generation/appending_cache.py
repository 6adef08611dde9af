"""Keys and values in buffers with room to spare, so that new ones are written behind the old ones.

A `DynamicCache` puts old and new states together in a new tensor in every layer and forward pass. That copies the
whole context twice a round, once for the target and once for the drafter; here only the new states are copied.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer


__all__ = ["AppendingLayer", "append_in_place", "appending_cache"]

# Least slots to spare in a new buffer; it has a quarter of its length to spare when that is more.
_SPARE_SLOTS = 128


class AppendingLayer(DynamicLayer):
    """A `DynamicLayer` whose `keys` and `values` are the used part of larger buffers.

    Whoever crops it, or writes into what it holds, need not know. Where `keys` and `values` were replaced by others,
    as when sequences are selected, the next update begins new buffers. Where gradients are asked for, and inside
    compiled code, it copies as its parent does.
    """

    _buffers: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Args:
            key_states (`torch.Tensor` of shape `(batch_size, num_heads, n, head_dim)`): New keys.
            value_states (`torch.Tensor` of shape `(batch_size, num_heads, n, head_dim)`): New values.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: All keys and values, as views that are valid until the next update.
        """
        if torch.compiler.is_compiling() or (torch.is_grad_enabled() and key_states.requires_grad):
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        used = self.get_seq_length()
        end = used + key_states.shape[-2]
        buffers = self._buffers
        if buffers is None or end > buffers[0].shape[-2] or not self._is_backed_by(buffers, key_states.shape[0]):
            buffers = self._buffers = self._larger_buffers(used, end, key_states, value_states)
        keys, values = buffers
        keys[:, :, used:end] = key_states
        values[:, :, used:end] = value_states
        self.keys, self.values = keys[:, :, :end], values[:, :, :end]
        return self.keys, self.values

    def _is_backed_by(self, buffers: tuple[torch.Tensor, torch.Tensor], batch_size: int) -> bool:
        # What was made in inference mode can be written in inference mode only.
        if buffers[0].shape[0] != batch_size or buffers[0].is_inference() > torch.is_inference_mode_enabled():
            return False
        pairs = zip(buffers, (self.keys, self.values), strict=True)
        return all(buffer.data_ptr() == held.data_ptr() and buffer.stride() == held.stride() for buffer, held in pairs)

    def _larger_buffers(
        self, used: int, end: int, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        slots = end + max(end // 4, _SPARE_SLOTS)
        keys, values = (new.new_empty(*new.shape[:2], slots, new.shape[-1]) for new in (key_states, value_states))
        if used:
            keys[:, :, :used] = self.keys
            values[:, :, :used] = self.values
        return keys, values

    def reset(self) -> None:
        """Forgets everything and gives the buffers back."""
        self._buffers = None
        super().reset()


def appending_cache() -> DynamicCache:
    """An empty cache of [`AppendingLayer`], which makes its layers as they come."""
    cache = DynamicCache()
    cache.layer_class_to_replicate = AppendingLayer
    return cache


def append_in_place(cache: Cache) -> None:
    """Makes the layers of a cache that would copy on every update append instead; layers of other kinds stay.

    Args:
        cache (`Cache`): One that nobody else holds, on the way to an inference.
    """
    if getattr(cache, "offloading", False):
        return  # its layers are moved to and fro as whole tensors
    for layer in cache.layers:
        if type(layer) is DynamicLayer:
            layer.__class__ = AppendingLayer
    if getattr(cache, "layer_class_to_replicate", None) is DynamicLayer:
        cache.layer_class_to_replicate = AppendingLayer
