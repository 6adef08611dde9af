"""Attention over packed rows of many requests, registered with transformers under the name of `ATTENTION_NAME`.

A model uses it for one forward pass at a time: [`AttentionSwitch`] puts the name into the configuration that its
attention modules read and takes it out again. Other threads that run the same model meanwhile get its own attention.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..errors import UnsupportedGenerationError
from .attention_kernels import Scoring, attend
from .packed_cache import PackedStep
from .packed_flash import can_use_flash, flash_attention
from .packed_masks import padded_mask
from .packed_plan import AttentionCall, GroupPlan
from .packed_storage import LayerBuffer
from .visibility import Visibility


__all__ = ["ATTENTION_NAME", "AttentionSwitch", "rename_attention"]

# Not "adaflash…": transformers takes every name with "flash" in it for flash attention.
ATTENTION_NAME = "packed_requests"

# The forward pass that this thread is in.
_STEP: ContextVar[PackedStep | None] = ContextVar("adaflash_packed_step", default=None)


class _Switched:
    """A configuration that currently names the packed attention."""

    __slots__ = ("config", "depth", "original")

    def __init__(self, config: PreTrainedConfig):
        self.config, self.original, self.depth = config, config._attn_implementation, 0


_SWITCHED: dict[int, _Switched] = {}
_LOCK = threading.Lock()


class AttentionSwitch:
    """Lets a model attend to packed rows during a forward pass.

    Args:
        model (`nn.Module`): The model, whose attention modules have a `layer_idx` and a `config`.
    """

    def __init__(self, model: nn.Module):
        # Some models number their decoder layers too, which have no configuration.
        configs = [getattr(module, "config", None) for module in model.modules() if hasattr(module, "layer_idx")]
        # The configuration that layers read is also the one that masks are made by.
        unique = {id(config): config for config in configs if isinstance(config, PreTrainedConfig)}
        self._configs: Sequence[PreTrainedConfig] = list(unique.values())

    @contextmanager
    def active(self, step: PackedStep) -> Iterator[None]:
        """The model's forward pass inside this context is `step`."""
        for config in self._configs:
            _switch_on(config)
        token = _STEP.set(step)
        try:
            yield
        finally:
            _STEP.reset(token)
            for config in self._configs:
                _switch_off(config)


def _switch_on(config: PreTrainedConfig) -> None:
    with _LOCK:
        switched = _SWITCHED.get(id(config))
        if switched is None:
            switched = _SWITCHED[id(config)] = _Switched(config)
            config._attn_implementation = ATTENTION_NAME
        switched.depth += 1


def _switch_off(config: PreTrainedConfig) -> None:
    with _LOCK:
        switched = _SWITCHED[id(config)]
        switched.depth -= 1
        if switched.depth == 0:
            del _SWITCHED[id(config)]
            if config._attn_implementation == ATTENTION_NAME:
                config._attn_implementation = switched.original


def rename_attention(config: PreTrainedConfig, old: str, new: str) -> bool:
    """
    Names another attention in a configuration, also while a packed forward pass has put the name there aside.

    Args:
        config (`PreTrainedConfig`): The configuration.
        old (`str`): The name to replace.
        new (`str`): What to replace it with.

    Returns:
        `bool`: Whether `old` was there.
    """
    with _LOCK:
        switched = _SWITCHED.get(id(config))
        if (config._attn_implementation if switched is None else switched.original) != old:
            return False
        if switched is None:
            config._attn_implementation = new
        else:
            switched.original = new
        return True


def _original_name(config: PreTrainedConfig) -> str:
    """The attention that a thread outside of any packed forward pass means."""
    with _LOCK:
        switched = _SWITCHED.get(id(config))
        return config._attn_implementation if switched is None else switched.original


# What transformers calls


