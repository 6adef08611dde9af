"""Callbacks of engines and drafters, whose failures are theirs alone."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any


__all__ = ["Callbacks"]

logger = logging.getLogger(__name__)


class Callbacks:
    """Functions that want to be told of something. One that raises is logged, and called again the next time.

    Args:
        owner (`str`, defaults to `"the engine"`): Whose they are, for the log.
    """

    def __init__(self, owner: str = "the engine") -> None:
        self._owner = owner
        self._functions: list[list[Callable[..., Any]]] = []

    def register(self, function: Callable[..., Any]) -> Callable[[], None]:
        """Adds a function.

        Returns:
            `Callable`: Call it to take the function out again; a second call does nothing.
        """
        entry = [function]  # the same function may be registered twice
        self._functions.append(entry)

        def unregister() -> None:
            self._functions = [other for other in self._functions if other is not entry]

        return unregister

    def call(self, *args: Any) -> None:
        """Calls all functions, in the order in which they came."""
        for (function,) in list(self._functions):
            try:
                function(*args)
            except Exception:
                logger.exception("The callback %r of %s failed; generation goes on.", function, self._owner)

    def __bool__(self) -> bool:
        """Whether anybody has registered."""
        return bool(self._functions)
