"""All that can be told of an adaptation from its files: buffer, versions, and the status of both sides."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from ..errors import AdaFlashError, InvalidInputError
from .published_versions import PublishedVersions
from .replay_buffer import ReplayBuffer
from .run_status import read_status
from .time_left import remaining_seconds
from .traffic_history import acceptance_history


__all__ = ["RunSnapshots"]


class RunSnapshots:
    """
    Looks at one adaptation, now and again.

    Args:
        publish_dir (`Path`):
            Directory of published versions.
        buffer (`Path`, *optional*):
            File of the replay buffer; nothing is told of it if it is not given.

    Raises:
        InvalidInputError: Neither is there.
    """

    def __init__(self, publish_dir: Path, buffer: Path | None = None) -> None:
        self._publish_dir, self._path = publish_dir, buffer
        self._versions = PublishedVersions(publish_dir)
        self._buffer: ReplayBuffer | None = None

    def check(self) -> None:
        """Raise [`InvalidInputError`] if there is nothing to look at."""
        if not self._publish_dir.is_dir():
            raise InvalidInputError(
                f"`--publish-dir` is {str(self._publish_dir)!r}, which is not there; give the directory that "
                "`adaflash online run` publishes to."
            )
        if self._path is not None and not self._path.exists():
            raise InvalidInputError(f"`--buffer` is {str(self._path)!r}, which is not there; give the buffer's file.")

    def take(self) -> dict[str, Any]:
        """What is there now; plain values, of which JSON can be made. What cannot be read is told under `errors`."""
        errors: list[str] = []
        snapshot: dict[str, Any] = {
            "time_s": time.time(),
            "versions": {},
            "buffer": {},
            "acceptance": [],
            "acceptance_history": {},
            "trainer": read_status(self._publish_dir, "trainer"),
            "server": read_status(self._publish_dir, "server"),
            "errors": errors,
        }
        if (remaining_s := remaining_seconds(snapshot["trainer"], snapshot["time_s"])) is not None:
            snapshot["trainer"]["remaining_s"] = remaining_s
        for read in (self._read_versions, self._read_buffer):
            try:
                snapshot |= read()
            except AdaFlashError as error:
                errors.append(str(error))
        for side in ("trainer", "server"):
            if message := snapshot[side].get("error"):
                errors.append(f"{side}: {message}")
        return snapshot

    def _read_versions(self) -> dict[str, Any]:
        available, pointer = self._versions.numbers(), self._versions.pointer()
        versions: dict[str, Any] = {"available": available, "served": None}
        if pointer is not None:
            versions |= {
                "served": pointer.version,
                "withdrawn": list(pointer.withdrawn),
                "changed_s": pointer.changed_s,
                "reason": pointer.reason,
            }
        return {"versions": versions}

    def _read_buffer(self) -> dict[str, Any]:
        # Opening one that is not there yet would make it, perhaps where nobody wants one.
        if self._path is None or not self._path.exists():
            return {}
        if self._buffer is None:
            self._buffer = ReplayBuffer(self._path, busy_timeout_s=2.0)
        acceptance = [
            {**one._asdict(), "acceptance_length": one.acceptance_length}
            for one in self._buffer.acceptance()
            if one.rounds
        ]
        return {
            "buffer": self._buffer.depth()._asdict(),
            "acceptance": acceptance,
            "acceptance_history": acceptance_history(self._buffer)._asdict(),
        }
