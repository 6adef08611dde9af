from __future__ import annotations

import pytest

from adaflash_hf.online.buffer_sampling import domain_quotas


@pytest.mark.parametrize(
    ("available", "total", "expected"),
    [
        ({"code": 100, "math": 100}, 10, {"code": 5, "math": 5}),
        ({"code": 2, "math": 100}, 10, {"code": 2, "math": 8}),
        ({"chat": 1, "code": 3, "math": 100}, 12, {"chat": 1, "code": 3, "math": 8}),
        ({"code": 2, "math": 3}, 10, {"code": 2, "math": 3}),
        ({"code": 5, "math": 9}, 1, {"code": 1, "math": 0}),
        ({}, 5, {}),
    ],
)
def test_shares_are_equal_as_far_as_there_are_rows(available, total, expected):
    assert domain_quotas(available, total) == expected
