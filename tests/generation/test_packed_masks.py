"""Masks of packed calls against the rule they come from."""

from __future__ import annotations

import pytest
import torch

from adaflash_hf.generation.packed_masks import BandMasks, padded_mask, rows_per_band
from adaflash_hf.generation.visibility import Visibility


CPU = torch.device("cpu")
KIND = (torch.float32, CPU)
RULES = [Visibility(True), Visibility(True, 4), Visibility(False, 4), Visibility(False)]


def visible(mask: torch.Tensor) -> list[list[int]]:
    return (mask == 0).int().tolist()


@pytest.mark.parametrize("visibility", RULES)
@pytest.mark.parametrize(("rows", "keys"), [(1, 5), (3, 3), (3, 9), (64, 70), (5, 300)])
def test_corner_is_the_rule(visibility: Visibility, rows: int, keys: int) -> None:
    mask = BandMasks(visibility).corner(rows, keys, *KIND, 2)
    if mask is None:
        assert rows == 1 or visibility.is_unlimited
        return
    expected = visibility.mask(torch.arange(keys - rows, keys)[:, None], torch.arange(keys)[None])
    assert mask.shape == (1, 1, rows * 2, keys)
    assert visible(mask[0, 0, ::2]) == visible(mask[0, 0, 1::2]) == expected.int().tolist()


def test_corners_share_a_band() -> None:
    bands = BandMasks(Visibility())
    first, second = bands.corner(5, 40, *KIND, 1), bands.corner(7, 200, *KIND, 1)
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    grown = bands.corner(7, 2000, *KIND, 1)
    assert grown.shape[-1] == 2000


def test_padded_mask_by_hand() -> None:
    """Two requests: queries at tokens 2 and 3, and at token 1 alone, which is repeated."""
    mask = padded_mask(Visibility(), [(2, 3), (1, 1)], 2, (0, 4), *KIND, 1)
    assert visible(mask[:, 0]) == [[[1, 1, 1, 0], [1, 1, 1, 1]], [[1, 1, 0, 0], [1, 1, 0, 0]]]
    mask = padded_mask(Visibility(True, 2), [(2, 3), (1, 1)], 2, (1, 4), *KIND, 1)
    assert visible(mask[:, 0]) == [[[1, 1, 0], [0, 1, 1]], [[1, 0, 0], [1, 0, 0]]]


def test_padded_mask_of_bidirectional_blocks_has_one_row() -> None:
    mask = padded_mask(Visibility(False), [(2, 5), (1, 4)], 4, (0, 6), *KIND, 3)
    assert visible(mask[:, 0]) == [[[1] * 6], [[1] * 5 + [0]]]


def test_padded_mask_repeats_rows_for_grouped_heads() -> None:
    mask = padded_mask(Visibility(), [(0, 1), (1, 2)], 2, (0, 3), *KIND, 3)
    assert mask.shape == (2, 1, 6, 3)
    assert visible(mask[0, 0]) == [[1, 0, 0]] * 3 + [[1, 1, 0]] * 3


@pytest.mark.parametrize("visibility", RULES)
def test_equal_single_queries_need_no_mask(visibility: Visibility) -> None:
    assert padded_mask(visibility, [(8, 8)] * 3, 1, (5, 9), *KIND, 2) is None


def test_finite_in_every_dtype() -> None:
    """A row that sees nothing, of padding, must not turn into not-a-number."""
    for dtype in (torch.float16, torch.bfloat16):
        mask = padded_mask(Visibility(), [(2, 2), (0, 0)], 1, (1, 3), dtype, CPU, 1)
        assert mask.dtype == dtype
        assert mask.isfinite().all()


def test_many_keys_get_smaller_masks() -> None:
    assert rows_per_band("cpu", 20_000) < rows_per_band("cpu", 1000) < rows_per_band("cuda", 1000)
