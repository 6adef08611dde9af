"""What a benchmark measures: single runs, and rows of medians and spreads made of repeated ones."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ..generation.statistics import GenerationStats


__all__ = ["Agreement", "BenchRow", "Latency", "MethodRun", "merge_statistics", "summarise"]

PLAIN = "plain"


@dataclass(frozen=True)
class Latency:
    """
    Seconds.

    Attributes:
        p50: Median.
        p95: Only one in twenty is longer.
    """

    p50: float
    p95: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Latency | None:
        """Percentiles of single values; None without any."""
        if not len(seconds):
            return None
        p50, p95 = np.percentile(seconds, (50, 95))
        return cls(float(p50), float(p95))


@dataclass(frozen=True)
class MethodRun:
    """
    One method, once, on the requests of one cell.

    Attributes:
        token_ids: New tokens of each request, in the order of the prompts; None if only their number is known.
        generated_tokens: How many there are in all.
        seconds: From the first request to the last token; loading, calibration and warm-up apart.
        token_latency: Between tokens of a request; those that come in one step share its time.
        first_token: From the moment a request gets its place to its first token.
        stats: Counters of speculative decoding; None where they do not exist.
        peak_memory_bytes: See [`PeakMemory`].
        cache_memory_bytes: Keys and values of all models, where they are known.
    """

    token_ids: list[list[int]] | None
    generated_tokens: int
    seconds: float
    token_latency: Latency | None = None
    first_token: Latency | None = None
    stats: GenerationStats | None = None
    peak_memory_bytes: int | None = None
    cache_memory_bytes: int | None = None

    @property
    def tok_per_s(self) -> float:
        """Generated tokens per second."""
        return self.generated_tokens / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class Agreement:
    """
    A method's answers against those of plain decoding, over all requests and repeats of a cell.

    Attributes:
        requests: Requests compared.
        identical: Those with the same tokens in every repeat.
        near_ties: Those that part only where the target's two best logits are as close as its dtype rounds; None if
            nobody can tell.
    """

    requests: int
    identical: int
    near_ties: int | None

    @property
    def different(self) -> int | None:
        """Requests whose tokens are wrong; None if nobody can tell."""
        return None if self.near_ties is None else self.requests - self.identical - self.near_ties


@dataclass
class BenchRow:
    """
    One method on one workload at one concurrency: medians over repeats, and the least and the largest.

    Attributes:
        method: Name, with a parameter after a colon if one was given.
        workload: Name.
        concurrency: Requests in flight at once.
        tokens_per_second: Generated tokens of all requests together.
        tokens_per_second_spread: Over repeats.
        speedup: Tokens per second over those of `plain` in the same repeat.
        speedup_spread: Over repeats.
        speedup_over_transformers: Over transformers' own plain `generate()`, if that was run.
        acceptance_length: Tokens committed per verification of a request, bonus included; 1 for plain decoding.
        mean_verify_length: Rows verified per request and round, the anchor included.
        acceptance_by_position: Share of rounds whose i-th draft was accepted.
        verify_lengths: Rounds of requests, by verify length.
        draft_time_share: Share of the time spent in the drafter.
        token_latency_p50_s, token_latency_p95_s: Seconds between tokens of a request.
        first_token_p50_s, first_token_p95_s: Seconds to the first token.
        peak_memory_bytes: Largest of all repeats.
        cache_memory_bytes: Largest of all repeats.
        identical: Whether all tokens equal those of `plain`; None if that is not known.
        identical_requests, near_tie_requests, different_requests: See [`Agreement`].
        requests: Requests of a run.
        generated_tokens: Tokens of the first run.
        repeats: Runs.
    """

    method: str
    workload: str
    concurrency: int
    tokens_per_second: float
    tokens_per_second_spread: tuple[float, float]
    speedup: float | None
    speedup_spread: tuple[float, float] | None
    speedup_over_transformers: float | None
    acceptance_length: float | None
    mean_verify_length: float | None
    draft_time_share: float | None
    token_latency_p50_s: float | None
    token_latency_p95_s: float | None
    first_token_p50_s: float | None
    first_token_p95_s: float | None
    peak_memory_bytes: int | None
    cache_memory_bytes: int | None
    identical: bool | None
    identical_requests: int | None
    near_tie_requests: int | None
    different_requests: int | None
    requests: int
    generated_tokens: int
    repeats: int
    acceptance_by_position: list[float] = field(default_factory=list)
    verify_lengths: dict[int, int] = field(default_factory=dict)

    @property
    def agreement_text(self) -> str | None:
        """How many requests got the tokens of `plain`, in a few words; None if that is not known."""
        if self.identical is None:
            return None
        if self.identical:
            return "yes"
        text = f"{self.identical_requests} of {self.requests}"
        if self.near_tie_requests:
            text += f", {self.near_tie_requests} near-ties"
        if self.different_requests:
            text += f", {self.different_requests} DIFFERENT"
        return text

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def summarise(
    method: str,
    workload: str,
    concurrency: int,
    runs: Sequence[MethodRun],
    num_requests: int,
    baseline: Sequence[MethodRun] | None = None,
    transformers_runs: Sequence[MethodRun] | None = None,
    agreement: Agreement | None = None,
) -> BenchRow:
    """
    Makes a row of the repeats of a method.

    Args:
        method (`str`):
            Its name.
        workload (`str`):
            What it answered.
        concurrency (`int`):
            Requests in flight.
        runs (`Sequence[MethodRun]`):
            One per repeat.
        num_requests (`int`):
            Requests of each.
        baseline (`Sequence[MethodRun]`, *optional*):
            Plain decoding in the same repeats.
        transformers_runs (`Sequence[MethodRun]`, *optional*):
            transformers' own plain decoding in the same repeats.
        agreement (`Agreement`, *optional*):
            Outcome of the comparison of tokens.
    """
    speeds = [run.tok_per_s for run in runs]
    speedups = _ratios(runs, baseline)
    over_transformers = _ratios(runs, transformers_runs)
    stats = [run.stats for run in runs if run.stats is not None]
    merged = merge_statistics(stats) if stats else None
    rounds = 0 if merged is None else merged.rounds
    spent_s = sum(run.seconds for run in runs if run.stats is not None)
    token_latencies = [run.token_latency for run in runs if run.token_latency is not None]
    first_tokens = [run.first_token for run in runs if run.first_token is not None]
    return BenchRow(
        method=method,
        workload=workload,
        concurrency=concurrency,
        tokens_per_second=statistics.median(speeds),
        tokens_per_second_spread=(min(speeds), max(speeds)),
        speedup=statistics.median(speedups) if speedups else None,
        speedup_spread=(min(speedups), max(speedups)) if speedups else None,
        speedup_over_transformers=statistics.median(over_transformers) if over_transformers else None,
        acceptance_length=merged.acceptance_length if merged is not None and rounds else None,
        mean_verify_length=_mean_verify_length(merged),
        draft_time_share=_draft_time_share(merged, spent_s),
        token_latency_p50_s=_median([latency.p50 for latency in token_latencies]),
        token_latency_p95_s=_median([latency.p95 for latency in token_latencies]),
        first_token_p50_s=_median([latency.p50 for latency in first_tokens]),
        first_token_p95_s=_median([latency.p95 for latency in first_tokens]),
        peak_memory_bytes=max((run.peak_memory_bytes for run in runs if run.peak_memory_bytes), default=None),
        cache_memory_bytes=max((run.cache_memory_bytes for run in runs if run.cache_memory_bytes), default=None),
        identical=None if agreement is None else agreement.identical == agreement.requests,
        identical_requests=None if agreement is None else agreement.identical,
        near_tie_requests=None if agreement is None else agreement.near_ties,
        different_requests=None if agreement is None else agreement.different,
        requests=num_requests,
        generated_tokens=runs[0].generated_tokens,
        repeats=len(runs),
        acceptance_by_position=[] if merged is None else merged.acceptance_by_position,
        verify_lengths={} if merged is None else merged.verify_lengths,
    )


def _mean_verify_length(stats: GenerationStats | None) -> float | None:
    # A server may tell what was accepted and not what was drafted.
    if stats is None or not stats.rounds or stats.accepted_tokens > stats.drafted_tokens:
        return None
    return 1 + stats.drafted_tokens / stats.rounds


def _draft_time_share(stats: GenerationStats | None, spent_s: float) -> float | None:
    has_drafted = stats is not None and stats.drafted_tokens + stats.accepted_tokens > 0
    if stats is None or not spent_s or (has_drafted and not stats.draft_s):
        return None
    return stats.draft_s / spent_s


def _ratios(runs: Sequence[MethodRun], others: Sequence[MethodRun] | None) -> list[float]:
    """Speed over speed, repeat by repeat, so that a machine that changes its speed does not count."""
    if others is None:
        return []
    return [run.tok_per_s / other.tok_per_s for run, other in zip(runs, others, strict=True) if other.tok_per_s > 0]


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def merge_statistics(parts: Sequence[GenerationStats]) -> GenerationStats:
    """
    Statistics of several calls as those of one.

    Args:
        parts (`Sequence[GenerationStats]`):
            Of each call.
    """
    merged = GenerationStats()
    for name in ("rounds", "target_forwards", "drafted_tokens", "accepted_tokens", "committed_tokens"):
        setattr(merged, name, sum(getattr(part, name) for part in parts))
    for name in ("draft_s", "verify_s", "prefill_s", "total_s"):
        setattr(merged, name, sum(getattr(part, name) for part in parts))
    lengths: Counter[int] = Counter()
    for part in parts:
        lengths.update(part.verify_lengths)
    merged.verify_lengths = dict(sorted(lengths.items()))
    longest = max((len(part.acceptance_by_position) for part in parts), default=0)
    hits = np.zeros(longest)
    for part in parts:
        hits[: len(part.acceptance_by_position)] += np.array(part.acceptance_by_position) * part.rounds
    merged.acceptance_by_position = (hits / max(merged.rounds, 1)).tolist()
    return merged
