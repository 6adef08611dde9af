"""Statistics of rounds counted by hand."""

from __future__ import annotations

import pytest
import torch

from adaflash_hf.generation import statistics
from adaflash_hf.generation.statistics import GenerationStats, StatisticsRecorder


class Clock:
    """A clock that is set by the test."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(statistics, "time", clock)
    return clock


def test_counts(clock: Clock) -> None:
    recorder = StatisticsRecorder(torch.device("cpu"))
    for verify_length, accepted, committed in [(5, 4, 5), (5, 0, 1), (5, 2, 3), (3, 1, 2), (1, 0, 1)]:
        recorder.count_target_forward()
        recorder.count_round(verify_length, accepted, committed)
    stats = recorder.finish()
    assert (stats.rounds, stats.target_forwards) == (5, 5)
    assert (stats.drafted_tokens, stats.accepted_tokens, stats.committed_tokens) == (14, 7, 12)
    assert stats.acceptance_length == pytest.approx(12 / 5)
    assert stats.verify_lengths == {1: 1, 3: 1, 5: 3}
    # Of five rounds, three accepted a first draft, two a second, one a third and a fourth.
    assert stats.acceptance_by_position == pytest.approx([3 / 5, 2 / 5, 1 / 5, 1 / 5])


def test_times(clock: Clock) -> None:
    recorder = StatisticsRecorder(torch.device("cpu"))
    for phase, seconds in [("prefill", 2.0), ("draft", 0.5), ("verify", 1.0), ("draft", 0.25)]:
        clock.now += 0.125
        with recorder.phase(phase):
            clock.now += seconds
    stats = recorder.finish()
    assert (stats.prefill_s, stats.draft_s, stats.verify_s) == (2.0, 0.75, 1.0)
    assert stats.total_s == 4.25
    assert stats.overhead_s == 0.5


def test_nothing_counted(clock: Clock) -> None:
    stats = StatisticsRecorder(torch.device("cpu")).finish()
    assert stats == GenerationStats()
    assert stats.acceptance_length == 0.0


def test_overhead_is_never_negative() -> None:
    assert GenerationStats(total_s=1.0, verify_s=1.1).overhead_s == 0.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_events_on_a_gpu() -> None:
    recorder = StatisticsRecorder(torch.device("cuda"))
    with recorder.phase("verify"):
        torch.ones(2048, 2048, device="cuda") @ torch.ones(2048, 2048, device="cuda")
    stats = recorder.finish()
    assert 0 < stats.verify_s <= stats.total_s
