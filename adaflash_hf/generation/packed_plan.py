"""Where the rows of one packed forward are written, and which calls of the attention kernel read them.

All of this is integers that every layer of a group shares, so it is worked out once per forward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from .packed_masks import rows_per_band
from .packed_storage import Arena, LayerGroup, Place
from .visibility import Visibility


if TYPE_CHECKING:
    from .packed_flash import FlashCall


__all__ = ["AttentionCall", "GroupPlan", "OnDevice", "Segment", "WriteCall", "flat_ranges", "plan_group"]

# A padded call reads the keys of each of its requests. What a row of queries adds to that, measured on a CPU with
# three query heads per key head of 64: a seventh of the time that reading takes.
COST_PER_QUERY_ROW = 1 / 7
# One more call costs as much as reading this many bytes of keys and values: measured, its Python included.
COST_PER_CALL_BYTES = {"cpu": 900_000.0}
COST_PER_CALL_BYTES_OF_ACCELERATORS = 1e9
# Longer runs of queries are never padded together with others.
MOST_PADDED_ROWS = 64
# Neither are more than fit a mask of this many entries, times the query heads per key head.
MOST_MASK_ENTRIES = 8_000_000


# Data type, device and number of query heads per key head.
MaskKey = tuple[torch.dtype, torch.device, int]


class OnDevice:
    """Integers that each device gets a copy of when it first asks."""

    __slots__ = ("_copies", "values")

    def __init__(self, values: list[int]):
        self.values = values
        self._copies: dict[torch.device, torch.Tensor] = {}

    def on(self, device: torch.device, dtype: torch.dtype = torch.long) -> torch.Tensor:
        """The values as a tensor on `device`; always of the same `dtype`."""
        copy = self._copies.get(device)
        if copy is None:
            copy = self._copies[device] = torch.tensor(self.values, device=device, dtype=dtype)
        return copy


@dataclass(slots=True)
class Segment:
    """The rows of one slot in a forward pass.

    Attributes:
        slot (`int`): The slot.
        length (`int`): Tokens it holds before.
        context (`int`): New rows that have keys and values only.
        rows (`int`): New rows that have queries too; they follow the context.
    """

    slot: int
    length: int
    context: int
    rows: int

    @property
    def first(self) -> int:
        """Position of the first row with a query."""
        return self.length + self.context

    @property
    def end(self) -> int:
        """Tokens that the slot holds afterwards."""
        return self.length + self.context + self.rows


@dataclass(slots=True)
class WriteCall:
    """Rows that go to one arena.

    Attributes:
        arena (`Arena`): Where to.
        target (`OnDevice`): Rows of the flat buffers.
        source (`OnDevice`, *optional*): Rows of the packed states; all of them in order if None.
    """

    arena: Arena
    target: OnDevice
    source: OnDevice | None


@dataclass(slots=True)
class AttentionCall:
    """One call of the attention kernel: some neighbouring rows of an arena, queries padded to one number.

    Attributes:
        arena (`Arena`): Which arena.
        begin, end (`int`): Rows of the arena.
        first_key, last_key (`int`): Tokens of each row that are read, the last exclusive.
        rows (`int`): Queries per arena row.
        queries (`slice` or `OnDevice`): Which packed queries, `(end - begin) * rows` of them.
        spans (`list[tuple[int, int]]`, *optional*):
            For each arena row which of its tokens are the first and the last query; what follows the last is not its
            own. None if the row stands alone, and then its queries end with the last key.
        masks (`dict`): Made by the first layer that needs one, kept for the others.
    """

    arena: Arena
    begin: int
    end: int
    first_key: int
    last_key: int
    rows: int
    queries: slice | OnDevice
    spans: list[tuple[int, int]] | None = None
    masks: dict[MaskKey, torch.Tensor | None] = field(default_factory=dict)


@dataclass(slots=True)
class GroupPlan:
    """What the layers of a group do in one forward pass.

    Attributes:
        group (`LayerGroup`): The layers.
        segments (`list[Segment]`): Rows per slot, in packed order.
        places (`list[Place]`): Where the slot of each segment lies.
        writes (`list[WriteCall]`): Together they store every packed row.
        calls (`list[AttentionCall]`): Together they answer every query.
        restore (`OnDevice`, *optional*):
            For each packed query its row among the answers of all calls; None if they are in order.
        flash_calls (`list[FlashCall]`, *optional*): The calls of flash attention instead, made by the first layer.
    """

    group: LayerGroup
    segments: list[Segment]
    places: list[Place]
    writes: list[WriteCall]
    calls: list[AttentionCall]
    restore: OnDevice | None
    flash_calls: list[FlashCall] | None = None


def flat_ranges(firsts: Iterable[int], counts: Iterable[int]) -> list[int]:
    """`first, first + 1, …` of each count, one after the other."""
    return [value for first, count in zip(firsts, counts, strict=True) for value in range(first, first + count)]


def plan_group(group: LayerGroup, segments: list[Segment], device_type: str, key_bytes: int) -> GroupPlan:
    """Works out the plan of a group whose slots have room for the new rows.

    Args:
        group (`LayerGroup`): The layers.
        segments (`list[Segment]`): What the forward pass brings.
        device_type (`str`): `"cpu"` or an accelerator, whose calls cost differently.
        key_bytes (`int`): Bytes of one token's key and value in one layer.

    Returns:
        `GroupPlan`: The plan.
    """
    places = [group.places[segment.slot] for segment in segments]
    cost_per_call = COST_PER_CALL_BYTES.get(device_type, COST_PER_CALL_BYTES_OF_ACCELERATORS) / max(key_bytes, 1)
    calls, answers = _plan_calls(group.visibility, segments, places, device_type, cost_per_call)
    # In order and without padding, not even at the end.
    is_in_order = answers == list(range(sum((call.end - call.begin) * call.rows for call in calls)))
    restore = None if is_in_order else OnDevice(answers)
    return GroupPlan(group, segments, places, _plan_writes(segments, places), calls, restore)


def _plan_writes(segments: list[Segment], places: list[Place]) -> list[WriteCall]:
    """Contexts come first in packed order, then the rows with queries."""
    arenas: dict[int, tuple[Arena, list[int], list[int]]] = {}
    packed = 0
    for is_context in (True, False):
        for segment, place in zip(segments, places, strict=True):
            count = segment.context if is_context else segment.rows
            if count:
                first = segment.length if is_context else segment.first
                base = place.row * place.arena.room + first - place.start
                _, target, source = arenas.setdefault(place.arena.room, (place.arena, [], []))
                target.extend(range(base, base + count))
                source.extend(range(packed, packed + count))
                packed += count
    is_single = len(arenas) == 1
    return [
        WriteCall(arena, OnDevice(target), None if is_single else OnDevice(source))
        for arena, target, source in arenas.values()
    ]


@dataclass(slots=True)
class _Run:
    """Neighbouring arena rows that are read by one call, while it is being put together."""

    members: list[tuple[int, int]]  # arena row and segment
    first_key: int
    last_key: int
    rows: int

    @property
    def begin(self) -> int:
        return self.members[0][0]

    @property
    def end(self) -> int:
        return self.members[-1][0] + 1

    @property
    def keys_read(self) -> int:
        return (self.end - self.begin) * (self.last_key - self.first_key)

    def cost(self) -> float:
        return self.keys_read * (1 + self.rows * COST_PER_QUERY_ROW)


def _plan_calls(
    visibility: Visibility,
    segments: list[Segment],
    places: list[Place],
    device_type: str,
    cost_per_call: float,
) -> tuple[list[AttentionCall], list[int]]:
    """The calls, and for each packed query the row of its answer among the answers of all calls."""
    by_arena: dict[int, list[tuple[int, int]]] = {}
    for index, place in enumerate(places):
        if segments[index].rows:
            by_arena.setdefault(place.arena.room, []).append((place.row, index))
    offsets = list(accumulate((segment.rows for segment in segments), initial=0))
    answers = [0] * offsets[-1]
    calls: list[AttentionCall] = []
    base = 0
    for members in by_arena.values():
        for run in _merge_runs(visibility, sorted(members), segments, places, cost_per_call):
            begin, arena = run.begin, places[run.members[0][1]].arena
            for row, index in run.members:
                first, count = base + (row - begin) * run.rows, segments[index].rows
                answers[offsets[index] : offsets[index] + count] = range(first, first + count)
            if len(run.members) == 1:
                index = run.members[0][1]
                calls.extend(
                    _single_calls(visibility, arena, run, segments[index], places[index], offsets[index], device_type)
                )
            else:
                calls.append(_padded_call(arena, run, segments, places, offsets))
            base += (run.end - begin) * run.rows
    return calls, answers


def _merge_runs(
    visibility: Visibility,
    members: Sequence[tuple[int, int]],
    segments: list[Segment],
    places: list[Place],
    cost_per_call: float,
) -> list[_Run]:
    """Joins neighbours as long as padding them costs less than a call of their own."""
    runs: list[_Run] = []
    for row, index in members:
        segment, start = segments[index], places[index].start
        run = _Run([(row, index)], _first_key(visibility, segment, start), segment.end - start, segment.rows)
        if runs and max(runs[-1].rows, run.rows) <= MOST_PADDED_ROWS:
            last = runs[-1]
            joined = _Run(
                last.members + run.members,
                min(last.first_key, run.first_key),
                max(last.last_key, run.last_key),
                max(last.rows, run.rows),
            )
            is_small = joined.rows == 1 or joined.keys_read * joined.rows <= MOST_MASK_ENTRIES
            if is_small and joined.cost() <= last.cost() + run.cost() + cost_per_call:
                runs[-1] = joined
                continue
        runs.append(run)
    return runs


def _first_key(visibility: Visibility, segment: Segment, start: int) -> int:
    """The first token of the arena row that any query of the segment sees."""
    if visibility.window is None:
        return 0
    return max(0, segment.first - visibility.window + 1 - start)


def _single_calls(
    visibility: Visibility, arena: Arena, run: _Run, segment: Segment, place: Place, offset: int, device_type: str
) -> list[AttentionCall]:
    """Calls for a row that stands alone: causal queries in short runs, each of which reads no key after itself."""
    step = segment.rows
    if visibility.is_causal and step > 1:
        step = rows_per_band(device_type, run.last_key)
    calls = []
    for done in range(0, segment.rows, step):
        rows = min(step, segment.rows - done)
        first = segment.first - place.start + done
        first_key = 0 if visibility.window is None else max(0, first - visibility.window + 1)
        queries = slice(offset + done, offset + done + rows)
        calls.append(AttentionCall(arena, run.begin, run.end, first_key, first + rows, rows, queries))
    return calls


def _padded_call(
    arena: Arena, run: _Run, segments: list[Segment], places: list[Place], offsets: list[int]
) -> AttentionCall:
    """A call for several arena rows; rows in between that have no queries get some that nobody asks for."""
    owners = dict(run.members)
    queries: list[int] = []
    spans: list[tuple[int, int]] = []
    for row in range(run.begin, run.end):
        index = owners.get(row)
        if index is None:
            queries.extend([0] * run.rows)
            spans.append((0, 0))
            continue
        segment, start, offset = segments[index], places[index].start, offsets[index]
        last = offset + segment.rows - 1
        queries.extend(range(offset, last + 1))
        queries.extend([last] * (run.rows - segment.rows))
        spans.append((segment.first - start, segment.end - 1 - start))
    first = queries[0]
    is_slice = queries == list(range(first, first + len(queries)))
    selection = slice(first, first + len(queries)) if is_slice else OnDevice(queries)
    return AttentionCall(arena, run.begin, run.end, run.first_key, run.last_key, run.rows, selection, spans)
