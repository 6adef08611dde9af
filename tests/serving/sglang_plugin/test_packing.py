"""Packing and laying back, against the ranges of the package's own packed batches."""

from __future__ import annotations

import pytest
import torch

from adaflash_hf.generation.packed_plan import flat_ranges
from adaflash_hf.serving.sglang_plugin.packing import pack_rows, packed_places, unpack_rows


def test_places_by_hand() -> None:
    places = packed_places(torch.tensor([2, 1, 4], dtype=torch.int32), block_size=4, num_rows=9)
    assert places.tolist() == [0, 1, 4, 8, 9, 10, 11, -1, -1]
    assert places.dtype == torch.int64


@pytest.mark.parametrize("padding", [0, 5])
def test_places_are_the_engines_ranges(padding: int) -> None:
    generator = torch.Generator().manual_seed(padding)
    for num_requests in (1, 2, 7, 33):
        lengths = torch.randint(1, 17, (num_requests,), generator=generator)
        expected = flat_ranges(range(0, num_requests * 16, 16), lengths.tolist())
        places = packed_places(lengths, 16, len(expected) + padding)
        assert places.tolist() == expected + [-1] * padding


def test_a_round_trip_keeps_the_verified_rows_and_nothing_else() -> None:
    lengths = torch.tensor([3, 1, 2])
    places = packed_places(lengths, 3, 8)
    ids = torch.arange(10, 19)
    packed = pack_rows(ids, places)
    assert packed.tolist() == [10, 11, 12, 13, 16, 17, 0, 0]
    # Graphs return more rows than there are; those of the padding are not results.
    results = torch.stack([packed, -packed], dim=1)
    results[6:] = 99
    results = torch.cat([results, torch.full((3, 2), 77)])
    back = unpack_rows(results, places, 9)
    assert back[:, 0].tolist() == [10, 11, 12, 13, 0, 0, 16, 17, 0]
    assert torch.equal(back[:, 1], -back[:, 0])


def test_whole_blocks_are_left_as_they_are() -> None:
    places = packed_places(torch.full((5,), 4), 4, 20)
    assert places.tolist() == list(range(20))
    rows = torch.randn(20, 3)
    assert torch.equal(unpack_rows(rows, places, 20), rows)
