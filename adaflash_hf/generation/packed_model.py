"""What packed target and packed drafter have in common: a model, a cache of slots, and a forward pass over both."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from .compatibility import unwrap_model
from .packed_attention import AttentionSwitch
from .packed_cache import PackedCache, PackedStep
from .visibility import Visibility


__all__ = ["PackedModel", "cache_bytes_per_layer"]


def cache_bytes_per_layer(config: PreTrainedConfig, itemsize: int) -> int:
    """Bytes that one token takes in the cache of one layer of usual design: an estimate before the first forward."""
    if getattr(config, "is_heterogeneous", False):
        return max(cache_bytes_per_layer(layer, itemsize) for layer in config.per_layer_config)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * heads * head_dim * itemsize


def _input_device(model: PreTrainedModel) -> torch.device:
    """Where inputs are wanted. An offloaded model has its weights on the meta device outside its own forward."""
    if model.device.type != "meta":
        return model.device
    hooks = (getattr(module, "_hf_hook", None) for module in model.modules())
    devices = (getattr(hook, "execution_device", None) for hook in hooks)
    return torch.device(next(device for device in devices if device is not None))


class PackedModel:
    """A model and the slots of the requests that it serves. Not for several threads at once.

    Args:
        model (`nn.Module`): The model, possibly wrapped.
        visibilities (`Sequence[Visibility]`): Which keys a row sees, per layer.
        config (`PreTrainedConfig`): Of the decoder.
    """

    def __init__(self, model: nn.Module, visibilities: Sequence[Visibility], config: PreTrainedConfig):
        self.model = model
        self.base_model: PreTrainedModel = unwrap_model(model)
        self.device = _input_device(self.base_model)
        estimate = cache_bytes_per_layer(config, self.base_model.dtype.itemsize)
        self.cache = PackedCache(visibilities, self.device.type, estimate)
        self.num_layers = len(visibilities)
        self._switch = AttentionSwitch(self.base_model)
        self._forward_arguments = inspect.signature(self.base_model.forward).parameters

    @contextmanager
    def _step(
        self, slots: Sequence[int], counts: Sequence[int], contexts: Sequence[int] | None = None, keep: bool = True
    ) -> Iterator[PackedStep]:
        """A forward pass; slots stay as they were if it fails. With `keep` false only contexts stay in the cache."""
        step = self.cache.begin(slots, counts, contexts)
        try:
            with self._switch.active(step):
                yield step
        except BaseException:
            self.cache.abandon()
            raise
        self.cache.finish(keep)

    def allocate(self, expected_tokens: int = 0) -> int:
        """Opens a slot for a request. `expected_tokens`, if known, saves moving the slot as it grows."""
        return self.cache.allocate(expected_tokens)

    def release(self, slot: int) -> None:
        """Closes a slot; its memory is used again or given back."""
        self.cache.release(slot)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the buffers, used or not."""
        return self.cache.memory_bytes

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one more token of a request takes in the layers that keep everything."""
        return self.cache.bytes_per_token

    def bytes_for(self, num_tokens: int) -> int:
        """Bytes that a request of `num_tokens` tokens takes, rounding included."""
        return self.cache.bytes_for(num_tokens)
