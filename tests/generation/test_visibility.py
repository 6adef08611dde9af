"""The rule of which keys a row sees, by hand."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_drafter_config

from adaflash_hf.generation.visibility import Visibility, drafter_visibility


@pytest.mark.parametrize(
    ("visibility", "expected"),
    [
        (Visibility(True, None), [[1, 1, 1, 0], [1, 1, 1, 1]]),
        (Visibility(True, 2), [[0, 1, 1, 0], [0, 0, 1, 1]]),
        (Visibility(False, None), [[1, 1, 1, 1], [1, 1, 1, 1]]),
        (Visibility(False, 2), [[0, 1, 1, 1], [0, 0, 1, 1]]),
    ],
)
def test_mask(visibility: Visibility, expected: list[list[int]]) -> None:
    """Keys at positions 0 to 3, rows at positions 2 and 3."""
    mask = visibility.mask(torch.tensor([[2], [3]]), torch.arange(4)[None])
    assert mask.int().tolist() == expected
    assert visibility.is_unlimited == bool(mask.all())


def test_drafter_visibility() -> None:
    config = tiny_drafter_config(layer_types=["full_attention", "sliding_attention"], sliding_window=5)
    assert drafter_visibility(config) == [Visibility(False, None), Visibility(True, 5)]
    config.is_causal = False
    assert drafter_visibility(config)[1] == Visibility(False, 5)
