"""A lock that nobody waits for longer than until his turn comes."""

from __future__ import annotations

import threading
from collections import deque


__all__ = ["FairLock"]


class FairLock:
    """
    Goes to whoever has waited longest, and may be taken again by the thread that has it.

    `threading.RLock` goes to whoever asks for it first once it is free. That is the thread that has just released it
    if holding it is nearly all that it does, as for one that runs an engine's rounds: others wait until it is idle.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._owner: int | None = None
        self._depth = 0
        self._turns: deque[tuple[int, threading.Lock]] = deque()

    def __enter__(self) -> FairLock:
        me = threading.get_ident()
        with self._guard:
            if self._owner in (None, me):
                self._owner, self._depth = me, self._depth + 1
                return self
            turn = threading.Lock()
            turn.acquire()
            self._turns.append((me, turn))
        try:
            turn.acquire()
        except BaseException:  # an interrupt, such as by the keyboard
            self._give_up(me, turn)
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        with self._guard:
            self._leave()

    def _leave(self) -> None:
        self._depth -= 1
        if self._depth:
            return
        self._owner = None
        if self._turns:
            self._owner, turn = self._turns.popleft()
            self._depth = 1
            turn.release()

    def _give_up(self, me: int, turn: threading.Lock) -> None:
        with self._guard:
            if (me, turn) in self._turns:
                self._turns.remove((me, turn))
            else:  # it came at the same moment
                self._leave()
