"""Status files: what a process of `adaflash online` is doing, for people, for Prometheus and for scripts.

Each process writes one JSON file of its own, whole or not at all. Writing never fails the process that does it.
"""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from typing import Any

from ..atomic_files import written_aside


__all__ = ["STATUS_DIRECTORY", "StatusFile", "read_status"]

logger = logging.getLogger(__name__)

STATUS_DIRECTORY = "status"
_LEAST_INTERVAL_S = 0.5


class StatusFile:
    """
    The status of one process.

    Args:
        directory (`str` or `Path`):
            The publish directory.
        name (`str`):
            `"trainer"` or `"server"`.
    """

    def __init__(self, directory: str | Path, name: str) -> None:
        self.path = Path(directory) / STATUS_DIRECTORY / f"{name}.json"
        self.fields: dict[str, Any] = {"pid": os.getpid(), "started_s": time.time()}
        self._written_s = 0.0
        self._has_failed = False

    def update(self, *, now: bool = True, **fields: Any) -> None:
        """
        Change some fields and write all.

        Args:
            now (`bool`, *optional*, defaults to `True`):
                Whether to write even if that was done a moment ago; progress need not.
            fields:
                What changes.
        """
        self.fields |= fields
        if not now and time.monotonic() - self._written_s < _LEAST_INTERVAL_S:
            return
        self._written_s = time.monotonic()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps({**self.fields, "updated_s": time.time()}, indent=2, default=str)
            with written_aside(self.path) as partial:
                partial.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            if not self._has_failed:
                logger.warning("The status cannot be written (%s); work goes on.", error)
            self._has_failed = True
        else:
            self._has_failed = False


def read_status(directory: str | Path, name: str) -> dict[str, Any]:
    """
    The newest status of a process; empty if there is none.

    Args:
        directory (`str` or `Path`):
            The publish directory.
        name (`str`):
            `"trainer"` or `"server"`.
    """
    try:
        fields = json.loads((Path(directory) / STATUS_DIRECTORY / f"{name}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return fields if isinstance(fields, dict) else {}
