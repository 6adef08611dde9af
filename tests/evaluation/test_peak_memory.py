"""The peak is that of the block, not of the process's whole life."""

from __future__ import annotations

import sys

import pytest
import torch

from adaflash_hf.evaluation.peak_memory import PeakMemory


MEBIBYTE = 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the high-water mark cannot be reset")
def test_peak_rises_and_is_reset() -> None:
    device = torch.device("cpu")
    before = PeakMemory(device).read_bytes()
    peak = PeakMemory(device)
    block = torch.ones(64 * MEBIBYTE, dtype=torch.uint8)
    highest = peak.read_bytes()
    assert highest - before > 50 * MEBIBYTE
    del block
    assert highest - PeakMemory(device).read_bytes() > 50 * MEBIBYTE


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_peak_of_the_device() -> None:
    device = torch.device("cuda")
    peak = PeakMemory(device)
    torch.ones(64 * MEBIBYTE, dtype=torch.uint8, device=device)
    assert peak.read_bytes() >= 64 * MEBIBYTE
