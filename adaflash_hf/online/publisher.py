"""Publishes drafter versions so that nobody ever sees half of one, whatever is killed when.

A version is written under a name that readers ignore, flushed to the disk, read back and checked, renamed, and only
then pointed to. Versions are never changed afterwards.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from filelock import FileLock, Timeout

from ..atomic_directories import directory_written_aside, remove_directory, remove_leftovers
from ..atomic_files import sync_directory, written_aside
from ..errors import InvalidInputError, PublishedVersionError
from ..generation.compatibility import unwrap_model
from ..training.saving import save_trained
from .published_versions import (
    MANIFEST_FILE,
    POINTER_FILE,
    PublishedVersion,
    PublishedVersions,
    VersionManifest,
    VersionPointer,
    checksums_of,
)
from .version_checks import check_configuration, read_weights


if TYPE_CHECKING:
    from ..modeling_dflash_drafter import DFlashDrafterModel


__all__ = ["Publisher", "VersionConflictError"]

_VERSIONS = "version-*"
_LOCK_TIMEOUT_S = 60.0


class VersionConflictError(PublishedVersionError):
    """Somebody else switched versions meanwhile, for example by a roll back."""


class Publisher(PublishedVersions):
    """
    Writes a directory of published versions. Several processes may, one waits for the other.

    Args:
        directory (`str` or `Path`):
            The directory; made if it is not there.
        keep_versions (`int`, *optional*, defaults to 5):
            Newest versions that stay; the one in use and version 0 always do.
    """

    def __init__(self, directory: str | Path, keep_versions: int = 5) -> None:
        super().__init__(directory)
        if keep_versions < 1:
            raise InvalidInputError(f"`keep_versions` is {keep_versions}; it must be at least 1.")
        self.keep_versions = keep_versions
        with _explained(self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)

    def next_version(self) -> int:
        """Number for the next version: above all that were ever there."""
        pointer = self.pointer()
        known = [*self.numbers(), *(() if pointer is None else (pointer.version, *pointer.withdrawn))]
        return max(known, default=-1) + 1

    def publish(
        self,
        model: Any,
        manifest: VersionManifest,
        *,
        base: DFlashDrafterModel | None = None,
        dtype: torch.dtype | None = None,
    ) -> PublishedVersion:
        """
        Make a version of a drafter's weights and have it served.

        Publishing a version that is there already only points to it: what a trainer does that was killed in between.

        Args:
            model (`DFlashDrafterModel` or `PeftModel`):
                The drafter; an adapter is merged.
            manifest (`VersionManifest`):
                Its number and where it comes from. Its parent must be the version served now.
            base (`DFlashDrafterModel`, *optional*):
                Compare configuration, shapes and draft vocabulary with this drafter; by default with `model` itself.
            dtype (`torch.dtype`, *optional*):
                What to round the weights to.

        Raises:
            VersionConflictError: Another version than the parent is served now.
            PublishedVersionError: The weights are not fit to be served, or the disk does not take them; nothing of
                them is left.
        """
        reference = unwrap_model(model) if base is None else base
        with self._locked(), _explained(self.directory):
            remove_leftovers(self.directory, _VERSIONS)
            pointer = self.pointer()
            if manifest.version not in self.numbers():
                self._check_parent(manifest, pointer)
                self._write(model, manifest, reference, dtype)
            elif pointer is not None and pointer.version == manifest.version:
                return self.get(manifest.version)
            else:
                self._check_parent(manifest, pointer)
            withdrawn = () if pointer is None else pointer.withdrawn
            self._point(VersionPointer(manifest.version, withdrawn=withdrawn, reason="published"))
            self._prune()
        return self.get(manifest.version)

    def rollback(self, to: int | None = None) -> PublishedVersion:
        """
        Serve an earlier version again and withdraw those after it; or serve a withdrawn one after all.

        Args:
            to (`int`, *optional*):
                The version; by default the newest below the one in use that was not withdrawn.
        """
        with self._locked(), _explained(self.directory):
            try:
                pointer = self.pointer()
            except PublishedVersionError:
                pointer = None  # damaged; a version that is named replaces it
            current = None if pointer is None else pointer.version
            withdrawn = set() if pointer is None else set(pointer.withdrawn)
            if to is None:
                earlier = [n for n in self.numbers() if current is not None and n < current and n not in withdrawn]
                if not earlier:
                    there = self.numbers()
                    raise InvalidInputError(
                        f"`rollback` finds no version before {current} in {str(self.directory)!r}, which has {there}; "
                        "name one with `--to`."
                        if there
                        else f"`rollback` finds nothing in {str(self.directory)!r}: nothing is published there yet."
                    )
                to = earlier[-1]
            version = self.get(to)
            version.check_files()
            withdrawn |= {n for n in self.numbers() if n > to}
            withdrawn.discard(to)
            reason = f"rolled back from {current}" if current is None or to < current else f"restored after {current}"
            self._point(VersionPointer(to, is_forced=True, withdrawn=tuple(sorted(withdrawn)), reason=reason))
        return version

    def prune(self, keep_versions: int | None = None) -> list[int]:
        """
        Remove old versions.

        Args:
            keep_versions (`int`, *optional*):
                Newest versions that stay; by default as the publisher was told.

        Returns:
            `list[int]`: versions removed.
        """
        with self._locked(), _explained(self.directory):
            remove_leftovers(self.directory, _VERSIONS)
            return self._prune(keep_versions)

    def _check_parent(self, manifest: VersionManifest, pointer: VersionPointer | None) -> None:
        current = None if pointer is None else pointer.version
        if manifest.parent != current:
            raise VersionConflictError(
                f"Version {manifest.version} was made from version {manifest.parent}, but version {current} is served "
                "now; make a new one from that."
            )
        if pointer is not None and manifest.version in pointer.withdrawn:
            raise VersionConflictError(f"Version {manifest.version} was withdrawn; take the next number.")

    def _write(
        self, model: Any, manifest: VersionManifest, base: DFlashDrafterModel, dtype: torch.dtype | None
    ) -> None:
        with directory_written_aside(self.path_of(manifest.version)) as partial:
            save_trained(model, model.state_dict(), partial, dtype)
            check_configuration(partial, base.config)
            read_weights(partial, base.state_dict())
            complete = replace(manifest, files=checksums_of(partial))
            (partial / MANIFEST_FILE).write_text(complete.to_json(), encoding="utf-8")

    def _point(self, pointer: VersionPointer) -> None:
        with written_aside(self.directory / POINTER_FILE) as partial:
            partial.write_text(json.dumps(asdict(pointer), indent=2) + "\n", encoding="utf-8")
        sync_directory(self.directory)

    def _prune(self, keep_versions: int | None = None) -> list[int]:
        numbers, pointer = self.numbers(), self.pointer()
        kept = {0, *numbers[-(keep_versions or self.keep_versions) :]}
        if pointer is not None:
            kept.add(pointer.version)
            # What a roll back would go to.
            kept.update([n for n in numbers if n < pointer.version and n not in pointer.withdrawn][-1:])
        removed = [number for number in numbers if number not in kept]
        for number in removed:
            remove_directory(self.path_of(number))
        return removed

    @contextmanager
    def _locked(self) -> Iterator[None]:
        lock = FileLock(self.directory / ".publish-lock", timeout=_LOCK_TIMEOUT_S)
        try:
            with _explained(self.directory), lock:
                yield
        except Timeout:
            raise PublishedVersionError(
                f"`publish_dir` is {str(self.directory)!r}, which another process has kept locked for "
                f"{_LOCK_TIMEOUT_S:.0f} s; end that one, or try again."
            ) from None


@contextmanager
def _explained(directory: Path) -> Iterator[None]:
    """Errors of the disk as this package's own."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        if isinstance(error, Timeout):
            raise
        # Whoever wants to try again once there is room knows a disk's errors by their class.
        cause = error if isinstance(error, OSError) else OSError(str(error))
        raise PublishedVersionError(
            f"`publish_dir` is {str(directory)!r}, where writing failed: {error}. Free some space or make it writable "
            "again; the versions that are there stay as they are."
        ) from cause
