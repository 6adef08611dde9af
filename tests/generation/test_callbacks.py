"""Callbacks that fail, leave, or were registered twice."""

from __future__ import annotations

import pytest

from adaflash_hf.generation.callbacks import Callbacks


def test_order_failures_and_leaving(caplog: pytest.LogCaptureFixture) -> None:
    callbacks, seen = Callbacks(), []

    def fails(value: int) -> None:
        seen.append(-value)
        raise ValueError("on purpose")

    leave = callbacks.register(fails)
    callbacks.register(seen.append)
    leave_second = callbacks.register(seen.append)
    callbacks.call(1)
    assert seen == [-1, 1, 1]
    assert "on purpose" in caplog.text
    leave()
    leave()
    leave_second()
    callbacks.call(2)
    assert seen == [-1, 1, 1, 2]


def test_a_callback_may_leave_while_it_is_called() -> None:
    callbacks, seen = Callbacks(), []

    def once() -> None:
        leave()
        seen.append(1)

    leave = callbacks.register(once)
    callbacks.register(lambda: seen.append(2))
    callbacks.call()
    callbacks.call()
    assert seen == [1, 2, 2]
