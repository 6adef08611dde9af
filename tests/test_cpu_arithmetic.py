"""Which dtypes a processor multiplies by itself."""

from __future__ import annotations

import pytest
import torch

from adaflash_hf.cpu_arithmetic import multiplies_natively


@pytest.mark.parametrize(
    ("capabilities", "native"),
    [
        ({"avx2": True, "f16c": True}, set()),
        ({"avx512_f": True, "avx512_bf16": True}, {torch.bfloat16}),
        ({"amx_bf16": True, "amx_fp16": True}, {torch.bfloat16, torch.float16}),
        ({"neon": True, "bf16": True, "fp16": False}, {torch.bfloat16}),
    ],
)
def test_processors_are_known_by_their_instructions(
    capabilities: dict[str, bool], native: set[torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert multiplies_natively(torch.float32)
    assert {dtype for dtype in (torch.bfloat16, torch.float16) if multiplies_natively(dtype)} == native
