"""Most memory that a block of code used: of the device on CUDA, of the process elsewhere."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch


__all__ = ["PeakMemory"]

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


class PeakMemory:
    """
    Starts counting when made.

    On CUDA that is what PyTorch had allocated. On Linux it is the resident memory of the whole process, weights
    included, whose high-water mark can be reset. Elsewhere that mark only rises, so the value is an upper bound.

    Args:
        device (`torch.device`):
            Where the models are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return
        try:
            _CLEAR.write_text(_RESET_PEAK)
        except OSError:
            pass  # not Linux, or not allowed: the mark stays where it is

    def read_bytes(self) -> int:
        """The peak since this object was made."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        try:
            for line in _STATUS.read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        except OSError:
            pass
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
