"""Memory for a tensor of which rows come and go at the end, without copying the others where the system helps."""

from __future__ import annotations

import math
import mmap

import torch


__all__ = ["RowMemory"]


class RowMemory:
    """
    A tensor of zeros whose first dimension may be changed.

    On a CPU the system hands out memory when it is first written, so that rows that nobody comes to use cost nothing,
    and takes it back at the end where rows are given up.

    Args:
        num_rows (`int`): Rows at first.
        row_shape (`tuple[int, ...]`): Shape of a row.
        like (`torch.Tensor`): Data type and device.

    Attributes:
        rows (`torch.Tensor` of shape `(num_rows, *row_shape)`): Another tensor after every change.
    """

    __slots__ = ("_memory", "rows")

    def __init__(self, num_rows: int, row_shape: tuple[int, ...], like: torch.Tensor):
        size = num_rows * math.prod(row_shape) * like.dtype.itemsize
        is_mapped = like.device.type == "cpu" and size >= mmap.PAGESIZE and hasattr(mmap, "MAP_PRIVATE")
        self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) if is_mapped else None
        if self._memory is None:
            with torch.inference_mode(False):  # as below
                self.rows = like.new_zeros((num_rows, *row_shape))
        else:
            self.rows = self._view(num_rows, row_shape, like.dtype)

    def _view(self, num_rows: int, row_shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        count = num_rows * math.prod(row_shape)
        with torch.inference_mode(False):  # what is made under inference mode could not be written outside of it
            return torch.frombuffer(self._memory, dtype=dtype, count=count).view(num_rows, *row_shape)

    def resize(self, num_rows: int) -> None:
        """
        Keeps the first rows; those beyond must be zero, and new ones are.

        Args:
            num_rows (`int`): Rows from now on.
        """
        old, row_shape = self.rows, tuple(self.rows.shape[1:])
        end = num_rows * math.prod(row_shape) * old.dtype.itemsize
        if self._memory is not None and end <= len(self._memory):
            self._give_back(end)
            self.rows = self._view(num_rows, row_shape, old.dtype)
            return
        new = RowMemory(num_rows, row_shape, old)
        kept = min(num_rows, len(old))
        new.rows[:kept].copy_(old[:kept])
        self._memory, self.rows = new._memory, new.rows

    def _give_back(self, end: int) -> None:
        """Pages from byte `end` on."""
        assert self._memory is not None
        begin = -(-end // mmap.PAGESIZE) * mmap.PAGESIZE
        if begin < len(self._memory) and hasattr(mmap, "MADV_DONTNEED"):
            self._memory.madvise(mmap.MADV_DONTNEED, begin)
