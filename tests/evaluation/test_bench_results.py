"""Medians, spreads and merged counters, by hand."""

from __future__ import annotations

import pytest

from adaflash_hf.evaluation.bench_results import Agreement, Latency, MethodRun, merge_statistics, summarise
from adaflash_hf.generation.statistics import GenerationStats


def run(seconds: float, tokens: int = 100, **kwargs) -> MethodRun:
    return MethodRun([[1] * tokens], tokens, seconds, **kwargs)


def test_medians_and_spreads() -> None:
    own, plain = [run(1.0), run(2.0), run(1.25)], [run(2.0), run(3.0), run(2.0)]
    row = summarise("m", "w", 4, own, 8, plain, [run(1.0)] * 3, Agreement(8, 6, 1))
    assert row.tokens_per_second == 80 and row.tokens_per_second_spread == (50, 100)
    # Repeat by repeat: 2.0, 1.5, 1.6
    assert row.speedup == pytest.approx(1.6) and row.speedup_spread == (1.5, 2.0)
    assert row.speedup_over_transformers == pytest.approx(0.8)
    assert (row.identical, row.identical_requests, row.near_tie_requests, row.different_requests) == (False, 6, 1, 1)
    assert (row.repeats, row.requests, row.concurrency) == (3, 8, 4)
    assert row.acceptance_length is None and row.draft_time_share is None and row.token_latency_p50_s is None


def test_what_the_schema_promises() -> None:
    row = summarise("m", "w", 1, [run(1.0)], 1).as_dict()
    promised = "method workload concurrency tokens_per_second speedup acceptance_length mean_verify_length identical"
    assert set(promised.split()) <= set(row)
    assert row["speedup"] is None and row["identical"] is None


def test_counters_of_all_repeats() -> None:
    first = GenerationStats(
        rounds=10, drafted_tokens=30, accepted_tokens=10, committed_tokens=20, acceptance_by_position=[0.6, 0.4],
        verify_lengths={4: 10}, draft_s=0.5,
    )  # fmt: skip
    second = GenerationStats(
        rounds=30, drafted_tokens=30, accepted_tokens=6, committed_tokens=36, acceptance_by_position=[0.2],
        verify_lengths={2: 30}, draft_s=0.25,
    )  # fmt: skip
    merged = merge_statistics([first, second])
    assert merged.acceptance_by_position == pytest.approx([(6 + 6) / 40, 4 / 40])
    assert merged.verify_lengths == {2: 30, 4: 10}
    row = summarise("m", "w", 1, [run(1.0, stats=first), run(2.0, stats=second)], 1)
    assert row.acceptance_length == pytest.approx(56 / 40)
    assert row.mean_verify_length == pytest.approx(1 + 60 / 40)
    assert row.draft_time_share == pytest.approx(0.75 / 3)


def test_drafts_that_nobody_timed_have_no_share_of_the_time() -> None:
    rejected = GenerationStats(rounds=5, drafted_tokens=5, committed_tokens=5)
    assert summarise("m", "w", 1, [run(1.0, stats=rejected)], 1).draft_time_share is None
    undrafted = GenerationStats(rounds=5, committed_tokens=5)
    assert summarise("m", "w", 1, [run(1.0, stats=undrafted)], 1).draft_time_share == 0


def test_latency() -> None:
    latency = Latency.of([0.1] * 50 + [0.2] * 49 + [9.0])
    assert latency is not None and latency.p50 == pytest.approx(0.15) and latency.p95 == pytest.approx(0.2)
    assert Latency.of([]) is None
    row = summarise("m", "w", 1, [run(1.0, token_latency=Latency(1, 2)), run(1.0, token_latency=Latency(3, 4))], 1)
    assert (row.token_latency_p50_s, row.token_latency_p95_s) == (2, 3)


def test_largest_memory_counts() -> None:
    row = summarise("m", "w", 1, [run(1.0, peak_memory_bytes=5), run(1.0, peak_memory_bytes=7)], 1)
    assert row.peak_memory_bytes == 7 and row.cache_memory_bytes is None
