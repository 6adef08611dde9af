"""The progress bar of commands in which a target writes text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


if TYPE_CHECKING:
    from rich.console import Console


__all__ = ["generation_progress"]


def generation_progress(title: str, console: Console) -> Progress:
    """
    A bar with counts, the time left and a field `note`.

    Args:
        title (`str`):
            What is counted.
        console (`rich.console.Console`):
            Where it is drawn.
    """
    return Progress(
        TextColumn(title),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
    )
