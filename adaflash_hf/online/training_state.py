"""Where an online trainer is, on disk: weights, optimizer and progress, all of one moment or nothing.

Each state is a directory of its own, named by a growing number once it is complete and flushed:

    state-00000012/
        progress.json              which rounds are done and what they gave
        weights.safetensors        the model in training, float32
        optimizer.safetensors      `<parameter>/<average>`, and the steps

Nothing is pickled. A state that does not fit the model is refused as a whole.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from ..atomic_directories import directory_written_aside, remove_directory, remove_leftovers
from ..errors import DrafterCheckpointError


__all__ = ["TrainingProgress", "TrainingStateStore"]

_FORMAT = 1
_DIRECTORY = re.compile(r"state-(\d{8})")
_KEPT_STATES = 2
_KEPT_HISTORY = 500


@dataclass(frozen=True)
class TrainingProgress:
    """
    What an online trainer has done.

    Attributes:
        buffer: Identity of the replay buffer that `round_id` counts in.
        round_id: Last round that is part of the weights, or was given up.
        version: Published version that the weights are, or become once `manifest` is published.
        updates: Optimizer steps so far.
        trajectories: Trajectories trained on since version 0, by domain.
        manifest: Fields of the version still to be published; None if there is none.
        history: One entry per round, oldest first.
    """

    buffer: str = ""
    round_id: int = 0
    version: int = 0
    updates: int = 0
    trajectories: dict[str, int] = field(default_factory=dict)
    manifest: dict[str, Any] | None = None
    history: list[dict[str, Any]] = field(default_factory=list)

    def with_round(self, entry: Mapping[str, Any], **changes: Any) -> TrainingProgress:
        """
        After one more round.

        Args:
            entry (`Mapping[str, Any]`):
                What goes into the history.
            changes:
                Other attributes that change.
        """
        return replace(self, history=[*self.history, dict(entry)][-_KEPT_HISTORY:], **changes)


class TrainingStateStore:
    """
    Saves and loads states.

    Args:
        directory (`str` or `Path`):
            Where; made if it is not there.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)

    def save(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, progress: TrainingProgress) -> None:
        """
        Write a state; the one before stays until this one is complete.

        Args:
            model (`nn.Module`):
                The model in training.
            optimizer (`torch.optim.Optimizer`):
                Its optimizer.
            progress (`TrainingProgress`):
                Where the trainer is.
        """
        self.clean()
        try:
            with directory_written_aside(self._path(max(self._numbers(), default=0) + 1)) as partial:
                weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
                save_file(weights, partial / "weights.safetensors")
                kind = {"optimizer": type(optimizer).__name__}
                save_file(_averages(model, optimizer), partial / "optimizer.safetensors", metadata=kind)
                text = json.dumps({"format": _FORMAT, **asdict(progress)}, indent=2)
                (partial / "progress.json").write_text(text + "\n", encoding="utf-8")
        except SafetensorError as error:
            raise OSError(f"The training state could not be written: {error}") from error
        for old in self._numbers()[:-_KEPT_STATES]:
            remove_directory(self._path(old))

    def clean(self) -> None:
        """Remove what killed processes left; nobody else may be saving now."""
        remove_leftovers(self.directory, "state-*")

    def read_progress(self) -> TrainingProgress | None:
        """Progress of the newest state; None if there is none."""
        numbers = self._numbers()
        return _read_progress(self._path(numbers[-1])) if numbers else None

    def load(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> TrainingProgress | None:
        """
        Put model and optimizer into the newest state.

        Args:
            model (`nn.Module`):
                The model in training.
            optimizer (`torch.optim.Optimizer`):
                Its optimizer, built with the same settings.

        Returns:
            `TrainingProgress`: Where the trainer was; None if there is no state, and then nothing was changed.

        Raises:
            DrafterCheckpointError: The state does not belong to this model and optimizer, or is damaged.
        """
        numbers = self._numbers()
        if not numbers:
            return None
        path = self._path(numbers[-1])
        progress = _read_progress(path)
        try:
            weights = load_file(path / "weights.safetensors")
            with safe_open(path / "optimizer.safetensors", framework="pt") as file:
                kind = (file.metadata() or {}).get("optimizer")
                averages = {name: file.get_tensor(name) for name in file.keys()}
        except (OSError, SafetensorError) as error:
            raise _unusable(path, f"cannot be read ({error})") from error
        if kind != type(optimizer).__name__:
            raise _unusable(path, f"is of the optimizer {kind}, not {type(optimizer).__name__}")
        expected = model.state_dict()
        _check_tensors(path, weights, {name: tensor.shape for name, tensor in expected.items()})
        state_dict = _optimizer_state_dict(path, model, optimizer, averages)
        model.load_state_dict(weights)
        optimizer.load_state_dict(state_dict)
        return progress

    def _numbers(self) -> list[int]:
        try:
            names = os.listdir(self.directory)
        except FileNotFoundError:
            return []
        return sorted(int(match[1]) for name in names if (match := _DIRECTORY.fullmatch(name)))

    def _path(self, number: int) -> Path:
        return self.directory / f"state-{number:08d}"


def _trained(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.nn.Parameter]]:
    """Name and parameter of all that an optimizer updates, in its own order."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [(names[parameter], parameter) for group in optimizer.param_groups for parameter in group["params"]]


def _averages(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, parameter in _trained(model, optimizer):
        for key, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, torch.Tensor):
                raise TypeError(f"`{key}` of the optimizer is a {type(value).__name__}; only tensors are saved.")
            tensors[f"{name}/{key}"] = value.contiguous()
    return tensors


def _optimizer_state_dict(
    path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, averages: Mapping[str, torch.Tensor]
) -> dict[str, Any]:
    """What `optimizer.load_state_dict` takes: groups as they are set now, averages as they were."""
    trained = _trained(model, optimizer)
    state: dict[int, dict[str, torch.Tensor]] = {}
    places = {name: place for place, (name, _) in enumerate(trained)}
    for full_name, tensor in averages.items():
        name, _, key = full_name.rpartition("/")
        if name not in places:
            raise _unusable(path, f"has averages of `{name}`, which is not trained now")
        parameter = trained[places[name]][1]
        if tensor.ndim and tensor.shape != parameter.shape:
            raise _unusable(path, f"has `{full_name}` of shape {list(tensor.shape)}, not {list(parameter.shape)}")
        if not bool(torch.isfinite(tensor).all()):
            raise _unusable(path, f"has values in `{full_name}` that are not finite")
        state.setdefault(places[name], {})[key] = tensor
    if state and len(state) != len(trained):
        raise _unusable(path, f"has averages of {len(state)} parameters, {len(trained)} are trained now")
    return {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}


def _check_tensors(path: Path, tensors: Mapping[str, torch.Tensor], shapes: Mapping[str, torch.Size]) -> None:
    if different := sorted(tensors.keys() ^ shapes.keys()):
        raise _unusable(path, f"is of another model: {different[:5]} are only on one side")
    for name, tensor in tensors.items():
        if tensor.shape != shapes[name]:
            raise _unusable(path, f"has `{name}` of shape {list(tensor.shape)}, not {list(shapes[name])}")
        if tensor.dtype.is_floating_point and not bool(torch.isfinite(tensor).all()):
            raise _unusable(path, f"has values in `{name}` that are not finite")


def _read_progress(path: Path) -> TrainingProgress:
    try:
        fields = json.loads((path / "progress.json").read_text(encoding="utf-8"))
        if fields.pop("format") != _FORMAT:
            raise _unusable(path, f"is of another format than {_FORMAT}")
        return TrainingProgress(**fields)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, DrafterCheckpointError):
            raise
        raise _unusable(path, f"cannot be read ({error!r})") from error


def _unusable(path: Path, why: str) -> DrafterCheckpointError:
    return DrafterCheckpointError(
        f"The training state in {str(path)!r} {why}. Repeat the options it was made with, or remove the directory "
        f"{str(path.parent)!r}: training then goes on from the latest published version."
    )
