"""A lock that is released only to be taken again still goes to others."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from adaflash_hf.generation.fair_lock import FairLock


def test_who_waits_has_the_next_turn() -> None:
    lock, taken = FairLock(), []

    def waits(name: str) -> None:
        with lock:
            taken.append(name)

    with lock:
        others = [threading.Thread(target=waits, args=(name,)) for name in "abc"]
        for number, other in enumerate(others, start=1):
            other.start()
            while len(lock._turns) < number:
                time.sleep(0.001)
    with lock:  # asked for before any of the others can have noticed that it was free
        taken.append("again")
    for other in others:
        other.join(600)
    assert taken == ["a", "b", "c", "again"]


def test_it_may_be_taken_again_by_who_has_it_and_excludes_others() -> None:
    lock, inside, most = FairLock(), 0, 0

    def works() -> None:
        nonlocal inside, most
        for _ in range(200):
            with lock, lock:
                inside += 1
                most = max(most, inside)
                inside -= 1

    threads = [threading.Thread(target=works) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert most == 1 and not lock._turns and lock._owner is None


def test_whoever_is_interrupted_leaves_the_queue() -> None:
    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    def holds() -> None:
        with lock:
            is_held.set()
            while not lock._turns:
                time.sleep(0.001)
            time.sleep(0.05)  # until the main thread waits
            signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)
            may_end.wait(600)

    lock, is_held, may_end = FairLock(), threading.Event(), threading.Event()
    thread = threading.Thread(target=holds)
    thread.start()
    is_held.wait(600)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt), lock:
            pass
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not lock._turns
    may_end.set()
    thread.join(600)
    with lock:
        assert lock._depth == 1
