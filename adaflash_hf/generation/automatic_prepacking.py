"""Prepacked linear layers while tokens are generated, without being asked and without a trace on the model.

Verification on a CPU pays with rearranged weights only (see `prepacking.py`), and nobody who calls
`generate(assistant_model=drafter)` should have to know that. The layers are [`PrepackedLinear`]s as long as a round
runs, and plain ones again afterwards; the rearranged copies are kept for the next call, as long as the model lives.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from torch import nn

from ..host_memory import available_memory_bytes
from .compatibility import unwrap_model
from .prepacking import (
    USERS,
    PrepackedLinear,
    can_prepack,
    can_prepack_full,
    can_prepack_half,
    is_kept_plain,
    is_rearranged,
)


__all__ = ["AutomaticPrepacking"]

logger = logging.getLogger(__name__)

# The rest is for caches, activations, and whoever else is on the machine.
_MOST_OF_MEMORY = 0.5
# Below this many bytes a copy is nobody's concern, whatever the system says of its memory.
_NOT_WORTH_ASKING = 64 << 20

_LOCK = threading.Lock()
_WARNED: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class AutomaticPrepacking:
    """
    A context in which linear layers of target and drafter are prepacked, to be entered any number of times and from
    any threads.

    Nothing is done to layers that gain nothing, that the user has prepacked, or that [`restore_linear_layers`] was
    called for; to compiled models; and where the copies would take more than half of the memory that is left.

    Args:
        target (`PreTrainedModel`):
            The target.
        drafter (`PreTrainedModel`, *optional*):
            The drafter.
    """

    def __init__(self, target: Any, drafter: Any = None) -> None:
        self._layers: list[nn.Linear] = []
        if not (can_prepack_half() and can_prepack_full()):
            return
        exact, drafting = list(_layers_to_pack(target)), list(_layers_to_pack(drafter))
        if not _fits_memory(exact + drafting, target):
            return
        for layer in drafting:
            # What is drafted need not be exact, and to a plain layer this attribute means nothing.
            layer.__dict__["allows_rounding"] = True
        self._layers = exact + drafting

    def __enter__(self) -> None:
        with _LOCK:
            for layer in self._layers:
                users = layer.__dict__.get(USERS, 0)
                if users or type(layer) is nn.Linear:
                    object.__setattr__(layer, "__class__", PrepackedLinear)
                    layer.__dict__[USERS] = users + 1

    def __exit__(self, *exc: object) -> None:
        with _LOCK:
            for layer in self._layers:
                users = layer.__dict__.pop(USERS, 0)
                if users > 1:
                    layer.__dict__[USERS] = users - 1
                elif users == 1:
                    object.__setattr__(layer, "__class__", nn.Linear)


def _layers_to_pack(model: Any) -> Iterator[nn.Linear]:
    base = None if model is None else unwrap_model(model)
    if base is None or base.device.type != "cpu" or _is_compiled(model):
        return
    for module in base.modules():
        is_lent = USERS in module.__dict__
        if (type(module) is nn.Linear or is_lent) and can_prepack(module) and not is_kept_plain(module):
            yield module


def _is_compiled(model: Any) -> bool:
    return hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None


def _fits_memory(layers: list[nn.Linear], target: nn.Module) -> bool:
    new = [layer.weight for layer in layers if not is_rearranged(layer)]
    needed = sum(weight.numel() * weight.element_size() for weight in new)
    if needed <= _NOT_WORTH_ASKING:
        return True
    available = available_memory_bytes()
    if available is not None and needed <= _MOST_OF_MEMORY * available:
        return True
    if target not in _WARNED:
        _WARNED.add(target)
        logger.warning(
            "Weights are not rearranged for blocks of rows, without which drafting pays less on a CPU: it takes up to "
            "%.1f GB, and %s. `adaflash_hf.prepack_linear_layers(target)` does it all the same, "
            "`adaflash_hf.restore_linear_layers(target)` silences this.",
            needed / 1e9,
            "it is not known how much is free" if available is None else f"{available / 1e9:.1f} GB are free",
        )
    return False
