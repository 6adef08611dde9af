"""Pieces of this package's messages: what another library's error says, and how to get what is missing."""

from __future__ import annotations

import re


__all__ = ["first_line", "install_hint"]


# What validators of data classes put before the reason: pydantic's, and those of transformers' configurations.
_BEFORE_REASON = re.compile(r"\A(Value error, |(Class v|V)alidation error for (field|validator) '.*':\s+\w+: )")


def first_line(error: BaseException) -> str:
    """
    The first line of an error's text that gives a reason, without a full stop; its class if there is no text.

    Args:
        error (`BaseException`):
            Of a library that may write paragraphs.
    """
    lines = _BEFORE_REASON.sub("", str(error).strip()).splitlines()
    return lines[0].rstrip(" .") if lines else type(error).__name__


def install_hint(extra: str) -> str:
    """
    The command that installs an extra of this package, in a clone and elsewhere.

    Args:
        extra (`str`):
            Its name.
    """
    return f"pip install -e '.[{extra}]' in the clone, or pip install 'adaflash-hf[{extra}]'"
