from __future__ import annotations

import pytest
import torch

from adaflash_hf.errors import DrafterExportError
from adaflash_hf.serving.formats.tensor_dtypes import cast_tensors, dtype_name


def test_the_dtype_is_that_of_most_elements():
    tensors = {
        "a": torch.zeros(9, dtype=torch.bfloat16),
        "b": torch.zeros(2),
        "ids": torch.zeros(50, dtype=torch.long),
    }
    assert dtype_name(tensors) == "bfloat16"


def test_integers_stay_and_rounding_is_told():
    tensors = {"exact": torch.tensor([0.5, 2.0]), "rounded": torch.tensor([1.001]), "ids": torch.tensor([7])}
    cast, notes = cast_tensors(tensors, torch.bfloat16)
    assert [tensor.dtype for tensor in cast.values()] == [torch.bfloat16, torch.bfloat16, torch.int64]
    assert notes == ["1 of 3 tensors were rounded from float32 to torch.bfloat16."]
    assert cast_tensors({"exact": tensors["exact"]}, torch.bfloat16)[1] == []
    assert cast_tensors(tensors, None)[0]["rounded"] is tensors["rounded"]


def test_values_that_do_not_fit_are_refused():
    with pytest.raises(DrafterExportError, match="`w` has values that are too large for torch.float16"):
        cast_tensors({"w": torch.tensor([1e6])}, torch.float16)
