"""A directory of published drafter versions, as those read it who serve them.

    latest.json                 which version to serve, and which were withdrawn
    version-00000003/           a complete checkpoint, named so only once it is complete
        config.json, model.safetensors
        adaptation.json         where it comes from, how it did, and the checksums of the files

The pointer is a file of its own rather than a symbolic link, so that a reader first settles on one version and then
opens only files of that one.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import PublishedVersionError


__all__ = [
    "MANIFEST_FILE",
    "POINTER_FILE",
    "PublishedVersion",
    "PublishedVersions",
    "VersionManifest",
    "VersionPointer",
    "checksums_of",
]

MANIFEST_FILE = "adaptation.json"
POINTER_FILE = "latest.json"
_FORMAT = 1
_VERSION_DIRECTORY = re.compile(r"version-(\d{8})")


@dataclass(frozen=True)
class VersionManifest:
    """
    Where a version comes from.

    Attributes:
        version: Its number; 0 is the drafter that adaptation began with.
        parent: The version it was trained from; None for version 0.
        round_id: Round of the replay buffer it was trained on; None for version 0.
        created_s: Seconds since the epoch.
        target: Name of the target.
        settings: Objective, learning rates and so on.
        trajectories: Trajectories trained on since version 0, by domain.
        acceptance_before: Held-out acceptance length of the parent: `"all"` and each domain.
        acceptance_after: The same of this version, on the same anchors.
        files: SHA-256 of each file beside this one.
    """

    version: int
    parent: int | None = None
    round_id: int | None = None
    created_s: float = field(default_factory=time.time)
    target: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    trajectories: dict[str, int] = field(default_factory=dict)
    acceptance_before: dict[str, float] = field(default_factory=dict)
    acceptance_after: dict[str, float] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """As it is written."""
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=2) + "\n"

    @classmethod
    def read(cls, directory: Path) -> VersionManifest:
        """
        Of one version.

        Args:
            directory (`Path`):
                The version's directory.
        """
        path = directory / MANIFEST_FILE
        fields = _read_json(path)
        if fields.pop("format", None) != _FORMAT:
            raise PublishedVersionError(f"{path} is of another format than {_FORMAT}; update adaflash_hf.")
        try:
            return cls(**fields)
        except TypeError as error:
            raise PublishedVersionError(f"{path} is damaged ({error}); publish the version again.") from error


@dataclass(frozen=True)
class VersionPointer:
    """
    What to serve.

    Attributes:
        version: The version to serve.
        is_forced: Whether a person chose it, so that its acceptance need not match that of the version before.
        withdrawn: Versions that a person took back.
        changed_s: Seconds since the epoch.
        reason: Why it changed, for people.
    """

    version: int
    is_forced: bool = False
    withdrawn: tuple[int, ...] = ()
    changed_s: float = field(default_factory=time.time)
    reason: str = ""


@dataclass(frozen=True)
class PublishedVersion:
    """
    One complete version on the disk.

    Attributes:
        path: Its directory; `from_pretrained` reads it.
        manifest: Where it comes from.
    """

    path: Path
    manifest: VersionManifest

    @property
    def version(self) -> int:
        """Its number."""
        return self.manifest.version

    def check_files(self) -> None:
        """
        Compare all files with their checksums.

        Raises:
            PublishedVersionError: A file is missing, is there in addition, or is not the one that was published.
        """
        try:
            found = checksums_of(self.path)
        except OSError as error:
            raise PublishedVersionError(
                f"Version {self.version} in {str(self.path)!r} cannot be read ({error}); the version before it stays "
                "in use."
            ) from error
        for name in sorted(found.keys() | self.manifest.files.keys()):
            if found.get(name) != self.manifest.files.get(name):
                raise PublishedVersionError(
                    f"Version {self.version} in {str(self.path)!r}: `{name}` has the checksum {found.get(name)}, "
                    f"published was {self.manifest.files.get(name)}. It was changed or damaged since; publish again, "
                    "or roll back with `adaflash online rollback`."
                )


class PublishedVersions:
    """
    Reads a directory of published versions.

    Args:
        directory (`str` or `Path`):
            The directory; need not exist yet.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)

    def path_of(self, version: int) -> Path:
        """Directory of a version, which need not exist."""
        return self.directory / f"version-{version:08d}"

    def numbers(self) -> list[int]:
        """Versions that are there, in ascending order."""
        try:
            names = [path.name for path in self.directory.iterdir()]
        except FileNotFoundError:
            return []
        return sorted(int(match[1]) for name in names if (match := _VERSION_DIRECTORY.fullmatch(name)))

    def get(self, version: int) -> PublishedVersion:
        """
        One version.

        Args:
            version (`int`):
                Its number.
        """
        path = self.path_of(version)
        if not path.is_dir():
            raise PublishedVersionError(
                f"Version {version} is not in {str(self.directory)!r}, which has {self.numbers()}; choose one of them."
            ) from FileNotFoundError(str(path))
        manifest = VersionManifest.read(path)
        if manifest.version != version:
            raise PublishedVersionError(f"{str(path)!r} says that it is version {manifest.version}; it was renamed.")
        return PublishedVersion(path, manifest)

    def pointer(self) -> VersionPointer | None:
        """What to serve; None if nothing has been published."""
        path = self.directory / POINTER_FILE
        if not path.exists():
            return None
        fields = _read_json(path)
        try:
            pointer = VersionPointer(**{**fields, "withdrawn": tuple(fields.get("withdrawn", ()))})
            if not all(isinstance(version, int) for version in (pointer.version, *pointer.withdrawn)):
                raise TypeError("its versions are no numbers")
            return pointer
        except TypeError as error:
            raise PublishedVersionError(
                f"{path} is damaged ({error}); `adaflash online rollback --to N` writes a new one."
            ) from error

    def latest(self) -> PublishedVersion | None:
        """The version to serve; None if nothing has been published."""
        pointer = self.pointer()
        return None if pointer is None else self.get(pointer.version)


def checksums_of(directory: Path) -> dict[str, str]:
    """
    SHA-256 of every file of a version but its manifest.

    Args:
        directory (`Path`):
            The version's directory.
    """
    sums = {}
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if path.is_file() and name != MANIFEST_FILE:
            with path.open("rb") as file:
                sums[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return sums


def _read_json(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PublishedVersionError(f"{path} cannot be read ({error}); the version before it stays in use.") from error
    if not isinstance(fields, Mapping):
        raise PublishedVersionError(f"{path} is damaged: it holds a {type(fields).__name__}, not an object.")
    return dict(fields)
