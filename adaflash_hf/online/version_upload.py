"""Pushes a published version to the Hub, with a card that says what it was adapted on and what that gained."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import DrafterCheckpointError, InvalidInputError
from .online_trainer import STATE_DIRECTORY
from .published_versions import MANIFEST_FILE, PublishedVersion, PublishedVersions, VersionManifest
from .training_state import TrainingStateStore


__all__ = ["adaptation_section", "push_version"]


def push_version(
    publish_dir: Path,
    repo_id: str,
    *,
    version: int | None = None,
    private: bool = False,
    license: str | None = None,
) -> str:
    """
    Push one version.

    Args:
        publish_dir (`Path`):
            Directory of published versions.
        repo_id (`str`):
            Repository; made if it is not there.
        version (`int`, *optional*):
            Its number; by default the one that is served.
        private (`bool`, *optional*, defaults to `False`):
            Of a new repository.
        license (`str`, *optional*):
            By default the target's.

    Returns:
        `str`: address of the commit.
    """
    from ..hub_upload import reserve_repository, upload_drafter
    from ..model_card import CardOptions, write_drafter_card

    versions = PublishedVersions(publish_dir)
    found = versions.latest() if version is None else versions.get(version)
    if found is None:
        raise InvalidInputError(f"`publish_dir` is {str(publish_dir)!r}, where nothing is published yet.")
    found.check_files()
    reserve_repository(repo_id, private=private)
    section = adaptation_section(found.manifest, _lineage(versions, found), _history(publish_dir))
    with tempfile.TemporaryDirectory() as directory:
        # Published versions never change; the card goes beside a copy.
        copied = Path(directory) / "drafter"
        shutil.copytree(found.path, copied, ignore=shutil.ignore_patterns(MANIFEST_FILE))
        write_drafter_card(
            copied, CardOptions(repo_id=repo_id, license=license, speed_tables=[("Online adaptation", section)])
        )
        return upload_drafter(copied, repo_id)


def adaptation_section(manifest: VersionManifest, lineage: Sequence[int], history: Sequence[Mapping[str, Any]]) -> str:
    """
    What the card says of the adaptation.

    Args:
        manifest (`VersionManifest`):
            Of the version.
        lineage (`Sequence[int]`):
            The version and those it was made from.
        history (`Sequence[Mapping[str, Any]]`):
            The trainer's rounds.
    """
    from ..evaluation.result_files import markdown_table

    total = sum(manifest.trajectories.values())
    listed = ", ".join(f"{count} {domain}" for domain, count in sorted(manifest.trajectories.items()))
    if not total:
        return f"Version {manifest.version}: the drafter that adaptation began with, not adapted."
    settings = manifest.settings
    lines = [
        f"Version {manifest.version}, adapted online on {total} responses of the target to live traffic ({listed}).",
        f"Objective {settings.get('objective')}, learning rates of at most {settings.get('learning_rate')} (drafter) "
        f"and {settings.get('length_head_learning_rate')} (length head), rounds of {settings.get('round_size')} "
        f"trajectories, {settings.get('epochs')} epochs each.",
        "Acceptance length (tau, greedy hindsight) on held-out traffic of that time, before and after each round; the "
        "same blocks before and after, newer ones in each round:",
    ]
    entries = {entry["version"]: entry for entry in history if entry["outcome"] == "published"}
    rows: list[Sequence[Any]] = []
    for number in sorted(lineage):
        entry = entries.get(number)
        before, after = manifest.acceptance_before, manifest.acceptance_after
        if number != manifest.version:
            if entry is None:
                continue
            before, after = entry["held_out_before"], entry["held_out_after"]
        rows += [
            (number, domain, f"{before[domain]:.3f}", f"{after[domain]:.3f}", f"{after[domain] - before[domain]:+.3f}")
            for domain in before
            if domain in after and (domain != "all" or len(before) != 2)  # of one domain, all is that one
        ]
    return "\n\n".join([*lines, markdown_table(["version", "domain", "before", "after", "gain"], rows)])


def _lineage(versions: PublishedVersions, version: PublishedVersion) -> list[int]:
    """The version and those it was made from, as far as they are still there."""
    found, parent = [version.version], version.manifest.parent
    there = set(versions.numbers())
    while parent is not None and parent in there:
        found.append(parent)
        parent = versions.get(parent).manifest.parent
    return found


def _history(publish_dir: Path) -> list[dict[str, Any]]:
    try:
        progress = TrainingStateStore(publish_dir / STATE_DIRECTORY).read_progress()
    except DrafterCheckpointError:
        return []  # the version's own figures are in its manifest
    return [] if progress is None else progress.history
