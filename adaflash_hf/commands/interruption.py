"""Says what is left of a long command that is stopped in the middle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer

from ..errors import AdaFlashError


__all__ = ["telling_what_is_kept"]


@contextmanager
def telling_what_is_kept(describe: Callable[[], str]) -> Iterator[None]:
    """
    A block of which part may be done when the user presses Ctrl-C, or an error ends it.

    Args:
        describe (`Callable[[], str]`):
            Says what is kept and how to go on; nothing where there is nothing.
    """
    try:
        yield
    except (KeyboardInterrupt, AdaFlashError):
        if text := describe():
            typer.echo(f"\n{text}", err=True)
        raise
