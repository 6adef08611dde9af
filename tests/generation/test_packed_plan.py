"""Index arithmetic of a packed forward pass: where rows go, which calls read them, where answers come back."""

from __future__ import annotations

import pytest
import torch

from adaflash_hf.generation.packed_plan import GroupPlan, OnDevice, Segment, flat_ranges, plan_group
from adaflash_hf.generation.packed_storage import LayerGroup
from adaflash_hf.generation.visibility import Visibility


KEY_BYTES = 1536  # three key heads of 64 in float32


def group_of(lengths: list[int], visibility: Visibility | None = None) -> tuple[LayerGroup, dict[int, int]]:
    group = LayerGroup(visibility or Visibility(), [0], smallest_room=8)
    held: dict[int, int] = {}
    for slot, length in enumerate(lengths):
        held[slot] = 0
        group.open(slot, 0)
        group.reserve(slot, length, held)
        held[slot] = length
    return group, held


def plan_of(
    group: LayerGroup, held: dict[int, int], rows: dict[int, int], contexts: dict[int, int] | None = None
) -> GroupPlan:
    contexts = contexts or {}
    segments = [Segment(slot, held[slot], contexts.get(slot, 0), count) for slot, count in rows.items()]
    for segment in segments:
        group.reserve(segment.slot, segment.context + segment.rows, held)
    return plan_group(group, segments, "cpu", KEY_BYTES)


def queries_of(plan: GroupPlan) -> list[list[int]]:
    return [
        list(range(call.queries.start, call.queries.stop)) if isinstance(call.queries, slice) else call.queries.values
        for call in plan.calls
    ]


def test_flat_ranges() -> None:
    assert flat_ranges([3, 10, 0], [2, 0, 3]) == [3, 4, 0, 1, 2]


def test_on_device_keeps_one_copy() -> None:
    values = OnDevice([4, 2])
    copy = values.on(torch.device("cpu"))
    assert copy.tolist() == [4, 2]
    assert values.on(torch.device("cpu")) is copy


def test_one_decode_step() -> None:
    group, held = group_of([5])
    plan = plan_of(group, held, {0: 1})
    assert [write.target.values for write in plan.writes] == [[5]]
    assert plan.writes[0].source is None
    (call,) = plan.calls
    assert (call.begin, call.end, call.first_key, call.last_key, call.rows) == (0, 1, 0, 6, 1)
    assert call.queries == slice(0, 1)
    assert plan.restore is None


def test_neighbours_share_a_call() -> None:
    """Rows of room 8: slots lie at flat rows 0, 8 and 16. The second brings two rows, so the others are padded."""
    group, held = group_of([5, 3, 4])
    plan = plan_of(group, held, {0: 1, 1: 2, 2: 1})
    assert plan.writes[0].target.values == [5, 11, 12, 20]
    (call,) = plan.calls
    assert queries_of(plan) == [[0, 0, 1, 2, 3, 3]]
    assert call.spans == [(5, 5), (3, 4), (4, 4)]
    assert (call.first_key, call.last_key) == (0, 6)
    assert plan.restore is not None
    assert plan.restore.values == [0, 2, 3, 4]


def test_packed_order_may_differ_from_the_arenas() -> None:
    group, held = group_of([5, 3, 4])
    plan = plan_of(group, held, {2: 1, 0: 1, 1: 1})
    assert plan.writes[0].target.values == [20, 5, 11]
    assert queries_of(plan) == [[1, 2, 0]]
    assert plan.restore is not None
    assert plan.restore.values == [2, 0, 1]


def test_a_slot_that_rests_is_read_along() -> None:
    group, held = group_of([5, 3, 4])
    plan = plan_of(group, held, {0: 1, 2: 1})
    (call,) = plan.calls
    assert (call.begin, call.end) == (0, 3)
    assert queries_of(plan) == [[0, 0, 1]]
    assert plan.restore is not None
    assert plan.restore.values == [0, 2]


