"""Signals that ask a process to end, told to what is to end by a thread."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable
from typing import Any


__all__ = ["call_on_signals"]


def call_on_signals(numbers: Iterable[int], action: Callable[[], Any]) -> Callable[[], None]:
    """
    Have a function called when a signal comes.

    Python runs a handler in the main thread, between any two statements: also where that is about to wait for an event
    and has the event's lock, which a handler that set the event would then wait for until it is killed. Hence the
    handler only writes to a pipe, and a thread calls the function.

    Args:
        numbers (`Iterable[int]`):
            The signals. Must be called in the main thread.
        action (`Callable[[], Any]`):
            The function; called by a thread, once for each signal.

    Returns:
        `Callable`: Call it to put the handlers back that were there before.
    """
    reader, writer = os.pipe()

    def tell(number: int, frame: object) -> None:
        del number, frame
        os.write(writer, b".")

    def listen() -> None:
        with open(reader, "rb", buffering=0) as pipe:
            while pipe.read(1):
                action()

    thread = threading.Thread(target=listen, name="adaflash-signals", daemon=True)
    thread.start()
    before = {number: signal.signal(number, tell) for number in numbers}

    def undo() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(writer)
        thread.join()

    return undo
