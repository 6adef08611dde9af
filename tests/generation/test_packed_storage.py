"""Slots in arenas: room, moves, what leaves and what takes its place, and windows that drop what nobody sees."""

from __future__ import annotations

import random

import pytest
import torch

from adaflash_hf.generation.packed_storage import LayerGroup
from adaflash_hf.generation.visibility import Visibility


LAYERS = (0, 3)
HEADS, HEAD_DIM = 2, 4


class Filled:
    """A group whose slots hold their own number and the position of each token, so that every mix-up shows."""

    def __init__(self, window: int | None = None, smallest_room: int = 4):
        self.group = LayerGroup(Visibility(True, window), LAYERS, smallest_room)
        self.lengths: dict[int, int] = {}

    def open(self, slot: int, expected_tokens: int = 0) -> None:
        self.lengths[slot] = 0
        self.group.open(slot, expected_tokens)

    def close(self, slot: int) -> None:
        self.group.close(slot, self.lengths)
        del self.lengths[slot]

    def write(self, slot: int, rows: int) -> None:
        length = self.lengths[slot]
        place = self.group.reserve(slot, rows, self.lengths)
        states = torch.zeros(rows, HEADS, HEAD_DIM)
        states[:, :, 0], states[:, :, 1] = slot, torch.arange(length, length + rows)[:, None]
        for layer in LAYERS:
            buffer = place.arena.buffer(layer, states, states)
            first = length - place.start
            buffer.keys[place.row, first : first + rows] = states + layer
            buffer.values[place.row, first : first + rows] = -states - layer
        self.lengths[slot] = length + rows

    def check(self) -> None:
        window = self.group.visibility.window
        for slot, length in self.lengths.items():
            place = self.group.places[slot]
            assert place.arena.slots[place.row] == slot
            assert place.start <= (0 if window is None else max(0, length - window + 1))
            for layer in LAYERS if length else ():
                buffer = place.arena.layers[layer]
                kept = buffer.keys[place.row, : length - place.start]
                assert (kept[:, :, 0] == slot + layer).all()
                assert kept[:, 0, 1].tolist() == [position + layer for position in range(place.start, length)]
                torch.testing.assert_close(buffer.values[place.row, : length - place.start], -kept)


def test_room_doubles() -> None:
    filled = Filled()
    filled.open(7)
    rooms = []
    for _ in range(20):
        filled.write(7, 1)
        filled.check()
        rooms.append(filled.group.places[7].arena.room)
    assert rooms == [4] * 4 + [8] * 4 + [16] * 8 + [32] * 4
    assert list(filled.group.arenas) == [32]  # nothing stays behind


def test_expected_tokens_save_the_moves() -> None:
    filled = Filled()
    filled.open(0, expected_tokens=20)
    arena = filled.group.places[0].arena
    filled.write(0, 20)
    assert filled.group.places[0].arena is arena
    assert arena.room == 32


def test_last_slot_fills_the_gap() -> None:
    filled = Filled()
    for slot in range(4):
        filled.open(slot)
        filled.write(slot, 1 + slot % 3)
    filled.close(1)
    filled.check()
    assert filled.group.places[3].row == 1
    assert filled.group.arenas[4].slots == [0, 3, 2]


@pytest.mark.parametrize("closed", [0, 1, 2])
@pytest.mark.parametrize("taken_back", [0, 2])
def test_what_a_slot_leaves_is_cleared(closed: int, taken_back: int) -> None:
    """Masked keys are multiplied by zero, which not-a-number of an earlier request would survive."""
    filled = Filled()
    for slot, rows in enumerate((4, 3, 2)):
        filled.open(slot)
        filled.write(slot, rows)
    row = filled.group.places[closed].row
    for buffer in filled.group.arenas[4].layers.values():
        buffer.keys[row, : filled.lengths[closed]] = float("nan")
        buffer.values[row, : filled.lengths[closed]] = float("nan")
    filled.lengths[closed] -= taken_back  # rejected drafts stay where they are
    filled.close(closed)
    filled.check()
    for buffer in filled.group.arenas[4].layers.values():
        assert not buffer.keys.isnan().any()
        assert not buffer.values.isnan().any()


def test_what_was_about_to_be_written_is_cleared() -> None:
    """Room is made for all slots before any is written, and one that outgrows its arena is replaced by another."""
    filled = Filled()
    for slot in range(3):
        filled.open(slot)
        filled.write(slot, 1)
    group = filled.group
    group.reserve(2, 2, filled.lengths)
    group.reserve(0, 4, filled.lengths)  # moves, and the last slot takes its place
    place = group.places[2]
    assert place.row == 0
    for buffer in place.arena.layers.values():
        buffer.keys[0, 1:3] = buffer.values[0, 1:3] = float("nan")
    filled.close(2)  # rejected or failed, and gone; another slot takes the row
    filled.check()
    for buffer in group.arenas[4].layers.values():
        assert not buffer.keys.isnan().any()
        assert not buffer.values.isnan().any()


def test_what_a_slot_leaves_as_it_grows_is_cleared() -> None:
    filled = Filled()
    for slot in range(2):
        filled.open(slot)
        filled.write(slot, 3)
    arena = filled.group.arenas[4]
    filled.write(1, 3)
    filled.check()
    assert all(not buffer.keys[1].any() and not buffer.values[1].any() for buffer in arena.layers.values())


def test_rows_grow_and_shrink() -> None:
    filled = Filled()
    rows = []
    for slot in range(12):
        filled.open(slot)
        filled.write(slot, 2)
        rows.append(filled.group.arenas[4].num_rows)
    assert rows == [1, 2, 3, 4, 6, 6, 9, 9, 9, 13, 13, 13]
    assert filled.group.memory_bytes == 13 * 4 * HEADS * HEAD_DIM * 4 * 2 * len(LAYERS)
    for slot in range(11):
        filled.close(slot)
        filled.check()
    assert filled.group.arenas[4].num_rows <= 2
    filled.close(11)
    assert filled.group.memory_bytes == 0


def test_window_drops_what_nobody_sees() -> None:
    window = 6
    filled = Filled(window)
    filled.open(0)
    for _ in range(100):
        filled.write(0, 1)
        filled.check()
    assert filled.group.places[0].arena.room == filled.group.widest_room == 16
    assert filled.group.places[0].start >= 100 - 16


def test_window_and_a_long_chunk() -> None:
    """A chunk longer than the widest room gets room of its own, which is given back with the next few tokens."""
    filled = Filled(window=6)
    filled.open(0)
    for rows in (3, 40, 40, 1):
        filled.write(0, rows)
        filled.check()
    assert filled.group.places[0].arena.room == 16
    assert filled.group.places[0].start == 83 - 5


def test_window_after_going_back() -> None:
    filled = Filled(window=4, smallest_room=2)
    filled.open(0)
    for _ in range(40):
        filled.write(0, 3)
        filled.lengths[0] -= 2  # rejected
        filled.check()


@pytest.mark.parametrize("window", [None, 5])
def test_random_traffic(window: int | None) -> None:
    generator = random.Random(0)
    filled = Filled(window)
    next_slot = 0
    for _ in range(300):
        slots = list(filled.lengths)
        action = generator.random()
        if not slots or (action < 0.15 and len(slots) < 12):
            filled.open(next_slot, generator.choice([0, 0, 9]))
            next_slot += 1
        elif action < 0.25:
            filled.close(generator.choice(slots))
        else:
            filled.write(generator.choice(slots), generator.choice([1, 1, 1, 2, 5, 20]))
        filled.check()
    for slot in list(filled.lengths):
        filled.close(slot)
    assert filled.group.memory_bytes == 0
