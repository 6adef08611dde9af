"""Names of the ways of decoding that a benchmark compares, and what each needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..errors import InvalidInputError
from .bench_results import PLAIN


if TYPE_CHECKING:
    from ..configuration_dflash_drafter import DFlashDrafterConfig


__all__ = [
    "DRAFTING_METHODS",
    "METHODS",
    "OSD",
    "REFERENCE_METHODS",
    "TRANSFORMERS_MTP",
    "check_models_of_method",
    "check_rows_of_method",
    "needs_drafter",
    "parameter_of_method",
    "split_method_name",
]

# By heads of the target's own, which not every target has.
TRANSFORMERS_MTP = "transformers_mtp"
DRAFTING_METHODS = ("dflash", "adaflash", "confidence", "cost_aware", "oracle")
REFERENCE_METHODS = (
    "transformers",
    "transformers_cb",
    "prompt_lookup",
    "transformers_dflash",
    TRANSFORMERS_MTP,
    "assistant",
)
# Whole blocks of another drafter, such as one that was adapted by online speculative decoding.
OSD = "osd"
METHODS = (PLAIN, *DRAFTING_METHODS, OSD, *REFERENCE_METHODS)
_PARAMETERS: dict[str, Callable[[str], Any]] = {
    "dflash": int,
    "adaflash": float,
    "confidence": float,
    OSD: int,
    "prompt_lookup": int,
}


def needs_drafter(name: str) -> bool:
    """Whether a method, given with or without its parameter, decodes with the drafter."""
    return split_method_name(name)[0] in (*DRAFTING_METHODS, "transformers_dflash")


def split_method_name(name: str) -> tuple[str, str | None]:
    """
    A method and its parameter.

    Args:
        name (`str`):
            Such as `"dflash"` or `"dflash:4"`.
    """
    base, _, parameter = name.partition(":")
    if base not in METHODS:
        raise InvalidInputError(f"`method` is {name!r}, expected one of {', '.join(METHODS)}.")
    if parameter and base not in _PARAMETERS:
        raise InvalidInputError(f"`method` is {name!r}, but {base} takes no parameter; write {base!r}.")
    if parameter:
        parameter_of_method(base, parameter, None)
    return base, parameter or None


def check_rows_of_method(name: str, config: DFlashDrafterConfig) -> None:
    """
    Refuse a fixed number of rows that the blocks do not have: results would name what was not measured.

    Args:
        name (`str`):
            With or without its parameter.
        config (`DFlashDrafterConfig`):
            Of the drafter it drafts with.
    """
    base, parameter = split_method_name(name)
    rows = config.draft_length + 1
    if base in ("dflash", OSD) and parameter_of_method(base, parameter, rows) > rows:
        raise InvalidInputError(
            f"`method` is {name!r}, but the drafter's blocks have {rows} rows to verify; {base!r} verifies all."
        )


def check_models_of_method(
    name: str, *, has_drafter: bool, has_length_head: bool, has_osd_drafter: bool, has_assistant: bool
) -> None:
    """
    Refuse a method that lacks a model, which need not be loaded for that.

    Args:
        name (`str`):
            With or without its parameter.
        has_drafter (`bool`), has_length_head (`bool`), has_osd_drafter (`bool`), has_assistant (`bool`):
            What there is, see [`BenchModels`].
    """
    base, _ = split_method_name(name)
    if needs_drafter(name) and not has_drafter:
        raise InvalidInputError(f"`method` is {name!r}, which needs a drafter; pass one.")
    if base == "adaflash" and not has_length_head:
        raise InvalidInputError(
            f"`method` is {name!r}, but the drafter has no length head; leave the method out, or train a head with "
            "`adaflash train --only length-head`."
        )
    if base == OSD and not has_osd_drafter:
        raise InvalidInputError(f"`method` is {name!r}, which needs a drafter of its own; pass --osd-drafter.")
    if base == "assistant" and not has_assistant:
        raise InvalidInputError("`method` is 'assistant', which needs a small model; pass --assistant.")


def parameter_of_method(base: str, text: str | None, default: Any) -> Any:
    """
    What stands after a method's colon.

    Args:
        base (`str`), text (`str`, *optional*):
            From [`split_method_name`].
        default (`Any`):
            If nothing stands there.
    """
    try:
        return default if text is None else _PARAMETERS[base](text)
    except ValueError as error:
        raise InvalidInputError(f"`method` is '{base}:{text}', but {text!r} is not a number.") from error
