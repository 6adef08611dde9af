"""Which requests run: admission by a moving average of concurrency, return of the youngest, shares of prefill work.

Pure bookkeeping: nothing here touches a model. Memory is asked for through two callables, so that the same rules hold
for any cache.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from ..errors import InvalidInputError


__all__ = ["MemoryGauge", "Schedulable", "Scheduler", "SchedulerConfig"]


class Schedulable(Protocol):
    """What the scheduler reads of a request."""

    @property
    def arrival(self) -> int:
        """Number in order of submission; smaller is older."""

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens: what its caches will hold when it is next verified."""

    @property
    def prefill_remaining(self) -> int:
        """Tokens still to be prefilled; 0 once it decodes."""


AnyRequest = TypeVar("AnyRequest", bound=Schedulable)


@dataclass(frozen=True)
class MemoryGauge:
    """Bytes of the caches.

    Attributes:
        bytes_for (`Callable[[int], int]`): Bytes that one request of so many tokens takes.
        forecast_bytes (`Callable[[Sequence, int], int]`):
            Bytes that all buffers take, at most, while these requests and no others each grow by so many tokens;
            those that have no place in the caches yet get one.
    """

    bytes_for: Callable[[int], int]
    forecast_bytes: Callable[[Sequence[Any], int], int]


@dataclass(frozen=True)
class SchedulerConfig:
    """
    Rules of admission and prefill.

    Args:
        max_concurrency (`int`): Most requests that run at once.
        prefill_chunk_tokens (`int`): Most prompt tokens that one round prefills, all requests together.
        memory_limit_bytes (`int`, *optional*): Most bytes of the caches of target and drafter. No limit when None.
        concurrency_ema_weight (`float`, defaults to 0.1):
            The paper's beta: weight of the newest observation in the moving average of sustainable concurrency.
        oldest_prefill_share (`float`, defaults to 0.25):
            Share of the prefill work that the oldest waiting prompt gets; the rest goes to the shortest first.
        growth_tokens (`int`, defaults to 32):
            Tokens by which every running request must be able to grow when another is admitted, so that the newcomer
            is not returned at once.
    """

    max_concurrency: int
    prefill_chunk_tokens: int
    memory_limit_bytes: int | None = None
    concurrency_ema_weight: float = 0.1
    oldest_prefill_share: float = 0.25
    growth_tokens: int = 32

    def __post_init__(self) -> None:
        for name in ("max_concurrency", "prefill_chunk_tokens"):
            if getattr(self, name) < 1:
                raise InvalidInputError(f"`{name}` is {getattr(self, name)}, expected 1 or more.")
        if self.memory_limit_bytes is not None and self.memory_limit_bytes < 1:
            raise InvalidInputError(
                f"`memory_limit_bytes` is {self.memory_limit_bytes}, expected a positive number of bytes, or None for "
                "no limit."
            )
        for name in ("concurrency_ema_weight", "oldest_prefill_share"):
            if not 0 < getattr(self, name) <= 1:
                raise InvalidInputError(f"`{name}` is {getattr(self, name)}, expected a number above 0, at most 1.")


# A request that outgrows its buffer is there twice for a moment, in half of the new room and in the new one; and the
# row that it leaves may stand beside another that nobody uses.
LONE_REQUEST_SLACK = 2


