"""Whether a target has heads for multi-token prediction, as transformers' `use_mtp` needs them."""

from __future__ import annotations

from ..embedded_target import EMBEDDED_TARGET_NAME
from ..error_text import first_line
from ..errors import InvalidInputError
from ..hub_connection import hub_or_cache


__all__ = ["check_mtp_heads"]


def check_mtp_heads(target: str) -> None:
    """
    Refuse a target without them before it is loaded.

    Args:
        target (`str`):
            Value of `--target`.
    """
    if target == EMBEDDED_TARGET_NAME:
        raise _without_heads(target)
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        with hub_or_cache(target):
            config = AutoConfig.from_pretrained(target)
    except (OSError, ValueError, StrictDataclassError) as error:
        raise InvalidInputError(
            f"`--target` is {target!r} and its configuration cannot be read ({first_line(error)}). Pass a Hub id or a "
            "directory with a config.json."
        ) from error
    if not getattr(config.get_text_config(), "num_mtp_layers", None):
        raise _without_heads(target)


def _without_heads(target: str) -> InvalidInputError:
    return InvalidInputError(
        f"`--target` is {target!r}, whose configuration has no `num_mtp_layers`, so it predicts one token at a time; "
        "pass a --target with such heads."
    )
