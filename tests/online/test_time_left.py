from __future__ import annotations

import pytest

from adaflash_hf.online import time_left
from adaflash_hf.online.online_arguments import OnlineTrainingArguments
from adaflash_hf.online.replay_buffer import BufferDepth
from adaflash_hf.online.time_left import TimeLeft, remaining_seconds


ARGUMENTS = OnlineTrainingArguments(round_size=10, held_out=4, min_held_out=4)


@pytest.fixture
def clock(monkeypatch):
    """Both clocks, which stand still unless they are moved."""

    class Clock:
        now_s = 1000.0

        def monotonic(self):
            return self.now_s

        time = monotonic

    clock = Clock()
    monkeypatch.setattr(time_left, "time", clock)
    return clock


def depth(waiting, held_out):
    return BufferDepth(waiting + held_out, 0, waiting, held_out, {}, waiting + held_out)


def test_a_wait_ends_when_the_slower_of_both_kinds_is_there(clock):
    times = TimeLeft()
    times.look_at(depth(2, 0), ARGUMENTS)
    assert times.end_s is None
    clock.now_s += 10
    times.look_at(depth(6, 0), ARGUMENTS)  # nothing held out came in, so nothing tells how long that takes
    assert times.end_s is None
    times.look_at(depth(6, 1), ARGUMENTS)
    assert times.end_s == clock.now_s + 30
    unguarded = OnlineTrainingArguments(round_size=10, held_out=0)
    times.look_at(depth(6, 1), unguarded)
    assert times.end_s == clock.now_s + 10


def test_a_round_ends_after_its_updates_and_a_second_judgement(clock):
    times = TimeLeft()
    with times.judging(is_last=False):
        assert times.end_s is None
        clock.now_s += 5
    times.begin_training()
    assert times.end_s is None
    clock.now_s += 4
    times.updated(2, 10)
    assert times.end_s == clock.now_s + 16 + 5
    clock.now_s += 20
    times.updated(10, 10)
    assert times.end_s == clock.now_s + 5
    with times.judging(is_last=True):
        assert times.end_s == clock.now_s + 5


def test_a_new_wait_is_measured_anew(clock):
    times = TimeLeft()
    times.look_at(depth(0, 4), ARGUMENTS)
    clock.now_s += 10
    times.look_at(depth(10, 4), ARGUMENTS)
    assert times.end_s == clock.now_s
    with times.judging(is_last=False):
        pass
    times.look_at(depth(0, 4), ARGUMENTS)
    assert times.end_s is None


def test_what_should_be_over_is_not_told():
    assert remaining_seconds({"expected_end_s": 12.0}, 10.0) == 2.0
    for trainer in ({"expected_end_s": 9.0}, {"expected_end_s": None}, {}):
        assert remaining_seconds(trainer, 10.0) is None
