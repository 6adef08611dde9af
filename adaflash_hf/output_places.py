"""Places that results go to: whether they can be written, before work begins, and what to do where they could not."""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .error_text import first_line
from .errors import AdaFlashError, OutputError


__all__ = ["check_room", "check_writable", "disk_error", "is_disk_trouble", "writing_to"]

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FORBIDDEN = (errno.EROFS, errno.EACCES, errno.EPERM)
# Enough that a full disk refuses it; some have room for a name when there is none for a byte.
_PROBE_BYTES = 4096
_SAFETENSORS_ERROR = re.compile(r"\(os error (\d+)\)")
# torch.save does not say why it stopped half-way.
_TORCH_CANNOT_WRITE = ("unexpected pos", "PytorchStreamWriter failed")
_TORCH_CANNOT_OPEN = re.compile(r"open file failed with strerror: (.*)|Parent directory .* does not exist")


def check_writable(path: str | os.PathLike[str], option: str = "out") -> None:
    """
    Refuse a directory in which no file can be made, before anything slow begins. Nothing is left there.

    Args:
        path (`str` or `os.PathLike`):
            A directory, which need not exist yet.
        option (`str`, *optional*, defaults to `"out"`):
            What the user gave it as.

    Raises:
        OutputError: it is no directory, read-only, or its disk is full.
    """
    path = Path(path).absolute()
    with writing_to(path, option, "nothing was done yet"):
        there = next(place for place in (path, *path.parents) if os.path.lexists(place))
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())


def check_room(path: str | os.PathLike[str], needed_bytes: int, option: str = "out") -> None:
    """
    Refuse a disk with too little room.

    Args:
        path (`str` or `os.PathLike`):
            Where files will be written; need not exist yet.
        needed_bytes (`int`):
            How much they will be.
        option (`str`, *optional*, defaults to `"out"`):
            What the user gave it as.

    Raises:
        OutputError: less is free.
    """
    path = Path(path).absolute()
    free = shutil.disk_usage(next(place for place in (path, *path.parents) if place.exists())).free
    if free < needed_bytes:
        raise OutputError(
            f"`{option}` is {str(path)!r}: {needed_bytes / 2**20:.0f} MB are needed there and {free / 2**20:.0f} MB "
            "are free. Make room, or pass a place on another disk."
        )


@contextmanager
def writing_to(path: str | os.PathLike[str], option: str = "out", kept: str = "") -> Iterator[None]:
    """
    Within this, failing to write is an [`OutputError`] that says what to do.

    Args:
        path (`str` or `os.PathLike`):
            What is written, or the directory that files are written into.
        option (`str`, *optional*, defaults to `"out"`):
            What the user gave it as.
        kept (`str`, *optional*):
            What is not lost and how to go on, to end the message with.
    """
    try:
        yield
    except Exception as error:
        cause = None if isinstance(error, AdaFlashError) else disk_error(error)
        if cause is None:
            raise
        hint = "Pass another place"
        if cause.errno in _FULL:
            hint = "Make room, or pass a place on another disk"
        elif cause.errno in _FORBIDDEN:
            hint = "Give the right to write there, or pass another place"
        where = f"`{option}` is {os.fspath(path)!r}, where"
        raise OutputError(
            f"{where} writing failed ({cause.strerror or first_line(error)}). {hint}{kept and f'; {kept}'}."
        ) from error


def disk_error(error: BaseException) -> OSError | None:
    """
    What the system said, if that is why something could not be written: safetensors and torch have errors of their own
    for it.

    Args:
        error (`BaseException`):
            Of whoever wrote.
    """
    if isinstance(error, OSError):
        # pyarrow puts more than the system's words there.
        return error if error.errno is None else OSError(error.errno, os.strerror(error.errno), error.filename)
    text = str(error)
    if type(error).__name__ == "SafetensorError" and (number := _SAFETENSORS_ERROR.search(text)):
        return OSError(int(number[1]), os.strerror(int(number[1])))
    if isinstance(error, RuntimeError) and any(sign in text for sign in _TORCH_CANNOT_WRITE):
        return OSError(errno.ENOSPC, "a file could not be written to its end")
    if isinstance(error, RuntimeError) and (found := _TORCH_CANNOT_OPEN.search(text)):
        return OSError(errno.EIO, found[1] or os.strerror(errno.ENOENT))
    return None


def is_disk_trouble(error: OSError) -> bool:
    """Whether a disk is full or refuses, which may happen in the middle of anything and is nobody's mistake here."""
    return error.errno in (*_FULL, errno.EROFS, errno.EACCES)
