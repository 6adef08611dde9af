"""Starts the two sides of `adaflash online`, watches over them, and ends them in order.

The sides share nothing with this process but the disk: either may die, and is started again, without the other one
noticing. This process only looks at files.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import AdaFlashError, InvalidInputError
from .inference_process import run_inference
from .run_settings import InferenceSettings, TrainerSettings
from .run_snapshot import RunSnapshots
from .run_status import StatusFile, read_status
from .side_process import HOPELESS_EXIT_CODE, log_path
from .trainer_process import run_trainer


if TYPE_CHECKING:
    from ..configuration_dflash_drafter import DFlashDrafterConfig
    from .replay_buffer import BufferSettings


__all__ = ["SideFailedError", "Supervisor", "check_goes_on", "check_places"]

logger = logging.getLogger(__name__)

# A side that has lived this long was sound: what killed it is not expected at once again.
_SOUND_S = 60.0
_QUICK_DEATHS = 5
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
# Above what the sides take to finish what they are at.
_GRACE_S = 45.0


class SideFailedError(AdaFlashError, RuntimeError):
    """A side of `adaflash online` cannot go on."""


def _context() -> Any:
    """
    Not a fork of this process, whose threads would not come along; where the system can, one of a server that has
    imported what takes seconds and begun nothing, so that a side that died is there again in a moment.
    """
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(["adaflash_hf.online.sides_preload"])
    return context


@dataclass
class _Side:
    """One process, started as often as it takes."""

    name: str
    target: Callable[[Any], None]
    settings: Any
    process: BaseProcess | None = None
    started_s: float = 0.0
    restarts: int = 0
    quick_deaths: int = 0
    due_s: float = 0.0
    is_done: bool = False

    def start(self) -> None:
        context = _context()
        self.process = context.Process(target=self.target, args=(self.settings,), name=f"adaflash-{self.name}")
        self.process.start()
        self.started_s = time.monotonic()

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.is_alive()


@dataclass
class Supervisor:
    """
    Runs an adaptation until it is told to stop.

    Attributes:
        trainer: Settings of the trainer.
        inference: Settings of the inference side; None attaches the trainer to a buffer that others fill.
        poll_s: Seconds between two looks.
        endures_quick_deaths: Whether to start a side again however often it dies soon after its start.
        stopping: Set to end; not by a signal handler, see [`call_on_signals`].
        snapshot: The newest status, see [`RunSnapshots.take`].
    """

    trainer: TrainerSettings
    inference: InferenceSettings | None = None
    poll_s: float = 1.0
    endures_quick_deaths: bool = False
    stopping: threading.Event = field(default_factory=threading.Event)
    snapshot: dict[str, Any] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        side = self.trainer.side
        self._publish_dir: Path = side.publish_dir
        self._sides = [_Side("trainer", run_trainer, self.trainer)]
        if self.inference is not None:
            self._sides.append(_Side("server", run_inference, self.inference))
        self._snapshots = RunSnapshots(side.publish_dir, side.buffer)
        self._file = StatusFile(side.publish_dir, "run")
        self.look()

    def run(self, on_look: Callable[[Mapping[str, Any]], None]) -> None:
        """
        Until [`stopping`] is set or all that was asked for is done.

        Args:
            on_look (`Callable[[Mapping], None]`):
                Called with each new snapshot.

        Raises:
            SideFailedError: A side failed for good; the other one was ended.
        """
        self._forget_old_status()
        try:
            for side in self._sides:
                side.start()
            while not self.stopping.wait(self.poll_s):
                for side in self._sides:
                    self._attend(side)
                on_look(self.look())
                if self._is_done():
                    break
        finally:
            self._end_sides()
            on_look(self.look())

    @property
    def status_path(self) -> Path:
        """The JSON file with the newest status."""
        return self._file.path

    def look(self) -> dict[str, Any]:
        """Take a snapshot, also into `status/run.json`."""
        snapshot = self._snapshots.take()
        snapshot["processes"] = {
            side.name: {"pid": side.process.pid, "is_alive": side.is_alive, "restarts": side.restarts}
            for side in self._sides
            if side.process is not None
        }
        self.snapshot = snapshot
        self._file.update(**snapshot)
        return snapshot

    def _forget_old_status(self) -> None:
        """What an earlier run was doing is no status of this one; its history is in the trainer's state."""
        for side in self._sides:
            file = StatusFile(self._publish_dir, side.name)
            file.fields = read_status(self._publish_dir, side.name)
            file.update(phase="starting", error="", expected_end_s=None)
        if self.inference is None:
            StatusFile(self._publish_dir, "server").path.unlink(missing_ok=True)

    def _attend(self, side: _Side) -> None:
        assert side.process is not None
        if side.is_done or side.is_alive:
            return
        code = side.process.exitcode
        if code == 0:
            side.is_done = True
        elif code == HOPELESS_EXIT_CODE:
            raise self._failed(side)
        elif side.due_s == 0.0:
            is_quick = time.monotonic() - side.started_s < _SOUND_S
            side.quick_deaths = side.quick_deaths + 1 if is_quick else 1
            if side.quick_deaths > _QUICK_DEATHS and not self.endures_quick_deaths:
                raise self._failed(side)
            pause_s = _FIRST_PAUSE_S
            if not self.endures_quick_deaths:
                pause_s = min(_FIRST_PAUSE_S * 2 ** (side.quick_deaths - 1), _LONGEST_PAUSE_S)
            logger.warning("The %s ended with %s; starting it again in %.1f s.", side.name, code, pause_s)
            side.due_s = time.monotonic() + pause_s
        elif time.monotonic() >= side.due_s:
            side.due_s = 0.0
            side.restarts += 1
            side.start()

    def _failed(self, side: _Side) -> SideFailedError:
        reason = read_status(self._publish_dir, side.name).get("error") or "it gave no reason"
        return SideFailedError(
            f"The {side.name} cannot go on: {reason} (log: {log_path(self._publish_dir, side.name)})"
        )

    def _is_done(self) -> bool:
        """The rounds asked for are done; or all prompts are answered, and no round is left to do."""
        trainer, *others = self._sides
        if trainer.is_done:
            return True
        if not others or not others[0].is_done:
            return False
        status, served = self.snapshot["trainer"], self.snapshot["server"]
        # Not when it told what it saw: the server's last answers may have come in between.
        has_looked_since = status.get("looked_s", 0) > served.get("updated_s", 0)
        return status.get("phase") == "waiting" and not status.get("error") and has_looked_since

    def _end_sides(self) -> None:
        for side in self._sides:
            if side.is_alive:
                assert side.process is not None
                side.process.terminate()
        deadline = time.monotonic() + _GRACE_S
        for side in self._sides:
            if side.process is None:
                continue
            side.process.join(max(deadline - time.monotonic(), 0))
            if side.is_alive:
                logger.warning("The %s does not end; killing it.", side.name)
                side.process.kill()
                side.process.join()