@torch.compiler.disable
def packed_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attends each row to the keys of its own request.

    Args:
        module (`nn.Module`): The attention module.
        query (`torch.Tensor` of shape `(1, num_heads, num_rows, head_dim)`): Packed queries.
        key, value (`torch.Tensor`): The new states; those in the buffers are used.
        attention_mask (`torch.Tensor`, *optional*): Always None, see [`packed_mask`].
        scaling (`float`, *optional*): Factor on the scores; one over the root of `head_dim` by default.
        dropout (`float`): Must be zero.
        softcap (`float`, *optional*): c in `c * tanh(scores / c)`.
        s_aux (`torch.Tensor` of shape `(num_heads,)`, *optional*): Attention sinks.

    Returns:
        `tuple`: Output of shape `(1, num_rows, num_heads, head_dim)`, and None in place of weights.
    """
    step = _STEP.get()
    if step is None:
        attend = _original_attention(module)
        extras = {name: extra for name, extra in (("softcap", softcap), ("s_aux", s_aux)) if extra is not None}
        return attend(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **extras, **kwargs)
    if attention_mask is not None or kwargs.get("position_bias") is not None or dropout:
        raise UnsupportedGenerationError(
            f"{type(module).__name__} passes a mask, a position bias or dropout of its own to its attention, which "
            "packed batches do not know. Use `generate()` with this target."
        )
    step.num_attended += 1
    layer: Any = module.layer_idx
    plan = step.plan(layer)
    if layer not in step.cache.checked_layers:
        _check_states(module, plan.calls[0].arena.layers[layer], key, value)
        step.cache.checked_layers.add(layer)
    rows = query[0].transpose(0, 1)  # (num_rows, num_heads, head_dim)
    if s_aux is None and can_use_flash(rows, value):
        output = flash_attention(plan, layer, rows, scaling, softcap)
    else:
        output = _attend(plan, layer, rows, Scoring(scaling, softcap, s_aux))
    return output[None], None


def packed_mask(*args: Any, **kwargs: Any) -> Any:
    """No mask: every request sees its own keys only, by the rule of the layer. Other rules are refused."""
    step = _STEP.get()
    if step is None:
        config = kwargs["config"]
        return ALL_MASK_ATTENTION_FUNCTIONS[_original_name(config)](*args, **kwargs)
    cache = step.cache
    index = cache.group_of_layer[step.mask_layer]
    if index not in cache.checked_groups:
        _check_rule(kwargs["mask_function"], cache.groups[index].visibility, kwargs["device"])
        cache.checked_groups.add(index)
    return None


AttentionInterface.register(ATTENTION_NAME, packed_attention_forward)
AttentionMaskInterface.register(ATTENTION_NAME, packed_mask)


def _original_attention(module: nn.Module) -> Any:
    name = _original_name(module.config)
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)


def _check_states(module: nn.Module, buffer: LayerBuffer, key: torch.Tensor, value: torch.Tensor) -> None:
    """Refuses latent attention, such as DeepSeek-V3's: it attends to something else than what it caches."""
    cached, attended = (buffer.keys.shape[-1], buffer.values.shape[-1]), (key.shape[-1], value.shape[-1])
    if cached != attended:
        raise UnsupportedGenerationError(
            f"{type(module).__name__} caches states of sizes {cached} and attends to keys and values of sizes "
            f"{attended}; packed batches serve models that attend to what they cache. Use `generate()` with this "
            "target."
        )


def _check_rule(mask_function: Any, visibility: Visibility, device: torch.device) -> None:
    """Compares a model's rule with ours around the edges of the window."""
    window = visibility.window or 2
    query = torch.tensor(3 * window, device=device)
    keys = torch.tensor([-2 * window, -window, 1 - window, -1, 0, 1], device=device) + query
    expected = visibility.mask(query, keys)
    zero = torch.zeros((), dtype=torch.long, device=device)
    try:
        allowed = torch.stack([mask_function(zero, zero, query, key).expand(()) for key in keys])
    except (IndexError, RuntimeError) as error:  # a rule that looks something up per token
        raise UnsupportedGenerationError(_unknown_rule(visibility)) from error
    if not torch.equal(allowed.bool(), expected):
        raise UnsupportedGenerationError(_unknown_rule(visibility))


def _unknown_rule(visibility: Visibility) -> str:
    window = "" if visibility.window is None else f" with a window of {visibility.window}"
    return (
        f"The target masks its attention in another way than causally{window}, which packed batches do not know. Use "
        "`generate()` with this target."
    )


def _attend(plan: GroupPlan, layer: int, rows: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    """Padded attention, call by call; the result has the shape of `rows`."""
    answers = [_answer(call, plan, call.arena.layers[layer], rows, scoring) for call in plan.calls]
    output = answers[0] if len(answers) == 1 else torch.cat(answers)
    return output if plan.restore is None else output.index_select(0, plan.restore.on(output.device))


def _answer(
    call: AttentionCall, plan: GroupPlan, buffer: LayerBuffer, rows: torch.Tensor, scoring: Scoring
) -> torch.Tensor:
    """Answers of one call, padding included, of shape `(num_requests * call.rows, num_heads, head_dim)`."""
    keys = buffer.keys[call.begin : call.end, call.first_key : call.last_key].transpose(1, 2)
    values = buffer.values[call.begin : call.end, call.first_key : call.last_key].transpose(1, 2)
    if not isinstance(call.queries, slice):
        rows = rows.index_select(0, call.queries.on(rows.device))
    elif len(plan.calls) > 1:
        rows = rows[call.queries]
    requests, key_heads = keys.shape[:2]
    heads, head_dim = rows.shape[1:]
    group_size = heads // key_heads
    # All query heads of a key head become rows of one head, so that keys are neither repeated nor read twice.
    if call.rows == 1:
        folded = rows.reshape(requests, key_heads, group_size, head_dim)
    else:
        split = rows.reshape(requests, call.rows, key_heads, group_size, head_dim).transpose(1, 2)
        folded = split.reshape(requests, key_heads, call.rows * group_size, head_dim)
    mask = _mask_of(call, plan, folded, group_size)
    output = attend(folded, keys, values, mask, scoring)
    if call.rows == 1:
        return output.reshape(requests, heads, -1)
    split = output.view(requests, key_heads, call.rows, group_size, -1).transpose(1, 2)
    return split.reshape(requests * call.rows, heads, -1)


def _mask_of(call: AttentionCall, plan: GroupPlan, folded: torch.Tensor, group_size: int) -> torch.Tensor | None:
    kind = (folded.dtype, folded.device, group_size)
    if kind in call.masks:
        return call.masks[kind]
    if call.spans is None:
        mask = plan.group.bands.corner(call.rows, call.last_key - call.first_key, *kind)
    else:
        keys = (call.first_key, call.last_key)
        mask = padded_mask(plan.group.visibility, call.spans, call.rows, keys, *kind)
    call.masks[kind] = mask
    return mask
