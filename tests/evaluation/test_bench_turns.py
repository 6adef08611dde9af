"""Whose turn it is, and what is counted."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from tiny_models import tiny_target

from adaflash_hf import AdaFlashEngine
from adaflash_hf.evaluation import bench_turns
from adaflash_hf.evaluation.bench_turns import EngineRun, run_in_turns


def test_only_rounds_of_its_own_count(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    now = itertools.count()

    class Clock:
        # A second passes whenever somebody looks, so a round takes one, and whatever lies between two rounds one too.
        @staticmethod
        def perf_counter() -> float:
            return float(next(now))

    monkeypatch.setattr(bench_turns, "time", Clock)

    def begin(name: str, count: int) -> EngineRun:
        engine = AdaFlashEngine(tiny_target("llama"), max_concurrency=1)
        handle = engine.submit(torch.tensor([1, 2, 3]), max_new_tokens=count, do_sample=False)
        step = engine.step

        def noted(*args: Any) -> bool:
            order.append(name)
            return step(*args)

        monkeypatch.setattr(engine, "step", noted)
        return EngineRun(engine, [handle])

    short, long = run_in_turns([begin("short", 2), begin("long", 4)])
    # The first round reads the prompt and gives a token; of equals the first comes first.
    assert order == ["short", "long", "short", "long", "long", "long"]
    assert (short.generated_tokens, short.seconds) == (2, 2.0)
    assert (long.generated_tokens, long.seconds) == (4, 4.0)
    # Tokens come a round of one's own apart, whoever else decoded between them.
    assert long.token_latency is not None and (long.token_latency.p50, long.token_latency.p95) == (1.0, 1.0)
    assert short.first_token is None
    assert short.stats is not None and short.stats.generated_tokens == 2