def check_goes_on(
    buffer: Path, buffer_settings: BufferSettings | None, publish_dir: Path, config: DFlashDrafterConfig
) -> int | None:
    """
    Refuse a buffer and a directory that another target or drafter began, that another run is at, or whose version to
    serve is damaged, before models are loaded.

    Args:
        buffer (`Path`):
            File of the replay buffer, which need not exist.
        buffer_settings (`BufferSettings`, *optional*):
            What it must have been made with; None for whoever takes it as it is.
        publish_dir (`Path`):
            Directory of published versions.
        config (`DFlashDrafterConfig`):
            Of the drafter that is to go on.

    Returns:
        `int`: the version that serving goes on from; None if it begins.
    """
    from .published_versions import PublishedVersions
    from .replay_buffer import ReplayBuffer
    from .version_checks import check_configuration

    if buffer.exists():
        rows = ReplayBuffer(buffer, buffer_settings)
        try:
            with rows.consumer_lock():  # nobody else trains on it
                pass
        finally:
            rows.close()
    latest = PublishedVersions(publish_dir).latest()
    if latest is None:
        return None
    check_configuration(latest.path, config)
    latest.check_files()
    return latest.version


def check_places(buffer: Path, publish_dir: Path) -> None:
    """
    Refuse places that cannot be written to, and a file that is no buffer or damaged, before models are loaded.

    Args:
        buffer (`Path`):
            File of the replay buffer; its directory is made if it is not there.
        publish_dir (`Path`):
            Directory of published versions; made if it is not there.
    """
    from .buffer_database import BufferDatabase
    from .publisher import Publisher

    try:
        buffer.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInputError(
            f"`--buffer` is {str(buffer)!r}, whose directory cannot be made ({error}); give another place."
        ) from error
    Publisher(publish_dir)
    for name, place in (("--buffer", buffer.parent), ("--publish-dir", publish_dir)):
        if not os.access(place, os.W_OK | os.X_OK):
            raise InvalidInputError(
                f"`{name}` is in {str(place)!r}, which cannot be written to; make it writable, or give another place."
            )
    if buffer.exists():
        database = BufferDatabase(buffer)
        try:
            database.check()
        finally:
            database.close()
