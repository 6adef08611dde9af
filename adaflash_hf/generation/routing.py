"""Routes `model.generate(assistant_model=drafter)` to AdaFlash decoding and leaves every other call as it was.

Importing the package imports this module, so it imports no model code itself: transformers' generation takes seconds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..errors import InvalidInputError


__all__ = ["install_routing", "is_our_drafter", "is_routing_active", "original_generate", "uninstall_routing"]

_ORIGINAL = "_adaflash_original_generate"


def is_our_drafter(model: Any) -> bool:
    """By `model_type`, which also holds for PEFT-wrapped, compiled and remote-code drafters."""
    return getattr(getattr(model, "config", None), "model_type", None) == "dflash_drafter"


def original_generate() -> Callable[..., Any]:
    """transformers' own `generate`, whether it is wrapped or not."""
    from transformers.generation import GenerationMixin

    return getattr(GenerationMixin.generate, _ORIGINAL, GenerationMixin.generate)


def install_routing() -> None:
    """
    Wraps `GenerationMixin.generate`; calling it again changes nothing.

    Importing `adaflash_hf` does this, or, where transformers' generation code is imported only later, that import.
    """
    from transformers.generation import GenerationMixin

    original = GenerationMixin.generate
    if hasattr(original, _ORIGINAL):
        return

    @functools.wraps(original)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        assistant = kwargs.get("assistant_model", args[6] if len(args) > 6 else None)
        if not is_our_drafter(assistant):
            custom_loop = kwargs.get("custom_generate", args[10] if len(args) > 10 else None)
            # transformers' own loops would fail on an attribute of the string.
            if isinstance(assistant, str) and custom_loop is None:
                raise InvalidInputError(
                    f"`assistant_model` is the string {assistant!r}, expected a model. Load it first: "
                    f"`assistant_model=AutoModel.from_pretrained({assistant!r})`."
                )
            return original(self, *args, **kwargs)
        from .drafted_generate import generate_with_drafter
        from .stock_loop import is_left_to_stock_loop

        if is_left_to_stock_loop(self, assistant, args, kwargs):
            return original(self, *args, **kwargs)
        return generate_with_drafter(self, *args, original_generate=original, **kwargs)

    setattr(generate, _ORIGINAL, original)
    GenerationMixin.generate = generate


def uninstall_routing() -> None:
    """Puts transformers' own `generate` back."""
    from transformers.generation import GenerationMixin

    original = getattr(GenerationMixin.generate, _ORIGINAL, None)
    if original is not None:
        GenerationMixin.generate = original


def is_routing_active() -> bool:
    """Whether `generate(assistant_model=drafter)` reaches AdaFlash decoding."""
    from transformers.generation import GenerationMixin

    return hasattr(GenerationMixin.generate, _ORIGINAL)
