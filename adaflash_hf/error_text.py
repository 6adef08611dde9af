"""Pieces of this package's messages: what another library's error says, and how to get what is missing."""

from __future__ import annotations


__all__ = ["first_line", "install_hint"]


def first_line(error: BaseException) -> str:
    """
    The first line of an error's text without a full stop, or its class if it has none.

    Args:
        error (`BaseException`):
            Of a library that may write paragraphs.
    """
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(" .") if lines else type(error).__name__


def install_hint(extra: str) -> str:
    """
    The command that installs an extra of this package, in a clone and elsewhere.

    Args:
        extra (`str`):
            Its name.
    """
    return f"pip install -e '.[{extra}]' in the clone, or pip install 'adaflash-hf[{extra}]'"
