"""Directories that appear complete or not at all, whatever is killed when."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .atomic_files import sync_directory, sync_tree


__all__ = ["directory_written_aside", "files_written_aside", "remove_directory", "remove_leftovers"]


@contextmanager
def directory_written_aside(path: Path) -> Iterator[Path]:
    """
    A directory to write into; when the block ends, everything in it is on the disk and it takes its name. A directory
    of that name is replaced. If the block fails, nothing is left behind and what was there stays.

    Args:
        path (`Path`):
            Name of the finished directory. Its parent is made if need be.

    Yields:
        `Path`: Directory to write into, beside the finished one; a killed process leaves it behind, under a hidden
        name that ends in `.partial`, for [`remove_leftovers`].
    """
    # Not by mkdtemp, whose directories are private: a checkpoint is as readable as any other new directory here.
    partial = _name_aside(path, "partial")
    partial.mkdir(parents=True)
    try:
        yield partial
        sync_tree(partial)
        _take_name(partial, path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    sync_directory(path.parent)


@contextmanager
def files_written_aside(directory: Path) -> Iterator[Path]:
    """
    Files for a directory that holds others, too. When the block ends, all of them are on the disk, and each takes the
    place of what had its name. If the block fails, nothing changes.

    Args:
        directory (`Path`):
            Where they belong; made if it is not there.

    Yields:
        `Path`: Directory to write them into, hidden within `directory`; a killed process leaves it behind, under a
        name that ends in `.partial`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".", suffix=".partial", dir=directory) as name:
        partial = Path(name)
        yield partial
        sync_tree(partial)
        for path in sorted(partial.rglob("*")):
            place = directory / path.relative_to(partial)
            if path.is_dir():
                place.mkdir(exist_ok=True)
            else:
                os.replace(path, place)
                sync_directory(place.parent)


def remove_directory(path: Path) -> None:
    """
    Remove a directory of which no reader should see a part.

    Args:
        path (`Path`):
            The directory; a killed process leaves it behind, under a hidden name, for [`remove_leftovers`].
    """
    aside = _name_aside(path, "removed")
    os.rename(path, aside)
    shutil.rmtree(aside, ignore_errors=True)


def remove_leftovers(parent: Path, names: str) -> None:
    """
    Remove what killed processes were writing or removing, and put back what had made room for something that did not
    come. Nobody may be doing any of this now.

    Args:
        parent (`Path`):
            Where the directories are.
        names (`str`):
            Pattern of their names.
    """
    # The last one first: it is what readers saw before the kill. Earlier ones had been replaced.
    displaced = sorted(parent.glob(f".{names}.replaced"), key=lambda path: path.stat().st_ctime_ns, reverse=True)
    for path in displaced:
        place = parent / path.name.removeprefix(".").rsplit(".", 2)[0]
        if not place.exists():
            os.rename(path, place)
            sync_directory(parent)
    for suffix in ("partial", "removed", "replaced"):
        for path in parent.glob(f".{names}.{suffix}"):
            shutil.rmtree(path, ignore_errors=True)


def _name_aside(path: Path, suffix: str) -> Path:
    return path.parent / f".{path.name}.{secrets.token_hex(4)}.{suffix}"


def _take_name(partial: Path, path: Path) -> None:
    if not path.exists():
        os.rename(partial, path)
        return
    # A directory that is not empty cannot be renamed over, so the old one makes room first and comes back on failure.
    displaced = _name_aside(path, "replaced")
    os.rename(path, displaced)
    try:
        os.rename(partial, path)
    except BaseException:
        os.rename(displaced, path)
        raise
    shutil.rmtree(displaced, ignore_errors=True)
