"""What the processor computes with instructions of its own."""

from __future__ import annotations

import torch


__all__ = ["multiplies_natively"]

# `torch.ops.mkldnn._is_mkldnn_bf16_supported` is of no use on x86: it is also true for plain AVX512, where oneDNN
# emulates.
_INSTRUCTIONS = {
    torch.bfloat16: ("amx_bf16", "avx512_bf16", "bf16", "sve_bf16"),
    torch.float16: ("amx_fp16", "avx512_fp16", "fp16", "fp16_arith"),
}


def multiplies_natively(dtype: torch.dtype) -> bool:
    """Whether the processor multiplies matrices of a dtype without emulation: AMX or AVX512 on x86, and their like on
    ARM; float32 always.

    Args:
        dtype (`torch.dtype`): Of weights and activations.
    """
    if dtype not in _INSTRUCTIONS:
        return True
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in _INSTRUCTIONS[dtype])
