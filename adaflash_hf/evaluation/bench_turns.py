"""Engines that answer the same requests side by side, a round each in turn.

A machine changes its speed by a quarter within minutes. What runs one after the other is then compared with the
machine as much as with each other; what takes turns meets the same machine.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from .bench_results import Latency, MethodRun
from .bench_timing import synchronize


if TYPE_CHECKING:
    from ..generation.engine import AdaFlashEngine
    from ..generation.engine_handles import RequestHandle


__all__ = ["EngineRun", "run_in_turns"]


class EngineRun:
    """
    One engine on the requests of a cell.

    Args:
        engine (`AdaFlashEngine`):
            Prepared, and nobody else steps it.
        handles (`Sequence[RequestHandle]`):
            The requests, submitted already: that is the work of a server's other threads.

    Attributes:
        seconds: Spent in rounds so far.
    """

    def __init__(self, engine: AdaFlashEngine, handles: Sequence[RequestHandle]) -> None:
        self._engine, self._handles = engine, handles
        self.seconds = 0.0
        self._seen = [(0, 0.0)] * len(handles)  # tokens of each request, and when the last of them came
        self._paces: list[float] = []

    @property
    def is_over(self) -> bool:
        """Whether all requests are answered."""
        return not self._engine.has_requests

    @property
    def generated_tokens(self) -> int:
        """Tokens of all requests so far."""
        return sum(count for count, _ in self._seen)

    def step(self) -> None:
        """Run one round."""
        begin_s = time.perf_counter()
        self._engine.step()
        synchronize(self._engine.target.device)
        self.seconds += time.perf_counter() - begin_s
        for index, handle in enumerate(self._handles):
            count, (before, last_s) = len(handle.token_ids), self._seen[index]
            if count > before:
                if before:
                    self._paces += [(self.seconds - last_s) / (count - before)] * (count - before)
                self._seen[index] = (count, self.seconds)

    def result(self) -> MethodRun:
        """What came of it. The time to the first token is that of a run that did not wait for others."""
        results = [handle.result() for handle in self._handles]
        stats = self._engine.statistics()
        waits = [
            result.stats.time_to_first_token_s - result.stats.queue_s
            for result in results
            if result.stats.time_to_first_token_s is not None
        ]
        return MethodRun(
            token_ids=[result.token_ids for result in results],
            generated_tokens=self.generated_tokens,
            seconds=self.seconds,
            token_latency=Latency.of(self._paces),
            first_token=Latency.of(waits),
            stats=stats,
            cache_memory_bytes=stats.peak_memory_bytes,
        )


def run_in_turns(runs: Sequence[EngineRun]) -> list[MethodRun]:
    """
    Let engines answer side by side; the one with the fewest tokens so far has the next round.

    Args:
        runs (`Sequence[EngineRun]`):
            On the same requests.

    Returns:
        `list[MethodRun]`: in the order of `runs`, timed by their own rounds. Who has waited how long for a first token
        is not known.
    """
    going = [run for run in runs if not run.is_over]
    while going:
        min(going, key=lambda run: run.generated_tokens).step()
        going = [run for run in going if not run.is_over]
    return [replace(run.result(), first_token=None) for run in runs]
