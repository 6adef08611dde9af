"""Options of one `generate()` call or engine request, which may be in its arguments or in two configurations."""

from __future__ import annotations

import copy
from typing import Any


__all__ = ["option_value", "take_stop_strings"]


def option_value(name: str, model: Any, generation_config: Any, kwargs: dict[str, Any]) -> Any:
    """
    Value of an option, from wherever `generate()` would take it.

    Args:
        name (`str`): Field of `GenerationConfig`.
        model (`PreTrainedModel`): Its own configuration comes last.
        generation_config (`GenerationConfig`, *optional*): Of the call.
        kwargs (`dict`): Arguments of the call, which come first.
    """
    if name in kwargs:
        return kwargs[name]
    configs = (generation_config, getattr(model, "generation_config", None))
    values = (getattr(config, name, None) for config in configs)
    return next((value for value in values if value is not None), None)


def take_stop_strings(model: Any, generation_config: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """
    Takes `stop_strings` out of a call, for a criterion that is made here.

    Args:
        model (`PreTrainedModel`): The target.
        generation_config (`GenerationConfig`, *optional*): Of the call; not changed.
        kwargs (`dict`): Arguments of the call; changed in place.

    Returns:
        `tuple`: The strings, None if there are none, and `generation_config` to pass on.
    """
    strings = option_value("stop_strings", model, generation_config, kwargs)
    if strings is None:
        return None, generation_config
    kwargs.pop("stop_strings", None)
    if getattr(generation_config, "stop_strings", None) is not None:
        generation_config = copy.deepcopy(generation_config)
        generation_config.stop_strings = None
    if model.generation_config.stop_strings is not None:
        kwargs["stop_strings"] = None  # overrides the model's default, which a None in `generation_config` would not
    return strings, generation_config
