"""What the processes of `adaflash online` have in common: how they end, where they log, and what they leave on errors.

A side ends when it is sent SIGTERM or when the process that started it is gone. Ctrl-C reaches all processes of a
terminal; only the one that started the sides acts on it, and ends them in order.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from ..errors import (
    AdaFlashError,
    DrafterCompatibilityError,
    InvalidInputError,
    MissingDependencyError,
    UnsupportedGenerationError,
)
from ..stop_signals import call_on_signals
from .run_status import STATUS_DIRECTORY, StatusFile, read_status


__all__ = ["HOPELESS_EXIT_CODE", "SideProcess", "log_path"]

logger = logging.getLogger(__name__)

# Starting the side again would end the same way.
HOPELESS_EXIT_CODE = 2
_HOPELESS = (DrafterCompatibilityError, InvalidInputError, MissingDependencyError, UnsupportedGenerationError)


class SideProcess:
    """
    The frame around a side's work.

    Args:
        name (`str`):
            `"trainer"` or `"server"`.
        publish_dir (`Path`):
            Directory of published versions, where status and log go.
        threads (`int`, *optional*):
            Threads on a CPU.

    Attributes:
        stopping: Set when the side is to end.
    """

    def __init__(self, name: str, publish_dir: Path, threads: int | None = None) -> None:
        self.name, self._publish_dir, self._threads = name, publish_dir, threads
        self.stopping = threading.Event()
        self._callbacks: list[Callable[[], Any]] = []

    def on_stop(self, callback: Callable[[], Any]) -> None:
        """
        Have a function called when the side is to end, by a thread.

        Args:
            callback (`Callable[[], Any]`):
                The function; takes no time.
        """
        self._callbacks.append(callback)
        if self.stopping.is_set():
            callback()

    @contextmanager
    def running(self) -> Iterator[None]:
        """The side's work; exits with 2 after an error that starting again would not change, and with 1 else."""
        _log_to(log_path(self._publish_dir, self.name))
        call_on_signals([signal.SIGTERM], self._stop)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._watch_parent()
        if self._threads is not None:
            import torch

            torch.set_num_threads(self._threads)
        try:
            yield
        except AdaFlashError as error:
            logger.error("%s", error)
            self._note_failure(str(error))
            sys.exit(HOPELESS_EXIT_CODE if isinstance(error, _HOPELESS) else 1)
        except Exception as error:
            logger.exception("The process ends.")
            self._note_failure(f"{type(error).__name__}: {error}")
            sys.exit(1)

    def _stop(self) -> None:
        self.stopping.set()
        for callback in self._callbacks:
            callback()

    def _watch_parent(self) -> None:
        parent = multiprocessing.parent_process()
        if parent is None:
            return

        def watch() -> None:
            wait([parent.sentinel])
            self._stop()

        threading.Thread(target=watch, name="adaflash-parent", daemon=True).start()

    def _note_failure(self, message: str) -> None:
        status = StatusFile(self._publish_dir, self.name)
        status.fields = read_status(self._publish_dir, self.name) | status.fields
        status.update(phase="failed", error=message)


def log_path(publish_dir: Path, name: str) -> Path:
    """
    Where a side logs.

    Args:
        publish_dir (`Path`):
            Directory of published versions.
        name (`str`):
            `"trainer"` or `"server"`.
    """
    return publish_dir / STATUS_DIRECTORY / f"{name}.log"


def _log_to(path: Path) -> None:
    """Everything that is printed, C code's messages included, goes to a file; the terminal belongs to the page."""
    failure: OSError | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        failure = error
    else:
        for standard in (1, 2):
            os.dup2(descriptor, standard)
        os.close(descriptor)
    stream = open(2, "w", buffering=1, closefd=False)  # as long as the process lives
    layout = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.INFO, format=layout, stream=stream, force=True)
    if failure is not None:
        logger.warning("%s cannot be written (%s); the log is here.", path, failure)
    logging.getLogger("httpx").setLevel(logging.WARNING)
