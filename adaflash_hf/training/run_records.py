"""What a run leaves beside its weights: how it was started, with which versions, and what it logged."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback

from ..atomic_files import written_aside
from ..error_text import install_hint
from ..errors import InvalidInputError, MissingDependencyError
from ..output_places import writing_to
from .trajectories import read_settings


if TYPE_CHECKING:
    from torch.utils.data import Subset


__all__ = [
    "CHECKPOINTS",
    "CONFIG_FILE",
    "LOG_FILE",
    "METRICS_FILE",
    "RUN_FILE",
    "JsonLinesCallback",
    "check_reporting",
    "data_record",
    "machine_record",
    "read_run_record",
    "tensorboard_callback",
    "write_outcome",
    "write_run_record",
]

CHECKPOINTS = "checkpoints"
RUN_FILE = "run.json"
CONFIG_FILE = "train_config.yaml"
LOG_FILE = "training_log.jsonl"
METRICS_FILE = "metrics.json"
_RESUMABLE = "complete checkpoints stay: resume from the last one"
_TAU = "eval_acceptance_length"
_PACKAGES = ("adaflash-hf", "torch", "transformers", "accelerate", "peft", "safetensors", "pyarrow")


def write_run_record(
    path: str | Path, argv: Sequence[str], settings: Mapping[str, Any], more: Mapping[str, Any] | None = None
) -> None:
    """
    Write how a run was started, as JSON.

    Args:
        path (`str` or `Path`):
            File to write.
        argv (`Sequence[str]`):
            The command line.
        settings (`Mapping[str, Any]`):
            What it amounted to, defaults included.
        more (`Mapping[str, Any]`, *optional*):
            Further entries.
    """
    record = {
        "argv": list(argv),
        "settings": dict(settings),
        "versions": {"python": platform.python_version(), **_versions()},
        "git_commit": _git_commit(),
        **(more or {}),
    }
    _write_json(Path(path), record)


def write_outcome(directory: str | Path, metrics: Mapping[str, float]) -> None:
    """
    Write how a run ended: its metrics, and in its record also how long it took and how held-out tau went.

    Args:
        directory (`str` or `Path`):
            Of the run; holds its record and log.
        metrics (`Mapping[str, float]`):
            Of the last evaluation; empty if there was none.
    """
    directory = Path(directory)
    log = _read_log(directory / LOG_FILE)
    last = log[-1] if log else {}
    curve = [{name: entry[name] for name in ("step", "elapsed_s", _TAU)} for entry in log if _TAU in entry]
    outcome = {"step": last.get("step"), "elapsed_s": last.get("elapsed_s"), "curve": curve, "metrics": dict(metrics)}
    if metrics:
        _write_json(directory / METRICS_FILE, dict(metrics))
    record = read_run_record(directory)
    if record is not None:
        _write_json(directory / RUN_FILE, {**record, "outcome": outcome})


def read_run_record(directory: str | Path) -> dict[str, Any] | None:
    """What [`write_run_record`] left in a directory; None if there is nothing to read."""
    try:
        record = json.loads((Path(directory) / RUN_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and "settings" in record else None


def machine_record(device: torch.device, num_processes: int) -> dict[str, Any]:
    """
    What a run computes on.

    Args:
        device (`torch.device`):
            Of this process.
        num_processes (`int`):
            How many there are.
    """
    is_cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if is_cuda else f"{platform.machine()} {device.type}",
        "processes": num_processes,
        **({} if is_cuda else {"threads": torch.get_num_threads(), "logical_cpus": os.cpu_count()}),
    }


def data_record(train: Subset, held_out: Subset | None, directories: Sequence[str | Path]) -> dict[str, Any]:
    """
    What a run learns from, for its model card.

    Args:
        train (`Subset` of a `TrajectoryDataset`):
            Trajectories to train on.
        held_out (`Subset` of a `TrajectoryDataset`, *optional*):
            Those kept for evaluation.
        directories (`Sequence[str or Path]`):
            Where they are.
    """
    dataset: Any = train.dataset
    trajectories: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for index in train.indices:
        domain = dataset.domain(index)
        trajectories[domain] += 1
        tokens[domain] += len(dataset.response_ids(index))
    sources = []
    for directory in directories:
        try:
            sources.append(read_settings(directory))
        except InvalidInputError:
            continue  # made by other means
    return {
        "train": {d: {"trajectories": n, "response_tokens": tokens[d]} for d, n in sorted(trajectories.items())},
        "held_out_trajectories": 0 if held_out is None else len(held_out),
        "sources": sources,
    }


def check_reporting(names: Sequence[str]) -> None:
    """
    Refuse loggers that are not there, before the run.

    Args:
        names (`Sequence[str]`):
            Values of `report_to`.

    Raises:
        MissingDependencyError: TensorBoard is not installed.
        InvalidInputError: another logger is unknown or not installed.
    """
    from transformers.integrations import get_available_reporting_integrations

    if "tensorboard" in names and importlib.util.find_spec("tensorboard") is None:
        raise MissingDependencyError(
            f"`report_to` is 'tensorboard', which needs the package tensorboard; run: {install_hint('train')}"
        )
    available = {*get_available_reporting_integrations(), "tensorboard", "all", "none"}
    unknown = [name for name in names if name not in available]
    if unknown:
        raise InvalidInputError(
            f"`report_to` is {unknown[0]!r}, which is unknown or not installed; here are "
            f"{', '.join(sorted(available))}. Install its package, or leave it out."
        )


def tensorboard_callback(directory: str | Path) -> TrainerCallback:
    """
    Logs to TensorBoard, in one place however often the run is resumed.

    Args:
        directory (`str` or `Path`):
            Where the event files go.
    """
    from torch.utils.tensorboard import SummaryWriter
    from transformers.integrations import TensorBoardCallback

    return TensorBoardCallback(SummaryWriter(log_dir=str(directory)))


class JsonLinesCallback(TrainerCallback):
    """
    Appends each log entry of a run to a file, one JSON object per line, with the seconds trained so far.

    A run that resumes drops what a killed one logged after its last checkpoint, so that each step is there once, and
    goes on counting the seconds from there.

    Args:
        path (`str` or `Path`):
            File to append to.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._begin = time.monotonic()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep what lies before the step the run starts from."""
        lines = self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else []
        kept = [line for line in lines if state.global_step and _step_of(line) <= state.global_step]
        with writing_to(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with written_aside(self._path) as partial:
                partial.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        self._begin = time.monotonic() - (json.loads(kept[-1]).get("elapsed_s", 0.0) if kept else 0.0)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Append."""
        if state.is_world_process_zero and logs:
            entry = {"step": state.global_step, "elapsed_s": round(time.monotonic() - self._begin, 1), **logs}
            with writing_to(self._path, kept=_RESUMABLE), self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry, default=float) + "\n")


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    with writing_to(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_aside(path) as partial:
            partial.write_text(json.dumps(content, indent=2, default=str) + "\n", encoding="utf-8")


def _read_log(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if _step_of(line) < float("inf")]


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
