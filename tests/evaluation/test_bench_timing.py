"""Times of tokens, with a clock of the test's own."""

from __future__ import annotations

import pytest
import torch

from adaflash_hf.evaluation import bench_timing
from adaflash_hf.evaluation.bench_timing import StepTimer


def test_step_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(bench_timing.time, "perf_counter", lambda: now_s)
    timer = StepTimer()

    def put(at_s: float, value: torch.Tensor) -> None:
        nonlocal now_s
        now_s = 100.0 + at_s
        timer.put(value)

    put(0.1, torch.zeros(2, 5))  # the prompt
    assert timer.first_token_s is None
    put(0.5, torch.zeros(2))  # a step of two sequences
    put(0.7, torch.zeros(2))
    put(1.0, torch.zeros(1, 3))  # three tokens of one sequence
    put(1.4, torch.zeros(2))
    put(1.4001, torch.zeros(2))  # accepted in the same round
    timer.end()
    assert timer.first_token_s == pytest.approx(0.5)
    assert timer.step_tokens == [1, 1, 3, 1, 1]
    assert timer.token_latency_s == pytest.approx([0.2, 0.1, 0.1, 0.1, 0.2, 0.2])
