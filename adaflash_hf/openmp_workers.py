"""Idle OpenMP workers, which slow down those of another thread.

Every thread that runs parallel CPU operations has OpenMP workers of its own, which stay as long as it does. As soon as
there are more of them than processors, GNU's runtime lets none of them wait actively between two operations, and a
decoding step has hundreds: an engine in a background thread took 1.8 times as long per step (SmolLM2-135M, eight
requests, two cores) because the main thread had once loaded the model.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache


__all__ = ["release_openmp_workers"]

_SOFT_PAUSE = 1  # omp_pause_soft: what was set, such as the number of threads, stays


def release_openmp_workers() -> bool:
    """
    End the workers of the calling thread, which is about to leave the work to another one.

    Its next parallel operation starts new ones.

    Returns:
        `bool`: Whether there is an OpenMP runtime that can do so (OpenMP 5.0).
    """
    pause = _pause_function()
    return pause is not None and pause(_SOFT_PAUSE) == 0


@cache
def _pause_function() -> Callable[[int], int] | None:
    try:
        # torch loads its runtime for everyone, so that its symbols are among the process's own.
        return ctypes.CDLL(None).omp_pause_resource_all
    except (AttributeError, OSError, TypeError):
        return None
