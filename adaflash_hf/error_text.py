"""What another library's error says, short enough to stand within a message of this package."""

from __future__ import annotations


__all__ = ["first_line"]


def first_line(error: BaseException) -> str:
    """
    The first line of an error's text without a full stop, or its class if it has none.

    Args:
        error (`BaseException`):
            Of a library that may write paragraphs.
    """
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(" .") if lines else type(error).__name__