class Scheduler(Generic[AnyRequest]):
    """The queue and the running requests.

    Both are kept in order of arrival. The queue is served strictly in that order, and a request that is returned goes
    back to its old place: nobody is overtaken for ever, and the oldest running request is never returned, so that one
    always gets on.

    Args:
        config (`SchedulerConfig`): The rules.
        gauge (`MemoryGauge`): Memory of the caches.
    """

    def __init__(self, config: SchedulerConfig, gauge: MemoryGauge):
        self.config = config
        self._gauge = gauge
        self.waiting: list[AnyRequest] = []
        self.running: list[AnyRequest] = []
        self.sustainable_concurrency = float(config.max_concurrency)

    def add(self, request: AnyRequest) -> None:
        """Puts a request into the queue, at its place by arrival."""
        bisect.insort(self.waiting, request, key=lambda other: other.arrival)

    def remove(self, request: AnyRequest) -> None:
        """Takes a request out, wherever it is."""
        for requests in (self.waiting, self.running):
            if request in requests:
                requests.remove(request)

    @property
    def admission_target(self) -> int:
        """Requests to admit up to: the moving average, rounded."""
        return min(max(round(self.sustainable_concurrency), 1), self.config.max_concurrency)

    def largest_request_bytes(self, num_tokens: int) -> int:
        """Bytes that a request needs to run alone until it has `num_tokens` tokens."""
        return LONE_REQUEST_SLACK * self._gauge.bytes_for(num_tokens)

    def admit(self, round_tokens: int) -> list[AnyRequest]:
        """Moves requests from the queue to the running ones while concurrency and memory allow.

        Args:
            round_tokens (`int`): Tokens by which a request may grow in a round.

        Returns:
            `list`: Those admitted, oldest first.
        """
        admitted: list[AnyRequest] = []
        growth = max(self.config.growth_tokens, round_tokens)
        while self.waiting and len(self.running) < self.admission_target:
            request = self.waiting[0]
            if self.running and not self._fits([*self.running, request], growth):
                break
            self.waiting.pop(0)
            bisect.insort(self.running, request, key=lambda other: other.arrival)
            admitted.append(request)
        return admitted

    def overshoot(self, round_tokens: int) -> AnyRequest | None:
        """The request to return because the coming round would not fit, or None. Ask again after returning it.

        Args:
            round_tokens (`int`): Tokens by which a request may grow in a round.
        """
        if len(self.running) < 2 or self._fits(self.running, round_tokens):
            return None
        return self.running[-1]

    def take_back(self, request: AnyRequest) -> None:
        """Moves a running request to the queue."""
        self.running.remove(request)
        self.add(request)

    def observe(self, overshot: bool) -> None:
        """Updates the moving average after a round: N^ <- (1 - beta) N^ + beta N.

        N is the number of requests that memory would have sustained: those that ran, and, unless some had to be
        returned, as many more of their mean size as there is memory left for.

        Args:
            overshot (`bool`): Whether requests were returned this round.
        """
        beta = self.config.concurrency_ema_weight
        self.sustainable_concurrency += beta * (self._sustained(overshot) - self.sustainable_concurrency)

    def _sustained(self, overshot: bool) -> int:
        limit = self.config.memory_limit_bytes
        if limit is None:
            return self.config.max_concurrency
        if overshot or not self.running:
            return len(self.running) if self.running else self.config.max_concurrency
        mean = sum(self._gauge.bytes_for(request.num_tokens) for request in self.running) / len(self.running)
        spare = limit - self._gauge.forecast_bytes(self.running, 0)
        more = int(max(spare, 0) / max(mean, 1))
        return min(len(self.running) + more, self.config.max_concurrency)

    def _fits(self, requests: Sequence[AnyRequest], growth: int) -> bool:
        """Whether there is memory for all of `requests`, each `growth` tokens longer than now."""
        limit = self.config.memory_limit_bytes
        return limit is None or self._gauge.forecast_bytes(requests, growth) <= limit

    def plan_prefill(self) -> list[tuple[AnyRequest, int]]:
        """Shares out the prefill work of one round.

        The oldest unfinished prompt gets its share, so that a long one gets on whatever arrives after it; the rest
        goes to the shortest first, so that short ones do not wait for it.

        Returns:
            `list[tuple]`: Requests and the tokens to prefill of each, none of them 0.
        """
        prefilling = [request for request in self.running if request.prefill_remaining > 0]
        if not prefilling:
            return []
        budget = self.config.prefill_chunk_tokens
        oldest = prefilling[0]
        share = min(max(round(budget * self.config.oldest_prefill_share), 1), oldest.prefill_remaining)
        planned = {id(oldest): share}
        budget -= share
        for request in self._by_remaining(prefilling):
            done = planned.get(id(request), 0)
            more = min(request.prefill_remaining - done, budget)
            if more > 0:
                planned[id(request)] = done + more
                budget -= more
        return [(request, planned[id(request)]) for request in prefilling if id(request) in planned]

    @staticmethod
    def _by_remaining(requests: Sequence[AnyRequest]) -> list[AnyRequest]:
        return sorted(requests, key=lambda request: (request.prefill_remaining, request.arrival))
