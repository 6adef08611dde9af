"""What an engine did: the statistics of `generate()` over all its requests, and queue, memory and latency."""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass, field, fields

import numpy as np
import torch

from .engine_handles import RequestResult
from .engine_rounds import RoundReport
from .statistics import GenerationStats, StatisticsRecorder


__all__ = ["EngineRecorder", "EngineStats"]

PERCENTILES = (50, 95, 99)
# Newest values that percentiles are taken of.
WINDOW = 8192


@dataclass
class EngineStats(GenerationStats):
    """
    Statistics of an engine since it was made or `reset_statistics` was called.

    Attributes:
        active_requests (`int`): Requests that run now.
        queued_requests (`int`): Requests that wait now.
        peak_active_requests (`int`): Most that ran in one round.
        peak_queued_requests (`int`): Most that waited at the start of a round.
        admission_target (`int`): Concurrency that the engine admits up to now.
        submitted_requests (`int`): Requests taken.
        finished_requests (`dict[str, int]`): Requests that ended, by reason.
        returned_requests (`int`): How often a request was sent back to the queue because memory was short.
        generated_tokens (`int`): Tokens of all requests, those that prefills predict included.
        prefilled_tokens (`int`): Tokens prefilled, those of returned requests again.
        steps (`int`): Rounds of the engine, whatever the number of requests in them.
        busy_s (`float`): Seconds spent in rounds.
        memory_bytes (`int`): Bytes of the caches now.
        peak_memory_bytes (`int`): Most bytes of the caches after a round.
        time_to_first_token_s (`dict[str, float]`): Percentiles over requests, from submission on.
        token_latency_s (`dict[str, float]`):
            Percentiles over tokens after the first of each request; tokens of one round share its time equally.
        queue_s (`dict[str, float]`): Percentiles over requests, of the time until admission.
    """

    active_requests: int = 0
    queued_requests: int = 0
    peak_active_requests: int = 0
    peak_queued_requests: int = 0
    admission_target: int = 0
    submitted_requests: int = 0
    finished_requests: dict[str, int] = field(default_factory=dict)
    returned_requests: int = 0
    generated_tokens: int = 0
    prefilled_tokens: int = 0
    steps: int = 0
    busy_s: float = 0.0
    memory_bytes: int = 0
    peak_memory_bytes: int = 0
    time_to_first_token_s: dict[str, float] = field(default_factory=dict)
    token_latency_s: dict[str, float] = field(default_factory=dict)
    queue_s: dict[str, float] = field(default_factory=dict)

    @property
    def tok_per_s(self) -> float:
        """Generated tokens per second of work."""
        return self.generated_tokens / self.busy_s if self.busy_s else 0.0


class EngineRecorder(StatisticsRecorder):
    """Collects an `EngineStats`.

    Args:
        device (`torch.device`): Device of the target.
    """

    def __init__(self, device: torch.device):
        super().__init__(device)
        self.reset()

    def reset(self) -> None:
        """Starts over."""
        super().__init__(torch.device("cuda" if self._cuda else "cpu"))
        self.returned = self.submitted = 0
        self._steps = self._generated = self._prefilled = 0
        self._peak_active = self._peak_queued = self._peak_memory = 0
        self._busy_s = 0.0
        self._finished: Counter[str] = Counter()
        self._first_token_s: deque[float] = deque(maxlen=WINDOW)
        self._token_latency_s: deque[float] = deque(maxlen=WINDOW)
        self._queue_s: deque[float] = deque(maxlen=WINDOW)

    def count_step(self, report: RoundReport, started_s: float, active: int, queued: int, memory_bytes: int) -> None:
        """Counts one round of the engine."""
        self._steps += 1
        self._busy_s += time.perf_counter() - started_s
        self._prefilled += report.num_prefilled
        self._generated += sum(count for _, count, _ in report.committed)
        self._peak_active = max(self._peak_active, active)
        self._peak_queued = max(self._peak_queued, queued)
        self._peak_memory = max(self._peak_memory, memory_bytes)
        for _, count, seconds in report.committed:
            if seconds is not None and count:
                self._token_latency_s.extend([seconds / count] * count)

    def count_finished(self, result: RequestResult) -> None:
        """Counts a request that ended."""
        self._finished[result.finish_reason] += 1
        self._queue_s.append(result.stats.queue_s)
        if result.stats.time_to_first_token_s is not None:
            self._first_token_s.append(result.stats.time_to_first_token_s)

    def snapshot(self, active: int, queued: int, admission_target: int, memory_bytes: int) -> EngineStats:
        """The statistics so far."""
        common = self.finish()
        return EngineStats(
            **{f.name: getattr(common, f.name) for f in fields(GenerationStats)},
            active_requests=active,
            queued_requests=queued,
            peak_active_requests=self._peak_active,
            peak_queued_requests=self._peak_queued,
            admission_target=admission_target,
            submitted_requests=self.submitted,
            finished_requests=dict(self._finished),
            returned_requests=self.returned,
            generated_tokens=self._generated,
            prefilled_tokens=self._prefilled,
            steps=self._steps,
            busy_s=self._busy_s,
            memory_bytes=memory_bytes,
            peak_memory_bytes=max(self._peak_memory, memory_bytes),
            time_to_first_token_s=_percentiles(self._first_token_s),
            token_latency_s=_percentiles(self._token_latency_s),
            queue_s=_percentiles(self._queue_s),
        )


def _percentiles(values: deque[float]) -> dict[str, float]:
    """`{"p50": …}`, empty without values."""
    if not values:
        return {}
    return {f"p{p}": float(value) for p, value in zip(PERCENTILES, np.percentile(values, PERCENTILES), strict=True)}
