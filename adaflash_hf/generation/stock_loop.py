"""transformers' own DFlash loop, which `generate(speculation_type="dflash")` asks for: what it would get wrong.

It comes with transformers and is left as it is. Without this package it is all there is. With it, calls are refused in
words that it answers with other tokens than plain decoding, or with an error from deep inside.
"""

from __future__ import annotations

from typing import Any

from transformers.cache_utils import StaticCache

from ..errors import InvalidInputError, UnsupportedGenerationError
from .compatibility import check_drafter_fits_target
from .generation_options import option_value


__all__ = ["is_left_to_stock_loop"]


def is_left_to_stock_loop(model: Any, drafter: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """
    Whether a call of `generate()` asks for transformers' own DFlash loop.

    Args:
        model (`PreTrainedModel`): The target.
        drafter (`PreTrainedModel`): The DFlash drafter.
        args (`tuple`): Positional arguments of the call, without the model.
        kwargs (`dict`): Keyword arguments of the call.

    Raises:
        DrafterCompatibilityError: If that loop is asked for, and the drafter does not fit.
        InvalidInputError: If it would misread the drafter.
        UnsupportedGenerationError: If it would answer wrongly, or fail.
    """
    config = kwargs.get("generation_config", args[1] if len(args) > 1 else None)
    if option_value("speculation_type", model, config, kwargs) != "dflash":
        return False
    if drafter.config.block_layout != "anchor_then_masks":
        raise InvalidInputError(
            "`speculation_type` is 'dflash', transformers' own loop, which takes row 1 of a block as its first draft, "
            f"but the drafter's `block_layout` is {drafter.config.block_layout!r}. Leave `speculation_type` out."
        )
    check_drafter_fits_target(drafter, model)
    if (reason := _reason_to_refuse(model, config, kwargs)) is not None:
        raise UnsupportedGenerationError(
            f"`speculation_type` is 'dflash', transformers' own loop, {reason}. Leave `speculation_type` out to "
            "decode with AdaFlash's loop."
        )
    return True


def _reason_to_refuse(model: Any, config: Any, kwargs: dict[str, Any]) -> str | None:
    def option(name: str) -> Any:
        return option_value(name, model, config, kwargs)

    cache: Any = kwargs.get("cache", kwargs.get("past_key_values"))
    if hasattr(cache, "get_seq_length") and (length := int(cache.get_seq_length())) > 0:
        return f"which answers otherwise with a cache that holds tokens already ({length} here)"
    if isinstance(cache, StaticCache) or option("cache_implementation") == "static":
        return "which writes beyond the end of a static cache"
    if option("use_cache") is False:
        return "which needs a cache, but `use_cache` is False"
    if option("guidance_scale") not in (None, 1):
        return f"which answers otherwise with `guidance_scale` {option('guidance_scale')}"
    if kwargs.get("inputs_embeds") is not None:
        return "which does not take `inputs_embeds`"
    wanted = [name for name in ("output_hidden_states", "output_attentions") if option(name)]
    if wanted and option("return_dict_in_generate"):
        return f"which cannot return what `{wanted[0]}` asks for"
    return None
