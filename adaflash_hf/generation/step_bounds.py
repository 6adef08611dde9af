"""Recurrent layers that compute a block of tokens as they compute single ones.

Mamba-2 layers of transformers bound the step size (`time_step_limit`) of several tokens at once, not of a single one.
Plain decoding therefore continues a prompt without the bound, and a verified block has to do the same.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn


__all__ = ["StepBounds"]

_NO_BOUND = (0.0, math.inf)  # steps are positive anyway


class StepBounds:
    """
    The bounds of a model's recurrent layers, which can be lifted for forward passes.

    Several users may lift them at once, but whoever runs a prompt through the same model meanwhile runs it unbounded.

    Args:
        model (`nn.Module`): The target, possibly wrapped.
    """

    _lock = threading.Lock()
    _lifted: WeakKeyDictionary[nn.Module, tuple[Any, int]] = WeakKeyDictionary()  # the bound, and by how many users

    def __init__(self, model: nn.Module) -> None:
        self._layers = [module for module in model.modules() if getattr(module, "time_step_limit", None) is not None]

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Within this, the model's layers know no bound."""
        with self._lock:
            for layer in self._layers:
                bound, users = self._lifted.get(layer, (layer.time_step_limit, 0))
                self._lifted[layer] = bound, users + 1
                layer.time_step_limit = _NO_BOUND  # type: ignore[assignment]
        try:
            yield
        finally:
            with self._lock:
                for layer in self._layers:
                    bound, users = self._lifted.pop(layer)
                    if users > 1:
                        self._lifted[layer] = bound, users - 1
                    else:
                        layer.time_step_limit = bound
