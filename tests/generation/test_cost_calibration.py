"""Calibration against a clock and models whose costs are known."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from adaflash_hf.generation.cost_calibration import calibrate, calibrated_table, cost_table_directory


class ClockBench:
    """
    Takes simulated time: 10 ms, 1 ms per row and 0.2 ms per row of padding; a draft 2 ms per request, or 0.5 ms per
    row of cut blocks; the first call of each 1 s more.
    """

    is_packed = True

    def __init__(
        self, max_requests: int = 4, longest: int = 5, memory_rows: int = 10**6, can_cut_blocks: bool = False
    ) -> None:
        self.max_requests, self.longest_verify_length = max_requests, longest
        self.can_cut_blocks = can_cut_blocks
        self.memory_rows = memory_rows
        self.now_s = 0.0
        self.seen: set[tuple[str, int, int]] = set()
        self.num_steps = 0
        self.is_closed = False

    def fingerprint(self) -> dict[str, str]:
        return {"target": "clock"}

    def _take(self, seconds: float, *step: int | str) -> None:
        self.num_steps += 1
        self.now_s += seconds + (0 if step in self.seen else 1)
        self.seen.add(step)  # type: ignore[arg-type]

    def run_target(self, verify_lengths: Sequence[int]) -> None:
        if sum(verify_lengths) > self.memory_rows:
            raise torch.OutOfMemoryError
        num_padded = len(verify_lengths) * max(verify_lengths) - sum(verify_lengths)
        seconds = 0.010 + 0.001 * sum(verify_lengths) + 0.0002 * num_padded
        self._take(seconds, "target", len(verify_lengths), sum(verify_lengths))

    def run_draft(self, num_requests: int, longest: int | None = None) -> None:
        assert longest is None or self.can_cut_blocks
        self._take(
            0.002 * num_requests if longest is None else 0.0005 * num_requests * longest,
            "draft",
            num_requests,
            longest or 0,
        )

    def close(self) -> None:
        self.is_closed = True


def test_costs_are_what_the_clock_says() -> None:
    bench = ClockBench(max_requests=3)
    table = calibrate(bench, clock=lambda: bench.now_s)
    assert bench.is_closed
    assert table.requests == (1, 2, 4)
    assert table.lengths == (1, 2, 3, 4, 5)
    for requests in (1, 2, 4):
        for length in range(1, 6):
            assert table.target_seconds(requests, float(length)) == pytest.approx(0.010 + 0.001 * requests * length)
        assert table.draft_seconds(requests) == pytest.approx(0.002 * requests)
    assert table.cut_draft_s is None
    assert table.padding_s == pytest.approx(0.0002)


def test_padding_costs_nothing_where_all_are_padded_anyway() -> None:
    bench = ClockBench()
    bench.is_packed = False
    assert calibrate(bench, clock=lambda: bench.now_s).padding_s == 0


def test_drafts_of_cut_blocks_are_timed_where_blocks_can_be_cut() -> None:
    bench = ClockBench(max_requests=2, can_cut_blocks=True)
    table = calibrate(bench, clock=lambda: bench.now_s)
    for requests in (1, 2):
        assert table.draft_seconds(requests) == pytest.approx(0.002 * requests)
        # Five rows would be 2.5 ms for each; the whole block, which has as many, took 2.
        for length, expected_s in ((2, 0.001), (3, 0.0015), (4, 0.002), (5, 0.002)):
            assert table.draft_seconds(requests, length) == pytest.approx(expected_s * requests)
        assert table.target_seconds(requests, 2.0) == pytest.approx(0.010 + 0.002 * requests)


def test_slow_steps_are_not_measured_again_and_again() -> None:
    bench = ClockBench(max_requests=1)
    target_steps: list[int] = []
    run_target = bench.run_target

    def slow_target(verify_lengths: Sequence[int]) -> None:
        run_target(verify_lengths)
        bench.now_s += 2
        target_steps.append(verify_lengths[0])

    bench.run_target = slow_target  # type: ignore[method-assign]
    table = calibrate(bench, clock=lambda: bench.now_s)
    assert target_steps == 2 * [1, 2, 3, 4, 5]  # one walk to warm up, one that counts
    assert table.target_seconds(1, 5.0) == pytest.approx(2.015)


def test_what_else_the_machine_did_is_not_measured() -> None:
    bench = ClockBench(max_requests=1)
    steps: list[int] = []
    run_target = bench.run_target

    def disturbed_target(verify_lengths: Sequence[int]) -> None:
        run_target(verify_lengths)
        steps.append(verify_lengths[0])
        bench.now_s += 1.2 * (len(steps) % 3 != 0)  # two of three steps take a second more

    bench.run_target = disturbed_target  # type: ignore[method-assign]
    table = calibrate(bench, clock=lambda: bench.now_s)
    assert len(steps) == 4 * 5  # three walks count: they are neither quick nor slow
    assert [round(table.target_seconds(1, float(n)).item(), 6) for n in (1, 2, 3, 4, 5)] == [
        0.011, 0.012, 0.013, 0.014, 0.015
    ]  # fmt: skip


def test_what_does_not_fit_is_too_dear_to_be_chosen() -> None:
    bench = ClockBench(memory_rows=10)
    table = calibrate(bench, clock=lambda: bench.now_s)
    assert table.target_seconds(4, 2.0) == pytest.approx(0.018)
    assert table.target_seconds(4, 3.0) > 1


def test_kept_and_measured_again(tmp_path: Path) -> None:
    first = ClockBench()
    table = calibrated_table(first, tmp_path)
    second = ClockBench()
    np.testing.assert_array_equal(calibrated_table(second, tmp_path).target_s, table.target_s)
    assert second.num_steps == 0
    for changed in (ClockBench(max_requests=9), ClockBench(longest=8)):
        assert calibrated_table(changed, tmp_path).covers(changed.max_requests)
        assert changed.num_steps > 0
    refreshed = ClockBench(max_requests=1)
    calibrated_table(refreshed, tmp_path, refresh=True)
    assert refreshed.num_steps > 0


def test_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ADAFLASH_CACHE", str(tmp_path))
    assert cost_table_directory() == tmp_path / "costs"
