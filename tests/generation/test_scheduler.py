"""Admission, return and shares of prefill work, counted by hand on requests that are nothing but numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from adaflash_hf import InvalidInputError
from adaflash_hf.generation.scheduler import MemoryGauge, Scheduler, SchedulerConfig


@dataclass(eq=False)
class Numbers:
    """A request of so many tokens."""

    arrival: int
    num_tokens: int = 10
    prefill_remaining: int = 0


def new_scheduler(max_concurrency: int = 4, limit: int | None = None, **fields: float) -> Scheduler[Numbers]:
    """One byte per token and no rounding."""

    def forecast(requests: Sequence[Numbers], growth: int) -> int:
        return sum(request.num_tokens + growth for request in requests)

    fields = {"prefill_chunk_tokens": 100, "growth_tokens": 5, **fields}
    config = SchedulerConfig(max_concurrency, memory_limit_bytes=limit, **fields)  # type: ignore[arg-type]
    return Scheduler(config, MemoryGauge(lambda num_tokens: num_tokens, forecast))


def arrivals(requests: Sequence[Numbers]) -> list[int]:
    return [request.arrival for request in requests]


def test_admits_in_order_up_to_the_concurrency() -> None:
    scheduler = new_scheduler(max_concurrency=3)
    for number in (4, 1, 0, 3, 2):
        scheduler.add(Numbers(number))
    assert arrivals(scheduler.waiting) == [0, 1, 2, 3, 4]
    assert arrivals(scheduler.admit(1)) == [0, 1, 2]
    assert scheduler.admit(1) == []
    scheduler.remove(scheduler.running[1])
    assert arrivals(scheduler.admit(1)) == [3]
    assert arrivals(scheduler.running) == [0, 2, 3]
    scheduler.remove(scheduler.waiting[0])
    assert scheduler.waiting == []


def test_admission_leaves_room_to_grow() -> None:
    """Requests of 10 tokens count as 15: three take 45 of 50 bytes, four would take 60."""
    scheduler = new_scheduler(max_concurrency=9, limit=50)
    for number in range(5):
        scheduler.add(Numbers(number))
    assert arrivals(scheduler.admit(1)) == [0, 1, 2]
    # A round of more tokens than `growth_tokens` counts instead.
    scheduler = new_scheduler(max_concurrency=9, limit=50)
    for number in range(5):
        scheduler.add(Numbers(number))
    assert arrivals(scheduler.admit(10)) == [0, 1]


def test_nobody_overtakes_a_large_request() -> None:
    scheduler = new_scheduler(limit=50)
    for number, tokens in enumerate((20, 40, 1)):
        scheduler.add(Numbers(number, tokens))
    assert arrivals(scheduler.admit(1)) == [0]
    scheduler.remove(scheduler.running[0])
    assert arrivals(scheduler.admit(1)) == [1]


def test_the_first_is_admitted_whatever_its_size() -> None:
    """The engine refuses what could never fit; here it would only wait for ever."""
    scheduler = new_scheduler(limit=50)
    scheduler.add(Numbers(0, 60))
    assert arrivals(scheduler.admit(1)) == [0]


def test_the_youngest_is_returned_to_its_old_place() -> None:
    scheduler = new_scheduler(max_concurrency=9, limit=50)
    for number in range(5):
        scheduler.add(Numbers(number))
    scheduler.admit(1)
    assert scheduler.overshoot(4) is None  # 3 x 14 = 42
    for request in scheduler.running:
        request.num_tokens = 14
    assert scheduler.overshoot(2) is None  # 48
    youngest = scheduler.overshoot(3)  # 51
    assert youngest is not None and youngest.arrival == 2
    scheduler.take_back(youngest)
    assert (arrivals(scheduler.running), arrivals(scheduler.waiting)) == ([0, 1], [2, 3, 4])
    assert scheduler.overshoot(3) is None
    # It is admitted again before those that came after it.
    scheduler.remove(scheduler.running[0])
    assert arrivals(scheduler.admit(1)) == [2]


def test_the_oldest_is_never_returned() -> None:
    scheduler = new_scheduler(limit=50)
    scheduler.add(Numbers(0, 49))
    scheduler.admit(1)
    assert scheduler.overshoot(100) is None


def test_moving_average_of_sustainable_concurrency() -> None:
    scheduler = new_scheduler(max_concurrency=8, limit=45, concurrency_ema_weight=0.5)
    for number in range(8):
        scheduler.add(Numbers(number))
    assert scheduler.admission_target == 8
    scheduler.admit(1)
    assert arrivals(scheduler.running) == [0, 1, 2]
    scheduler.observe(overshot=False)  # three run, and there is memory for one more: (8 + 4) / 2
    assert scheduler.sustainable_concurrency == 6
    scheduler.observe(overshot=True)  # (6 + 3) / 2
    assert scheduler.sustainable_concurrency == 4.5
    assert scheduler.admission_target == 4
    for _ in range(20):
        scheduler.observe(overshot=True)
    assert scheduler.admission_target == 3
    scheduler.running.clear()
    for _ in range(20):
        scheduler.observe(overshot=False)  # nothing is in the way
    assert scheduler.admission_target == 8


def test_admission_follows_the_average() -> None:
    scheduler = new_scheduler(max_concurrency=8, limit=1000)
    scheduler.sustainable_concurrency = 2.4
    for number in range(5):
        scheduler.add(Numbers(number))
    assert arrivals(scheduler.admit(1)) == [0, 1]
    scheduler.sustainable_concurrency = 0.1
    assert scheduler.admission_target == 1


def test_without_a_limit_the_average_stays() -> None:
    scheduler = new_scheduler(max_concurrency=8)
    for _ in range(5):
        scheduler.observe(overshot=False)
    assert scheduler.admission_target == 8


def plan(remaining: list[int], **fields: float) -> dict[int, int]:
    scheduler = new_scheduler(max_concurrency=len(remaining) + 1, **fields)
    scheduler.running = [Numbers(number, left, left) for number, left in enumerate(remaining)]
    return {request.arrival: count for request, count in scheduler.plan_prefill()}


def test_prefill_shares() -> None:
    assert plan([]) == {}
    assert plan([0, 0]) == {}
    assert plan([30]) == {0: 30}
    assert plan([300]) == {0: 100}
    # The oldest gets a quarter, the shortest what they need, and the rest goes on by length.
    assert plan([300, 0, 20, 200]) == {0: 25, 2: 20, 3: 55}
    assert plan([10, 50, 70]) == {0: 10, 1: 50, 2: 40}
    assert plan([300, 90, 90]) == {0: 25, 1: 75}
    assert plan([300, 5, 5]) == {0: 90, 1: 5, 2: 5}
    assert plan([300, 4], prefill_chunk_tokens=1) == {0: 1}


def test_prefill_never_starves_the_oldest() -> None:
    oldest = Numbers(0, 400, 400)
    scheduler = new_scheduler(max_concurrency=9)
    rounds = 0
    while oldest.prefill_remaining:
        scheduler.running = [oldest, *(Numbers(number, 50, 50) for number in range(1, 5))]
        shares = {request.arrival: count for request, count in scheduler.plan_prefill()}
        assert sum(shares.values()) == 100
        oldest.prefill_remaining -= shares[0]
        rounds += 1
    assert rounds == 15  # 25 tokens a round; what is left in the end is shorter than any other prompt


@pytest.mark.parametrize(
    "fields",
    [
        {"max_concurrency": 0},
        {"prefill_chunk_tokens": 0},
        {"memory_limit_bytes": -1},
        {"concurrency_ema_weight": 1.5},
        {"oldest_prefill_share": 0},
    ],
)
def test_refusals(fields: dict[str, float]) -> None:
    (name,) = fields
    with pytest.raises(InvalidInputError, match=name):
        SchedulerConfig(**{"max_concurrency": 1, "prefill_chunk_tokens": 1, **fields})  # type: ignore[arg-type]
