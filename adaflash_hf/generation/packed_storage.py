"""Memory for the keys and values of many requests: buffers that grow geometrically, filled without gaps.

Layers that see the same keys form a group. A group sorts its slots into arenas by how much room they need; a slot that
outgrows its arena moves to one of twice the room, so a token is copied once or twice in its life whatever the length.
Inside an arena the slots lie side by side: attention reads all of them through one view, and a slot that leaves is
replaced by the last one. Layers with a sliding window drop what lies before it whenever their room is full.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from .packed_masks import BandMasks
from .row_memory import RowMemory
from .visibility import Visibility


__all__ = ["Arena", "LayerGroup", "Place"]

# Rows by which an arena grows: half of those it has, so that at most a third of it is empty.
ROW_GROWTH = 1.5


def grown_rows(num_rows: int) -> int:
    """Rows of an arena after one more than `num_rows` was needed."""
    return max(num_rows + 1, int(num_rows * ROW_GROWTH))


class LayerBuffer:
    """Keys and values of one layer in one arena.

    Zeros at first, because masked keys are multiplied by zero, which not-a-number would survive.

    Args:
        num_rows (`int`): Slots that there is room for.
        room (`int`): Tokens of each.
        keys, values (`torch.Tensor`): States of the kind to be stored, whose last two dimensions count.

    Attributes:
        keys, values (`torch.Tensor` of shape `(num_rows, room, num_heads, head_dim)`): One row per slot.
        flat_keys, flat_values (`torch.Tensor` of shape `(num_rows * room, num_heads * head_dim)`): The same memory.
    """

    __slots__ = ("_memories", "flat_keys", "flat_values", "keys", "values")

    def __init__(self, num_rows: int, room: int, keys: torch.Tensor, values: torch.Tensor):
        self._memories = [RowMemory(num_rows, (room, *states.shape[-2:]), states) for states in (keys, values)]
        self._take_views()

    def _take_views(self) -> None:
        self.keys, self.values = (memory.rows for memory in self._memories)
        self.flat_keys, self.flat_values = self.keys.flatten(0, 1).flatten(1), self.values.flatten(0, 1).flatten(1)

    def resize(self, num_rows: int) -> None:
        """Makes room for more or fewer slots; those that are given up must have been cleared."""
        for memory in self._memories:
            memory.resize(num_rows)
        self._take_views()

    def copy_row(self, row: int, begin: int, end: int, source: LayerBuffer, source_row: int) -> None:
        """Takes tokens `begin` to `end` of another row, to the start of `row`."""
        self.keys[row, : end - begin] = source.keys[source_row, begin:end]
        self.values[row, : end - begin] = source.values[source_row, begin:end]

    def clear(self, row: int, begin: int, end: int) -> None:
        """Sets some tokens of a row to zero."""
        self.keys[row, begin:end].zero_()
        self.values[row, begin:end].zero_()

    @property
    def memory_bytes(self) -> int:
        """Bytes of both tensors."""
        return self.keys.nbytes + self.values.nbytes


class Arena:
    """Slots of equal room. Rows `0` to `len(slots) - 1` are in use."""

    def __init__(self, room: int):
        self.room = room
        self.num_rows = 0
        self.slots: list[int] = []
        self.layers: dict[int, LayerBuffer] = {}

    def buffer(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> LayerBuffer:
        """The buffer of a layer, made when its first states arrive."""
        buffer = self.layers.get(layer)
        if buffer is None:
            buffer = self.layers[layer] = LayerBuffer(self.num_rows, self.room, keys, values)
        return buffer

    def append(self, slot: int) -> int:
        """Gives a slot the next row."""
        if len(self.slots) == self.num_rows:
            self._resize(grown_rows(self.num_rows))
        self.slots.append(slot)
        return len(self.slots) - 1

    def remove(self, row: int, written: int, used_of_last: int, written_of_last: int) -> int | None:
        """Takes a row out; the last row moves into its place.

        Args:
            row (`int`): Row to free.
            written (`int`): Tokens of it that may not be zero.
            used_of_last (`int`): Tokens that the last row holds.
            written_of_last (`int`): Tokens of the last row that may not be zero.

        Returns:
            `int`, *optional*: The slot that moved to `row`.
        """
        last = len(self.slots) - 1
        moved = self.slots.pop()
        for buffer in self.layers.values():
            if row != last:
                buffer.copy_row(row, 0, used_of_last, buffer, last)
                buffer.clear(row, used_of_last, written)
            buffer.clear(last, 0, written if row == last else written_of_last)
        if row != last:
            self.slots[row] = moved
        if self.slots and len(self.slots) * ROW_GROWTH * ROW_GROWTH < self.num_rows:
            self._resize(int(len(self.slots) * ROW_GROWTH))
        return moved if row != last else None

    def _resize(self, num_rows: int) -> None:
        # One layer at a time, so that never more than one layer is there twice.
        for buffer in self.layers.values():
            buffer.resize(num_rows)
        self.num_rows = num_rows

    @property
    def memory_bytes(self) -> int:
        """Bytes of all layers."""
        return sum(buffer.memory_bytes for buffer in self.layers.values())


class Place:
    """Where a slot lies: its arena, its row there, the position of the first token that the row holds, and how many
    tokens at the row's front may not be zero, those included that a forward pass is about to write."""

    __slots__ = ("arena", "row", "start", "written")

    def __init__(self, arena: Arena, row: int, start: int):
        self.arena, self.row, self.start = arena, row, start
        self.written = 0


