"""Keeps the drafters of running SGLang servers up to date with a directory of published versions.

Servers are updated one after the other, so that a bad version is noticed on the first of them. Which version a server
has is read from the server each time, so servers and this process may be stopped and started at any moment. An update
that was cut off is noted in the status file, and undone before the next one: the server may have some of its tensors,
or all of them without that anybody looked whether they are any good.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ..errors import (
    AdaFlashError,
    DrafterCheckpointError,
    DrafterExportError,
    InvalidInputError,
    PublishedVersionError,
    ServerError,
)
from ..online.published_versions import PublishedVersion, PublishedVersions, VersionPointer
from ..online.run_status import StatusFile, read_status
from .acceptance_probe import ServerProbe
from .draft_payload import DraftWeights, draft_weights
from .launch_commands import PLUGIN_ALGORITHM
from .replica import Replica, ReplicaAddress, ServedModel
from .replica_update import ReplicaUpdate, TargetChangedError, UnfinishedUpdateError
from .served_versions import version_of_label


__all__ = ["ReloadClient", "ReloadClientSettings", "ReplicaStatus"]

logger = logging.getLogger(__name__)

STATUS_NAME = "reload-client"


@dataclass(frozen=True)
class ReloadClientSettings:
    """
    Settings of [`ReloadClient`].

    Attributes:
        poll_s: Seconds between two looks at directory and servers.
        min_relative_acceptance: Share of the accepted drafts that a new version must reach; 0 takes any.
        bucket_bytes: About how large one request with weights may be.
        base: The drafter that servers were started with, to go back to; by default the path that they name, where it
            is there, and else version 0.
    """

    poll_s: float = 2.0
    min_relative_acceptance: float = 0.5
    bucket_bytes: int = 256 * 2**20
    base: str | Path | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.min_relative_acceptance <= 1:
            raise InvalidInputError(
                f"`min_relative_acceptance` is {self.min_relative_acceptance}; it must be from 0 to 1."
            )
        if self.poll_s <= 0 or self.bucket_bytes < 1:
            raise InvalidInputError(
                f"`poll_s` is {self.poll_s} and `bucket_bytes` {self.bucket_bytes}; both must be above 0."
            )


@dataclass
class ReplicaStatus:
    """
    How a server is doing.

    Attributes:
        url: The server.
        version: Its drafter's version; None before it was asked, or if it is not one of ours.
        reloads: Updates that stayed.
        pause_s: Seconds for which the newest of them held requests up.
        acceptance_before: Mean tokens per round on the probe's prompts before it.
        acceptance_after: The same after it.
        error: What went wrong last; empty once the server has the version it should have.
        is_damaged: Whether its target has changed, and it is left alone.
    """

    url: str
    version: int | None = None
    reloads: int = 0
    pause_s: float = 0.0
    acceptance_before: float = 0.0
    acceptance_after: float = 0.0
    error: str = ""
    is_damaged: bool = False


@dataclass
class _Refusals:
    """Versions that are not fit to be served, and why. A pointer that was changed by hand is tried again."""

    pointer: VersionPointer | None = None
    reasons: dict[int, str] = field(default_factory=dict)


class ReloadClient:
    """
    Watches and updates.

    Args:
        directory (`str` or `Path`):
            Where versions are published.
        replicas (`Sequence[ReplicaAddress]`):
            The servers.
        settings (`ReloadClientSettings`, *optional*):
            All settings.
        probe (`ServerProbe`, *optional*):
            What to try drafters on.
    """

    def __init__(
        self,
        directory: str | Path,
        replicas: Sequence[ReplicaAddress],
        settings: ReloadClientSettings | None = None,
        probe: ServerProbe | None = None,
    ) -> None:
        urls = [replica.url for replica in replicas]
        if not urls or len(set(urls)) < len(urls):
            raise InvalidInputError(f"`replicas` are {urls}; name at least one server, and each once.")
        self.versions = PublishedVersions(directory)
        self.settings, self._probe = settings or ReloadClientSettings(), probe or ServerProbe()
        self._replicas = [Replica(address) for address in replicas]
        self.replicas = {replica.url: ReplicaStatus(replica.url) for replica in self._replicas}
        self._refusals = _Refusals()
        self._file = StatusFile(directory, STATUS_NAME)
        self._stopping = threading.Event()
        self._cached: tuple[tuple[str, bool], DraftWeights] | None = None
        self._last_good: tuple[PublishedVersion, VersionPointer] | None = None
        # What servers called their weights before an update that has not ended yet, by address.
        self._unfinished: dict[str, str] = {}

    @property
    def status(self) -> dict[str, Any]:
        """What has been done so far, for JSON."""
        replicas = [asdict(status) for status in copy.deepcopy(self.replicas).values()]
        return {"replicas": replicas, "refused": dict(self._refusals.reasons), "unfinished": dict(self._unfinished)}

    def stop(self) -> None:
        """End [`run`] after the update that is going on. May be called by another thread."""
        self._stopping.set()

    def close(self) -> None:
        """End the connections."""
        for replica in self._replicas:
            replica.close()

    def run(self) -> None:
        """
        Watch until [`stop`] is called. Whatever goes wrong is noted and tried again.

        Raises:
            PublishedVersionError: Another process keeps these servers up to date already.
        """
        with self._alone():
            self._tell_if_nothing_is_published("waiting for a first version")
            self._clean_up()
            while not self._stopping.is_set():
                self.check()
                self._stopping.wait(self.settings.poll_s)
        self._report("stopped")

    def run_once(self) -> bool:
        """
        Look once, as the only process that does, and update what is to be updated.

        Returns:
            `bool`: whether all servers now have the version they should have.

        Raises:
            PublishedVersionError: Another process keeps these servers up to date already.
        """
        with self._alone():
            self._tell_if_nothing_is_published("servers keep what they have")
            self._clean_up()
            return self.check()

    def check(self) -> bool:
        """
        Look once, and update what is to be updated.

        Returns:
            `bool`: whether all servers now have the version they should have.
        """
        self._undo_unfinished()
        try:
            pointer = self.versions.pointer()
            version = None if pointer is None else self.versions.get(pointer.version)
        except PublishedVersionError as error:
            if str(error) != self._file.fields.get("error"):
                logger.warning("%s", error)
            self._report("waiting", error=str(error))
            return False
        if pointer is None or version is None:
            self._report("waiting", error="", waiting_for="a first version")
            return False
        is_refused = pointer == self._refusals.pointer
        if is_refused:
            # Servers that were started anew meanwhile get what the others have.
            if self._last_good is None:
                return False
            version, pointer = self._last_good
        for replica in self._replicas:
            if not self._bring(replica, version, pointer):
                break
        done = all(status.version == version.version and not status.error for status in self.replicas.values())
        self._report("up to date" if done else "behind", error="", waiting_for="", version=version.version)
        return done and not is_refused

    def _tell_if_nothing_is_published(self, then: str) -> None:
        """The trainer may be started later than this, so that a mistyped directory is nothing to stop at."""
        try:
            is_empty = self.versions.pointer() is None
        except PublishedVersionError:
            return  # `check` says so
        if is_empty:
            logger.info("Nothing is published in %s yet; %s.", self.versions.directory, then)

    def _bring(self, replica: Replica, version: PublishedVersion, pointer: VersionPointer) -> bool:
        """
        Returns whether the next server may follow: not if the version is at fault. A server that cannot be reached
        does not keep the others from being updated.
        """
        status = self.replicas[replica.url]
        if status.is_damaged or replica.url in self._unfinished:
            return True
        try:
            label = replica.weight_version()
            status.version = version_of_label(label)
            if status.version != version.version:
                self._update(replica, status, version, pointer)
            status.error = ""
        except (PublishedVersionError, DrafterExportError, DrafterCheckpointError) as error:
            status.error = str(error)
            if isinstance(error.__cause__, OSError):
                return False  # may be readable next time
            self._refusals.pointer = pointer
            self._refusals.reasons[version.version] = str(error)
            logger.warning("Drafter version %d is not taken: %s", version.version, error)
            return False
        except TargetChangedError as error:
            status.error, status.is_damaged = str(error), True
            logger.error("%s", error)
            return False
        except AdaFlashError as error:
            if str(error) != status.error:
                logger.warning("%s", error)
            status.error = str(error)
        return True

    def _update(
        self, replica: Replica, status: ReplicaStatus, version: PublishedVersion, pointer: VersionPointer
    ) -> None:
        served = replica.served()
        if served.algorithm is None:
            raise ServerError(f"{replica.url} does not speculate; start it with `adaflash serve sglang`.")
        version.check_files()
        current = self._current_weights(served, status.version)
        update = ReplicaUpdate(
            replica,
            served,
            current,
            self._probe,
            min_relative_acceptance=0.0 if pointer.is_forced else self.settings.min_relative_acceptance,
            bucket_bytes=self.settings.bucket_bytes,
        )
        weights = self._weights(version.path, served)
        self._unfinished[replica.url] = served.weight_version
        self._report("updating")
        try:
            report = update.run(weights, version.version)
        except UnfinishedUpdateError:
            raise
        except Exception:  # all of them leave what was there before, or a target that nothing helps
            self._unfinished.pop(replica.url)
            raise
        self._unfinished.pop(replica.url)
        status.version, status.reloads, status.pause_s = version.version, status.reloads + 1, report.pause_s
        status.acceptance_before = report.before.acceptance_length
        status.acceptance_after = report.after.acceptance_length
        self._last_good = (version, pointer)
        logger.info(
            "%s drafts with version %d: %.2f tokens per round on the probe's prompts, %.2f before; requests waited "
            "%.3f s.",
            replica.url,
            version.version,
            status.acceptance_after,
            status.acceptance_before,
            report.pause_s,
        )

    def _undo_unfinished(self) -> None:
        """
        Puts back what servers had before an update that was cut off. One that is away waits for that, and nothing else
        is done with it before.
        """
        for replica in self._replicas:
            status = self.replicas[replica.url]
            if replica.url in self._unfinished and not status.is_damaged:
                try:
                    self._undo(replica, self._unfinished[replica.url])
                    self._unfinished.pop(replica.url)
                except AdaFlashError as error:
                    status.error = str(error)

    def _undo(self, replica: Replica, label: str) -> None:
        served = replica.served()
        try:
            before = self._current_weights(served, version_of_label(label))
        except AdaFlashError as error:
            logger.warning("An update of %s was cut off and cannot be undone: %s", replica.url, error)
            return
        logger.warning("%s: an update was cut off; going back to %s first", replica.url, label)
        ReplicaUpdate(replica, served, before, self._probe, bucket_bytes=self.settings.bucket_bytes).put_back(label)

    def _clean_up(self) -> None:
        """After a process before this one that was killed while it updated."""
        found = read_status(self.versions.directory, STATUS_NAME).get("unfinished")
        if isinstance(found, dict):
            self._unfinished = {url: str(label) for url, label in found.items() if url in self.replicas}
        for replica in self._replicas:
            try:
                replica.clean_up()
            except ServerError as error:
                logger.info("%s", error)

    def _current_weights(self, served: ServedModel, version: int | None) -> DraftWeights:
        """What a server has now, to go back to."""
        has_plugin = served.algorithm == PLUGIN_ALGORITHM
        if version is not None:
            places: list[str | Path | None] = [self.versions.path_of(version)]
        else:
            places = [self.settings.base, served.draft_path, self.versions.path_of(0)]
        for place in places:
            if place is not None and Path(place).is_dir():
                return draft_weights(place, has_plugin=has_plugin)
        raise ServerError(
            f"What {served.name} drafts with now, {served.weight_version!r}, is at none of "
            f"{[str(place) for place in places if place is not None]}, so there would be no way back. Name the "
            "drafter that the server was started with (`--base`)."
        )

    def _weights(self, path: Path, served: ServedModel) -> DraftWeights:
        """Of the newest version; the same for all servers."""
        key = (str(path), served.algorithm == PLUGIN_ALGORITHM)
        if self._cached is None or self._cached[0] != key:
            self._cached = (key, draft_weights(path, has_plugin=key[1]))
        return self._cached[1]

    def _alone(self) -> FileLock:
        self.versions.directory.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.versions.directory / f".{STATUS_NAME}-lock", timeout=0)
        try:
            lock.acquire()
        except Timeout:
            raise PublishedVersionError(
                f"`publish_dir` is {str(self.versions.directory)!r}, from which another process updates servers; end "
                "that one, or name all servers to it."
            ) from None
        return lock

    def _report(self, state: str, **fields: Any) -> None:
        self._file.update(state=state, **self.status, **fields)
