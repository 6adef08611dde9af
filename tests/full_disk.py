"""A disk that fills up, as far as a process can bring that about without one."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest


@contextmanager
def full_disk(room_bytes: int) -> Iterator[None]:
    """Each file has this much room, and a write that goes beyond it fails half-way."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def full_after(owner: Any, name: str, calls: int, room_bytes: int) -> Iterator[None]:
    """Within this, the disk fills up once a function has been called so often."""
    function, done = getattr(owner, name), 0

    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal done
            result = function(*args, **kwargs)
            done += 1
            if done == calls:
                stack.enter_context(full_disk(room_bytes))
            return result

        patch.setattr(owner, name, counted)
        yield