class LayerGroup:
    """The layers that share a visibility rule, and where each slot lies in their buffers.

    Args:
        visibility (`Visibility`): The rule.
        layers (`Iterable[int]`): Indices of the layers.
        smallest_room (`int`): Room of the smallest arena, in tokens; others are this times a power of two.
    """

    def __init__(self, visibility: Visibility, layers: Iterable[int], smallest_room: int):
        self.visibility = visibility
        self.layers = list(layers)
        self.smallest_room = smallest_room
        self.bands = BandMasks(visibility)
        self.arenas: dict[int, Arena] = {}
        self.places: dict[int, Place] = {}

    def room_for(self, num_tokens: int) -> int:
        """Room of the arena that `num_tokens` tokens need."""
        room = self.smallest_room
        while room < num_tokens:
            room *= 2
        return room

    @property
    def widest_room(self) -> int | None:
        """Room that is enough for a slot of any length, new rows apart; None without a window."""
        window = self.visibility.window
        return None if window is None else self.room_for(2 * window)

    def room_of_slot(self, num_tokens: int) -> int:
        """Room that a slot of this length takes."""
        room, widest = self.room_for(num_tokens), self.widest_room
        return room if widest is None else min(room, widest)

    def forecast_tokens(self, lengths: Mapping[int, int], new_rows: int, opening: Sequence[int]) -> int:
        """Tokens that all arenas will have room for, at most, while slots grow and others are opened.

        Args:
            lengths (`Mapping[int, int]`): Tokens of slots after they have grown.
            new_rows (`int`): By how many rows each grows at most in one forward pass.
            opening (`Sequence[int]`): Tokens of each slot to be opened.
        """
        capacity = {room: arena.num_rows for room, arena in self.arenas.items()}
        used = {room: len(arena.slots) for room, arena in self.arenas.items()}
        rooms = [self.room_of_slot(length) for length in opening]
        for slot, length in lengths.items():
            room, window = self.room_of_slot(length), self.visibility.window
            if window is not None:
                room = max(room, self.room_for(min(length, window + new_rows)))
            if room > self.places[slot].arena.room:
                rooms.append(room)
        for room in rooms:
            used[room] = used.get(room, 0) + 1
            if used[room] > capacity.get(room, 0):
                capacity[room] = grown_rows(capacity.get(room, 0))
        return sum(room * rows for room, rows in capacity.items())

    def open(self, slot: int, expected_tokens: int) -> None:
        """Gives a new slot a row."""
        self._put(slot, self.room_of_slot(expected_tokens), start=0)

    def close(self, slot: int, lengths: dict[int, int]) -> None:
        """Frees the row of a slot.

        Args:
            slot (`int`): The slot.
            lengths (`dict[int, int]`): Tokens of each slot.
        """
        place = self.places.pop(slot)
        self._take_out(place, lengths)

    def reserve(self, slot: int, new_rows: int, lengths: dict[int, int]) -> Place:
        """Makes room for rows about to be written after those that a slot holds.

        Args:
            slot (`int`): The slot.
            new_rows (`int`): Rows.
            lengths (`dict[int, int]`): Tokens of each slot.

        Returns:
            `Place`: Where the slot lies now.
        """
        place = self._reserve(slot, new_rows, lengths)
        place.written = max(place.written, lengths[slot] + new_rows - place.start)
        return place

    def _reserve(self, slot: int, new_rows: int, lengths: dict[int, int]) -> Place:
        place, length = self.places[slot], lengths[slot]
        end, room, widest = length + new_rows, place.arena.room, self.widest_room
        if widest is None or room <= widest:
            if end - place.start <= room:
                return place
            grown = self.room_for(end - place.start)
            if widest is None or grown <= widest:
                return self._move(slot, place.start, grown, lengths)
        assert widest is not None and self.visibility.window is not None
        # The first of the new rows sees furthest back; what lies before that is not needed any more.
        start = max(place.start, length - self.visibility.window + 1)
        needed = max(widest, self.room_for(end - start))
        if needed == room and end - place.start <= room:
            return place
        return self._move(slot, start, needed, lengths)

    def _put(self, slot: int, room: int, start: int) -> Place:
        arena = self.arenas.get(room)
        if arena is None:
            arena = self.arenas[room] = Arena(room)
        place = self.places[slot] = Place(arena, arena.append(slot), start)
        return place

    def _take_out(self, place: Place, lengths: dict[int, int]) -> None:
        arena = place.arena
        last = arena.slots[-1]
        last_place = self.places.get(last, place)
        used_of_last = lengths[last] - last_place.start
        moved = arena.remove(place.row, place.written, used_of_last, last_place.written)
        if moved is not None:
            last_place.row = place.row
        if not arena.slots:
            del self.arenas[arena.room]

    def _move(self, slot: int, start: int, room: int, lengths: dict[int, int]) -> Place:
        """Copies the tokens from position `start` on to another arena, or to the front of the same row."""
        old = self.places[slot]
        begin, end = start - old.start, lengths[slot] - old.start
        if room == old.arena.room:
            for buffer in old.arena.layers.values():
                # Source and destination overlap when little is dropped.
                buffer.keys[old.row, : end - begin] = buffer.keys[old.row, begin:end].clone()
                buffer.values[old.row, : end - begin] = buffer.values[old.row, begin:end].clone()
            old.start = start
            return old
        place = self._put(slot, room, start)
        for layer, source in old.arena.layers.items():
            place.arena.buffer(layer, source.keys, source.values).copy_row(place.row, begin, end, source, old.row)
        self._take_out(old, lengths)
        return place

    @property
    def memory_bytes(self) -> int:
        """Bytes of all arenas."""
        return sum(arena.memory_bytes for arena in self.arenas.values())
