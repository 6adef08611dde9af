"""Rows that come and go at the end of a tensor."""

from __future__ import annotations

import os

import pytest
import torch

from adaflash_hf.generation.row_memory import RowMemory


ROW = (16, 2, 64)  # 8 KB in float32


def numbered(num_rows: int, row_shape: tuple[int, ...] = ROW) -> RowMemory:
    memory = RowMemory(num_rows, row_shape, torch.empty(0))
    for row in range(num_rows):
        memory.rows[row] = row + 1
    return memory


def values_of(memory: RowMemory) -> list[float]:
    assert all(row.unique().numel() == 1 for row in memory.rows)
    return [float(row.flatten()[0]) for row in memory.rows]


@pytest.mark.parametrize("row_shape", [ROW, (3,), (1, 999)])
def test_rows_that_were_given_up_come_back_as_zeros(row_shape: tuple[int, ...]) -> None:
    memory = numbered(6, row_shape)
    memory.rows[2:].zero_()  # as they must be
    memory.resize(2)
    assert values_of(memory) == [1, 2]
    memory.resize(5)
    assert values_of(memory) == [1, 2, 0, 0, 0]
    memory.rows[4] = 7
    memory.resize(40)
    assert values_of(memory) == [1, 2, 0, 0, 7] + [0] * 35
    assert memory.rows.nbytes == 40 * memory.rows[0].nbytes


def test_fewer_rows_stay_where_they_are() -> None:
    memory = numbered(6)
    place = memory.rows.data_ptr()
    memory.rows[3:].zero_()
    memory.resize(3)
    memory.resize(6)
    assert memory.rows.data_ptr() == place


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="Linux tells what is resident")
def test_pages_of_rows_that_are_given_up_go_back_to_the_system() -> None:
    memory = numbered(4096)  # 32 MB
    taken = resident_bytes()
    memory.rows[16:].zero_()
    memory.resize(16)
    assert resident_bytes() < taken - 30e6


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_written_outside_of_inference_mode() -> None:
    with torch.inference_mode():
        memory = numbered(3)
        memory.resize(2)
        small = RowMemory(1, (2,), torch.empty(0))
    memory.rows[1] = 5
    small.rows[0] = 1
    assert values_of(memory) == [1, 5]
