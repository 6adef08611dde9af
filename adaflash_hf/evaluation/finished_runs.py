"""Finished runs of a comparison, kept in a file each: how they are read back, and when they are not taken up."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from ..error_text import first_line
from ..errors import InvalidInputError


__all__ = ["read_finished_run", "refuse_difference"]

Run = TypeVar("Run")


def read_finished_run(path: Path, kind: Callable[..., Run]) -> Run:
    """
    One run.

    Args:
        path (`Path`):
            Its file.
        kind (`type`):
            Data class with the file's fields.

    Raises:
        InvalidInputError: it is damaged.
    """
    try:
        return kind(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise InvalidInputError(
            f"{str(path)!r} cannot be read as a finished run ({first_line(error)}). Remove it to have it repeated."
        ) from error


def refuse_difference(
    path: Path, there: Mapping[str, Any], now: Mapping[str, Any], names: Iterable[str], elsewhere: str
) -> None:
    """
    Refuse to go on with a run that was done otherwise.

    Args:
        path (`Path`):
            Its file.
        there (`Mapping[str, Any]`), now (`Mapping[str, Any]`):
            Settings of the run, and those asked for, as JSON has them.
        names (`Iterable[str]`):
            Of the settings that must agree.
        elsewhere (`str`):
            What to choose another of, for the message.

    Raises:
        InvalidInputError: they differ.
    """
    for name in sorted(names):
        if there.get(name) != now.get(name):
            raise InvalidInputError(
                f"{path} was done with `{name}` {there.get(name)!r}, now it is {now.get(name)!r}; runs that differ in "
                f"it cannot be compared. Choose another {elsewhere}, or remove the runs there."
            )
