"""Configuration of the length head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from adaflash_hf import InvalidInputError, LengthHeadConfig


@pytest.mark.parametrize(("field", "value"), [("head_type", "threshold"), ("bottleneck_size", 0), ("hidden_size", -1)])
def test_a_value_that_cannot_work_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidInputError, match=f"`{field}` is {value!r}"):
        LengthHeadConfig(**{field: value})


def test_round_trip(tmp_path: Path) -> None:
    LengthHeadConfig(hidden_size=12, bottleneck_size=7, head_type="mean_last_residual").save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is LengthHeadConfig
    assert (loaded.hidden_size, loaded.bottleneck_size, loaded.head_type) == (12, 7, "mean_last_residual")
