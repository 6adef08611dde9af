"""What a run leaves beside its weights: how it was started, with which versions, and what it logged."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from .atomic_files import written_aside


__all__ = ["JsonLinesCallback", "write_run_record"]

_PACKAGES = ("adaflash-hf", "torch", "transformers", "accelerate", "peft", "safetensors", "pyarrow")


def write_run_record(path: str | Path, argv: Sequence[str], settings: Mapping[str, Any]) -> None:
    """
    Write how a run was started, as JSON.

    Args:
        path (`str` or `Path`):
            File to write.
        argv (`Sequence[str]`):
            The command line.
        settings (`Mapping[str, Any]`):
            What it amounted to, defaults included.
    """
    record = {
        "argv": list(argv),
        "settings": dict(settings),
        "versions": {"python": platform.python_version(), **_versions()},
        "git_commit": _git_commit(),
    }
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_aside(path) as partial:
        partial.write_text(json.dumps(record, indent=2, default=str) + "\n", encoding="utf-8")


class JsonLinesCallback(TrainerCallback):
    """
    Appends each log entry of a run to a file, one JSON object per line.

    A run that resumes drops what a killed one logged after its last checkpoint, so that each step is there once.

    Args:
        path (`str` or `Path`):
            File to append to.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep what lies before the step the run starts from."""
        lines = self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else []
        kept = [line for line in lines if state.global_step and _step_of(line) <= state.global_step]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Append."""
        if state.is_world_process_zero and logs:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": state.global_step, **logs}, default=float) + "\n")


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")  # the last line of a run killed while writing it


def _versions() -> dict[str, str]:
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _git_commit() -> str | None:
    """Commit of the source checkout, with `-dirty` if it has changes; None where there is no checkout."""
    source = Path(__file__).resolve()
    git = ["git", "-C", str(source.parent)]
    try:
        # An installed copy may lie inside a repository of something else.
        subprocess.run([*git, "ls-files", "--error-unmatch", source.name], capture_output=True, check=True, timeout=10)
        describe = [*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        return subprocess.run(describe, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
