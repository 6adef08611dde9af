from __future__ import annotations

import os
import signal
import threading

from online_traffic import in_fork

from adaflash_hf.stop_signals import call_on_signals


def test_the_function_is_called_for_each_signal_until_it_is_undone():
    called = threading.Semaphore(0)
    before = [signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)]
    undo = call_on_signals([signal.SIGUSR1, signal.SIGUSR2], called.release)
    try:
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGUSR1):
            os.kill(os.getpid(), number)
            assert called.acquire(timeout=600)
    finally:
        undo()
    assert [signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)] == before
    assert not [thread for thread in threading.enumerate() if thread.name == "adaflash-signals"]


def stopped_while_it_has_the_lock_of_the_event():
    stopping = threading.Event()
    call_on_signals([signal.SIGTERM], stopping.set)
    with stopping._cond:  # where `stopping.wait` is before it waits
        os.kill(os.getpid(), signal.SIGTERM)
    assert stopping.wait(600)


def test_an_event_may_be_set_wherever_the_main_thread_is():
    with in_fork(stopped_while_it_has_the_lock_of_the_event) as process:
        process.join(600)
        assert process.exitcode == 0
