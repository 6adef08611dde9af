"""Files that appear complete or not at all, whatever is killed when."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


__all__ = ["PARTIAL_SUFFIX", "sync_directory", "sync_tree", "written_aside"]

PARTIAL_SUFFIX = ".partial"


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """
    A place to write to; when the block ends, the file is on the disk and takes its name in one step. If the block
    fails, what was there stays, and nothing is left of what was written: it may have filled the disk.

    Args:
        path (`Path`):
            Name of the finished file.

    Yields:
        `Path`: Name to write under; a killed process leaves that one behind.
    """
    partial = path.with_suffix(PARTIAL_SUFFIX)
    try:
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def sync_directory(directory: Path) -> None:
    """Have the names in a directory, such as that of a file just renamed, survive a power failure."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(directory: Path) -> None:
    """Have all files under a directory, and their names, survive a power failure."""
    for path in sorted(directory.rglob("*"), reverse=True):
        if path.is_dir():
            sync_directory(path)
        else:
            with path.open("rb") as file:
                os.fsync(file.fileno())
    sync_directory(directory)