def test_slots_of_different_room_are_called_apart() -> None:
    group, held = group_of([5, 30])
    plan = plan_of(group, held, {0: 1, 1: 1})
    assert [call.arena.room for call in plan.calls] == [8, 32]
    assert [(write.target.values, write.source.values) for write in plan.writes if write.source] == [
        ([5], [0]),
        ([30], [1]),
    ]


def test_neighbours_share_a_call_only_where_padding_is_cheap() -> None:
    """120 of 128 tokens and 30 of 128: reading 90 keys for nothing costs more than a call only if keys are large."""
    for key_bytes, num_calls in ((1536, 1), (16_384, 2)):
        group, held = group_of([120, 100])
        held[1] = 30
        segments = [Segment(0, 120, 0, 1), Segment(1, 30, 0, 1)]
        assert len(plan_group(group, segments, "cpu", key_bytes).calls) == num_calls
        assert len(plan_group(group, segments, "cuda", key_bytes).calls) == 1


def test_masks_stay_small() -> None:
    """16 rows over 60,000 keys are a million entries a request; one row each needs hardly any mask."""
    group, held = group_of([60_000] * 12)
    for rows, num_calls in ((16, 2), (1, 1)):
        segments = [Segment(slot, 60_000, 0, rows) for slot in held]
        assert len(plan_group(group, segments, "cuda", KEY_BYTES).calls) == num_calls


def test_long_runs_stand_alone_and_come_in_short_ones() -> None:
    """100 new rows of one request: 64 queries read the first 164 keys, 36 read all 200."""
    group, held = group_of([100, 5])
    plan = plan_of(group, held, {0: 100, 1: 1})
    long = [call for call in plan.calls if call.arena.room == 256]
    assert [(call.rows, call.last_key) for call in long] == [(64, 164), (36, 200)]
    assert sorted(sum(queries_of(plan), [])) == list(range(101))


def test_windows_skip_what_no_query_sees() -> None:
    group, held = group_of([20, 22], Visibility(True, 6))
    plan = plan_of(group, held, {0: 2, 1: 1})
    starts = [place.start for place in plan.places]
    (call,) = plan.calls
    # The first query of slot 0 stands at 20 and sees 15 to 20; that of slot 1 stands at 22 and sees 17 to 22.
    assert call.first_key == min(15 - starts[0], 17 - starts[1])


def test_context_comes_first_and_has_no_queries() -> None:
    """A drafter's step: new context of all requests, then their blocks."""
    group, held = group_of([2, 3], Visibility(False))
    plan = plan_of(group, held, {0: 3, 1: 3}, contexts={0: 1, 1: 2})
    assert plan.writes[0].target.values == [2, 8 + 3, 8 + 4, 3, 4, 5, 8 + 5, 8 + 6, 8 + 7]
    assert queries_of(plan) == [list(range(6))]
    (call,) = plan.calls
    assert call.spans == [(3, 5), (5, 7)]


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_every_query_is_answered_once(device_type: str) -> None:
    """Whatever the calls, answer i of the plan is that of packed query i."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        lengths = torch.randint(1, 60, (9,), generator=generator).tolist()
        group, held = group_of(lengths)
        order = torch.randperm(9, generator=generator)[:6].tolist()
        rows = {slot: int(torch.randint(1, 80, (1,), generator=generator)) for slot in order}
        segments = [Segment(slot, held[slot], 0, count) for slot, count in rows.items()]
        for segment in segments:
            group.reserve(segment.slot, segment.rows, held)
        plan = plan_group(group, segments, device_type, KEY_BYTES)
        answered = sum(queries_of(plan), [])
        if plan.restore is not None:
            answered = [answered[row] for row in plan.restore.values]
        assert answered == list(range(sum(rows.values())))
        written = [row for write in plan.writes for row in (write.source or write.target).values]
        assert len(written) == sum(rows.values())
