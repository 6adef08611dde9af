"""When the running round, or the wait for one, will be over, by what this process has measured of it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from .online_arguments import OnlineTrainingArguments
from .replay_buffer import BufferDepth


__all__ = ["TimeLeft", "remaining_seconds"]


class TimeLeft:
    """
    Measures one trainer's rounds and waits. Saving and publishing are not foreseen: they are short.

    Attributes:
        end_s: When what goes on now is expected to end, in seconds since the epoch; None if nothing tells yet.
    """

    def __init__(self) -> None:
        self.end_s: float | None = None
        self._judge_s = 0.0
        self._train_began_s = 0.0
        self._first_look: tuple[float, BufferDepth] | None = None

    def look_at(self, depth: BufferDepth, arguments: OnlineTrainingArguments) -> None:
        """
        Foresee the end of the wait, by what has come in since it began.

        Args:
            depth (`BufferDepth`):
                What is in the buffer now.
            arguments (`OnlineTrainingArguments`):
                How much a round needs.
        """
        now_s = time.monotonic()
        if self._first_look is None:
            self._first_look = now_s, depth
        began_s, first = self._first_look
        needed = [(first.waiting, depth.waiting, arguments.round_size)]
        if arguments.is_guarded:
            needed.append((first.held_out, depth.held_out, arguments.min_held_out))
        waits = [_seconds_left(now_s - began_s, done - begin, total - done) for begin, done, total in needed]
        known = [wait for wait in waits if wait is not None]
        self._expect(max(known) if len(known) == len(waits) else None)

    @contextmanager
    def judging(self, *, is_last: bool) -> Iterator[None]:
        """
        A block that judges the weights. The second judgement of a round takes as long as its first.

        Args:
            is_last (`bool`):
                Whether it is the second.
        """
        self._first_look = None
        self._expect(self._judge_s if is_last else None)
        began_s = time.monotonic()
        yield
        self._judge_s = time.monotonic() - began_s

    def begin_training(self) -> None:
        """Of a round that was judged just now."""
        self._train_began_s = time.monotonic()
        self._expect(None)

    def updated(self, done: int, total: int) -> None:
        """
        Foresee the end of the round, by the updates it has made.

        Args:
            done (`int`):
                Updates made.
            total (`int`):
                Updates of the round.
        """
        training_s = _seconds_left(time.monotonic() - self._train_began_s, done, total - done)
        self._expect(None if training_s is None else training_s + self._judge_s)

    def _expect(self, seconds: float | None) -> None:
        self.end_s = None if seconds is None else time.time() + seconds


def remaining_seconds(trainer: Mapping[str, Any], now_s: float) -> float | None:
    """
    What is left of the trainer's round or wait; None if that is not known, or should be over by now.

    Args:
        trainer (`Mapping[str, Any]`):
            The trainer's status.
        now_s (`float`):
            Seconds since the epoch.
    """
    end_s = trainer.get("expected_end_s")
    return None if end_s is None or end_s < now_s else end_s - now_s


def _seconds_left(passed_s: float, done: int, left: int) -> float | None:
    if left <= 0:
        return 0.0
    return passed_s / done * left if done > 0 else None
