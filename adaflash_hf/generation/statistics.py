"""What one `generate()` call did: rounds, acceptance, verify lengths and where the time went."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch


__all__ = ["GenerationStats", "StatisticsRecorder"]

# Timed phases whose events are kept before those that have passed are read.
MOST_PENDING_EVENTS = 256


@dataclass
class GenerationStats:
    """Statistics of one speculative `generate()` call, summed over the rows of the batch.

    Attributes:
        rounds (`int`): Row-rounds, i.e. one draft plus one verification of one sequence.
        target_forwards (`int`): Forward passes of the target, the prefill included (replays of recurrent states too).
        drafted_tokens (`int`): Draft tokens handed to the target.
        accepted_tokens (`int`): Draft tokens that the target accepted and that were committed.
        committed_tokens (`int`): Tokens produced after the prefill's own first token.
        acceptance_by_position (`list[float]`): Share of all row-rounds whose i-th draft token was accepted.
        verify_lengths (`dict[int, int]`): Histogram of the rows verified per row-round, the anchor included.
        draft_s (`float`): Seconds in the drafter, vocabulary projection included.
        verify_s (`float`): Seconds in the target's verification forwards.
        prefill_s (`float`): Seconds in the target's prefill.
        total_s (`float`): Seconds in the whole decoding loop.
    """

    rounds: int = 0
    target_forwards: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    committed_tokens: int = 0
    acceptance_by_position: list[float] = field(default_factory=list)
    verify_lengths: dict[int, int] = field(default_factory=dict)
    draft_s: float = 0.0
    verify_s: float = 0.0
    prefill_s: float = 0.0
    total_s: float = 0.0

    @property
    def acceptance_length(self) -> float:
        """Mean tokens committed per verification of a sequence, bonus token included (the paper's tau)."""
        return self.committed_tokens / self.rounds if self.rounds else 0.0

    @property
    def overhead_s(self) -> float:
        """Seconds in the loop outside prefill, draft and verification forwards."""
        return max(self.total_s - self.prefill_s - self.draft_s - self.verify_s, 0.0)

    def count_rounds(self, rounds: Iterable[tuple[int, int]]) -> None:
        """Fills in what follows from rounds alone.

        Args:
            rounds (`Iterable[tuple[int, int]]`): Rows verified, the anchor included, and drafts accepted.
        """
        lengths: Counter[int] = Counter()
        accepted: Counter[int] = Counter()
        for verify_length, count in rounds:
            lengths[verify_length] += 1
            accepted[count] += 1
        self.count_histograms(lengths, accepted)

    def count_histograms(self, verify_lengths: Counter[int], accepted: Counter[int]) -> None:
        """As `count_rounds`, from how often each verify length and each number of accepted drafts occurred."""
        self.rounds = sum(verify_lengths.values())
        self.drafted_tokens = sum((length - 1) * count for length, count in verify_lengths.items())
        self.accepted_tokens = sum(number * count for number, count in accepted.items())
        self.verify_lengths = dict(sorted(verify_lengths.items()))
        longest = max(verify_lengths, default=1) - 1
        # Draft i counts as accepted in every round that accepted i or more.
        self.acceptance_by_position = [
            sum(count for number, count in accepted.items() if number >= position) / max(self.rounds, 1)
            for position in range(1, longest + 1)
        ]


class StatisticsRecorder:
    """Collects a `GenerationStats` while the loop runs, without adding a device synchronisation.

    On an accelerator the phases are timed with events that are read once, at the end.

    Args:
        device (`torch.device`): Device of the target; decides how time is measured.
    """

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._stats = GenerationStats()
        self._accepted: Counter[int] = Counter()
        self._verify_lengths: Counter[int] = Counter()
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._start = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times a block of code as phase `name` (`"prefill"`, `"draft"` or `"verify"`)."""
        if self._cuda:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._events.append((name, begin, end))
            if len(self._events) > MOST_PENDING_EVENTS:
                self._read_events(wait=False)
        else:
            begin_s = time.perf_counter()
            yield
            self._add_time(name, time.perf_counter() - begin_s)

    def _add_time(self, name: str, seconds: float) -> None:
        key = f"{name}_s"
        setattr(self._stats, key, getattr(self._stats, key) + seconds)

    def count_target_forward(self) -> None:
        """Counts one forward pass of the target."""
        self._stats.target_forwards += 1

    def count_round(self, verify_length: int, accepted: int, committed: int) -> None:
        """Counts one round of one row.

        Args:
            verify_length (`int`): Rows the target verified, the anchor included.
            accepted (`int`): Draft tokens accepted, cut at a stop.
            committed (`int`): Tokens appended to the sequence, cut at a stop.
        """
        self._stats.committed_tokens += committed
        self._verify_lengths[verify_length] += 1
        self._accepted[accepted] += 1

    def _read_events(self, wait: bool) -> None:
        """Adds up the phases that are over; with `wait`, all of them."""
        if self._events and wait:
            torch.cuda.synchronize()
        passed = 0
        for name, begin, end in self._events:
            if not end.query():
                break
            self._add_time(name, begin.elapsed_time(end) / 1000)
            passed += 1
        del self._events[:passed]

    def finish(self) -> GenerationStats:
        """Brings the record up to date and returns it. Recording may go on."""
        stats = self._stats
        self._read_events(wait=True)
        stats.total_s = time.perf_counter() - self._start
        stats.count_histograms(self._verify_lengths, self._accepted)
        return stats
