"""Configuration of the confidence head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from adaflash_hf import ConfidenceHeadConfig, InvalidInputError


@pytest.mark.parametrize(("field", "value"), [("draft_length", 0), ("hidden_size", -1)])
def test_a_value_that_cannot_work_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidInputError, match=f"`{field}` is {value!r}"):
        ConfidenceHeadConfig(**{field: value})


def test_round_trip(tmp_path: Path) -> None:
    ConfidenceHeadConfig(hidden_size=12, draft_length=7).save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is ConfidenceHeadConfig
    assert (loaded.hidden_size, loaded.draft_length) == (12, 7)
