"""Attention of a verified block without copies of its keys and values.

Where several query heads share one key head, transformers' `"sdpa"` attention has a way without copies for one row,
and none for several rows under a mask: it repeats all keys and values of the context for every query head, in every
layer and forward pass. Verification would pay for that where plain decoding does not, the more the longer the context.
Here the rows of the query heads that share a key head are put one behind the other, as if they were rows of one head.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .packed_attention import rename_attention
from .prepacking import version_of


__all__ = ["ATTENTION_NAME", "GroupedAttention"]

ATTENTION_NAME = "grouped_rows"
# What some models ask of their attention besides a mask; the plain implementation knows about it.
_SPECIAL = ("position_bias", "softcap", "s_aux")


def grouped_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As transformers' `sdpa_attention_forward`, for any caller.

    Args:
        module (`nn.Module`): The attention module.
        query (`torch.Tensor` of shape `(batch_size, num_heads, rows, head_dim)`): Queries.
        key, value (`torch.Tensor` of shape `(batch_size, num_key_value_heads, slots, head_dim)`): Keys and values.
        attention_mask (`torch.Tensor` of shape `(batch_size, 1 or num_heads, rows, slots)`, *optional*): The mask.
        dropout (`float`): Of attention weights.
        scaling (`float`, *optional*): Factor on the scores.

    Returns:
        `tuple`: Output of shape `(batch_size, rows, num_heads, head_dim)`, and None in place of weights.
    """
    batch_size, num_heads, rows, head_dim = query.shape
    groups = num_heads // key.shape[1]
    is_plain = groups == 1 or rows == 1 or attention_mask is None or attention_mask.shape[1] != 1 or dropout != 0
    if is_plain or any(kwargs.get(name) is not None for name in _SPECIAL):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    assert attention_mask is not None
    grouped = query.reshape(batch_size, -1, groups * rows, head_dim)
    mask = _grouped_bias(attention_mask, groups, query.dtype)
    output = nn.functional.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scaling)
    return output.reshape(batch_size, num_heads, rows, -1).transpose(1, 2).contiguous(), None


class _LastBias(threading.local):
    """The mask that this thread's last layer came with, and what was made of it: the next layer brings the same."""

    mask: weakref.ref[torch.Tensor] | None = None
    made_for: tuple[Any, ...] = ()
    bias: torch.Tensor | None = None


_LAST = _LastBias()


def _grouped_bias(mask: torch.Tensor, groups: int, dtype: torch.dtype) -> torch.Tensor:
    """What is added to the scores of grouped rows, of shape `(batch_size or 1, 1, groups * rows, slots)`."""
    made_for = (version_of(mask), groups, dtype)
    if _LAST.bias is None or _LAST.mask is None or _LAST.mask() is not mask or _LAST.made_for != made_for:
        bias = mask
        if mask.dtype == torch.bool:  # as PyTorch would do in every layer
            bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))
        _LAST.mask, _LAST.made_for, _LAST.bias = weakref.ref(mask), made_for, bias.repeat(1, 1, groups, 1)
    assert _LAST.bias is not None
    return _LAST.bias


AttentionInterface.register(ATTENTION_NAME, grouped_attention_forward)
AttentionMaskInterface.register(ATTENTION_NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


class GroupedAttention:
    """Puts a model's attention in groups for forward passes, where it is transformers' own `"sdpa"`.

    The name in the configuration changes meanwhile. What it stands for is right for everyone, so other threads that
    run the model at the same time get the same results as ever.

    Args:
        model (`nn.Module`): The target, possibly wrapped.
    """

    def __init__(self, model: nn.Module):
        self._configs: list[PreTrainedConfig] = []
        is_own = ALL_ATTENTION_FUNCTIONS.get("sdpa") is sdpa_attention_forward
        # Compiled code would be compiled again for the other name.
        if not is_own or any(_is_compiled(module) for module in model.modules()):
            return
        found: dict[int, PreTrainedConfig] = {}
        for module in model.modules():
            config = getattr(module, "config", None) if hasattr(module, "layer_idx") else None
            if isinstance(config, PreTrainedConfig) and getattr(module, "num_key_value_groups", 1) > 1:
                found[id(config)] = config
        devices = {parameter.device.type for parameter in model.parameters()}
        if devices <= {"cpu", "cuda"}:
            self._configs = list(found.values())

    @contextmanager
    def active(self) -> Iterator[None]:
        """Forward passes in this context attend in groups."""
        changed = [config for config in self._configs if rename_attention(config, "sdpa", ATTENTION_NAME)]
        try:
            yield
        finally:
            for config in changed:
                rename_attention(config, ATTENTION_NAME, "sdpa")


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
