"""What a run of `adaflash train` writes down of itself, and how it knows the run that it is to go on with."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import InvalidInputError


if TYPE_CHECKING:
    from ..training.drafter_trainer import DrafterTrainer
    from ..training.recipes import Decision
    from .train_request import TrainRequest


__all__ = ["check_same_run", "recorded_settings", "stages_before", "write_records"]

# Of the drafter, in the record of a run.
_DRAFTER_FIELDS = ("num_hidden_layers", "block_size", "is_causal")


def recorded_settings(
    request: TrainRequest, num_train: int, drafter_config: Any, decisions: Sequence[Decision]
) -> dict[str, Any]:
    """
    What a run amounts to, defaults included: another with the same settings makes the same drafter.

    Args:
        request (`TrainRequest`):
            Of the run.
        num_train (`int`):
            How many trajectories it trains on.
        drafter_config (`DFlashDrafterConfig`, *optional*):
            Of the drafter that is trained; None for one that is not there yet.
        decisions (`Sequence[Decision]`):
            As far as they are made.
    """
    settings: dict[str, Any] = {
        "target": request.target,
        "init": request.init,
        "only": request.only,
        "trajectories": [str(path) for path in request.trajectories],
        "train_trajectories": num_train,
        "held_out": request.held_out,
        "max_tokens": request.max_tokens,
        "teacher": request.teacher,
        "seed": request.seed,
    }
    if drafter_config is not None:
        settings["drafter"] = {name: getattr(drafter_config, name) for name in _DRAFTER_FIELDS}
    return json.loads(json.dumps({**settings, **{decision.name: decision.value for decision in decisions}}))


def check_same_run(request: TrainRequest, settings: dict[str, Any]) -> dict[str, Any] | None:
    """
    The record of the run that is to go on, if there is one.

    Args:
        request (`TrainRequest`):
            Of this run.
        settings (`dict[str, Any]`):
            From [`recorded_settings`]; what is not known yet may be missing.

    Raises:
        InvalidInputError: what is there has other settings, or a record that nobody can read.
    """
    from ..training.drafter_trainer import last_complete_checkpoint
    from ..training.run_records import RUN_FILE, read_run_record

    path = request.out / RUN_FILE
    if not request.resume or not path.exists() or last_complete_checkpoint(request.checkpoints) is None:
        return None
    record = read_run_record(request.out)
    if record is None:
        raise InvalidInputError(
            f"`--out` is {str(request.out)!r}, where {RUN_FILE} cannot be read, so nobody knows what its checkpoints "
            "are of. Give --no-resume to start anew, or another directory."
        )
    stored = record["settings"]
    different = [name for name in settings if stored.get(name) != settings[name]]
    if different:
        listed = ", ".join(f"{name}: {stored.get(name)!r} there, {settings[name]!r} now" for name in different)
        raise InvalidInputError(
            f"`--out` is {str(request.out)!r}, which holds a run with other settings ({listed}). Repeat its options "
            "to go on with it, give --no-resume to start anew, or another directory."
        )
    return record


def write_records(
    request: TrainRequest,
    trainer: DrafterTrainer,
    settings: dict[str, Any],
    decisions: Sequence[Decision],
    *,
    resumed: dict[str, Any] | None,
    say: Callable[[str], None],
) -> None:
    """
    Write how the run is done, and the configuration that repeats it.

    Args:
        request (`TrainRequest`):
            Of the run.
        trainer (`DrafterTrainer`):
            Which has not started.
        settings (`dict[str, Any]`):
            From [`recorded_settings`].
        decisions (`Sequence[Decision]`):
            All that were made.
        resumed (`dict[str, Any]`, *optional*):
            The record of the run that goes on.
        say (`Callable[[str], None]`):
            Tells the user.
    """
    from ..training.run_records import RUN_FILE, data_record, machine_record, write_run_record

    more = {
        "reasons": {decision.name: decision.reason for decision in decisions},
        "data": data_record(trainer.train_dataset, trainer.eval_dataset, request.trajectories),
        "machine": machine_record(trainer.args.device, trainer.args.world_size),
        **stages_before(request, resumed, say),
    }
    write_run_record(request.out / RUN_FILE, sys.argv, settings, more)
    _write_config(request, decisions)


def stages_before(request: TrainRequest, resumed: dict[str, Any] | None, say: Callable[[str], None]) -> dict[str, Any]:
    """
    What is recorded of the runs before. A run that goes on keeps what it knew: the drafter that it began with may be
    gone.

    Args:
        request (`TrainRequest`):
            Of the run.
        resumed (`dict[str, Any]`, *optional*):
            The record of the run that goes on.
        say (`Callable[[str], None]`):
            Tells the user.
    """
    from ..training.run_stages import EARLIER, earlier_stages

    if request.init is None:
        return {}
    if resumed is not None:
        return {name: resumed[name] for name in EARLIER if name in resumed}
    earlier = earlier_stages(request.init, request.out)
    if not earlier["previous"]:
        say(f"{request.init} has no run.json of its training, so the records of this drafter begin with this run.")
    return earlier


def _write_config(request: TrainRequest, decisions: Sequence[Decision]) -> None:
    """The options with which `--config` repeats this run; those with a default that depends have their value."""
    from ..training.run_records import CONFIG_FILE
    from .config_files import write_config_file

    names = {"length_head_learning_rate": "learning_rate"}
    decided = {names.get(d.name, d.name): d for d in decisions}
    values = {**request.options, **{name: decision.value for name, decision in decided.items()}}
    if isinstance(values.get("target_layer_ids"), list):
        values["target_layer_ids"] = ",".join(map(str, values["target_layer_ids"]))
    reasons = {name: decision.reason for name, decision in decided.items()}
    write_config_file(request.out / CONFIG_FILE, values, reasons)
