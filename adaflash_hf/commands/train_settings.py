"""Settings of a run of `adaflash train`: what was given, what follows from it, and what the trainer is called with."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple


if TYPE_CHECKING:
    import torch
    from torch.utils.data import Subset

    from ..training.recipes import Decision
    from ..training.training_arguments import DrafterTrainingArguments
    from ..training.trajectory_dataset import TrajectoryDataset
    from .train_request import TrainRequest
    from .train_start import TrainStart


__all__ = ["KEPT_CHECKPOINTS", "TrainData", "choose_device", "read_data", "settle", "training_arguments"]

KEPT_CHECKPOINTS = 2
_EVALUATIONS = 20
_MINIMUM_STEPS_BETWEEN_EVALUATIONS = 25
_ARGUMENT_NAMES = {
    "batch_size": "per_device_train_batch_size",
    "gradient_accumulation": "gradient_accumulation_steps",
    "anchors": "anchors_per_trajectory",
    "epochs": "num_train_epochs",
}


class TrainData(NamedTuple):
    """Trajectories, those to train on, and those kept for evaluation, if any are."""

    dataset: TrajectoryDataset
    train: Subset
    held_out: Subset | None


def read_data(request: TrainRequest) -> TrainData:
    """
    Read the trajectories, without the target's features.

    Args:
        request (`TrainRequest`):
            Of the run.
    """
    from torch.utils.data import Subset

    from ..training.trajectory_dataset import TrajectoryDataset, split_by_prompt

    dataset = TrajectoryDataset(request.trajectories, max_tokens=request.max_tokens)
    train, held_out = split_by_prompt(dataset, request.held_out)
    return TrainData(dataset, Subset(dataset, train), Subset(dataset, held_out) if held_out else None)


def choose_device(request: TrainRequest) -> torch.device:
    """
    Where target and drafter go: each of several processes has a GPU of its own.

    Args:
        request (`TrainRequest`):
            Of the run.
    """
    import torch

    from ..embedded_target import resolve_device

    device = request.device
    if device is None and request.num_processes > 1:
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
    return resolve_device(device)


def settle(request: TrainRequest, start: TrainStart | None, data: TrainData, device_type: str) -> list[Decision]:
    """
    All settings of the run that apply, with the reason for each.

    Args:
        request (`TrainRequest`):
            Of the run.
        start (`TrainStart`, *optional*):
            What it begins with. Of a new drafter that is not there yet the sizes are guessed: the settings that apply
            are the same, their values need not be.
        data (`TrainData`):
            Trajectories.
        device_type (`str`):
            Where it is trained.
    """
    from ..training.recipes import GIVEN, Decision, Situation, decide

    common = {
        "start": request.start,
        "on_cpu": device_type == "cpu",
        "has_stored_teacher": data.dataset.teacher_top_k > 0,
    }
    if start is None:
        preset = request.preset.fields if request.preset is not None else {}
        situation = Situation(**common, block_size=request.shape.get("block_size") or preset.get("block_size", 16))
    else:
        situation = Situation(
            **common,
            block_size=start.drafter.config.block_size,
            hidden_size=start.drafter.config.hidden_size,
            has_draft_vocabulary=start.drafter.draft_token_ids is not None,
        )
    settings = decide(situation, request.given, request.droppable)
    if request.steps is not None:
        settings = [row if row.name != "epochs" else Decision("steps", request.steps, GIVEN) for row in settings]
    return settings


def training_arguments(
    request: TrainRequest, settings: Sequence[Decision], data: TrainData, device_type: str
) -> DrafterTrainingArguments:
    """
    What the trainer is called with.

    Args:
        request (`TrainRequest`):
            Of the run.
        settings (`Sequence[Decision]`):
            From [`settle`].
        data (`TrainData`):
            Trajectories.
        device_type (`str`):
            Where it is trained.
    """
    import torch

    from ..embedded_target import default_dtype
    from ..training.recipes import schedule_arguments
    from ..training.training_arguments import DrafterTrainingArguments

    values = {setting.name: setting.value for setting in settings}
    fields: dict[str, Any] = {_ARGUMENT_NAMES.get(name, name): value for name, value in values.items()}
    decay_fraction = fields.pop("decay_fraction")
    fields["use_muon"] = fields.pop("optimizer", "adamw") == "muon"
    fields["vocabulary_size"] = fields.get("vocabulary_size") or None  # 0 stands for all tokens
    per_step = values["batch_size"] * values["gradient_accumulation"] * request.num_processes
    steps = request.steps or max(round(-(-len(data.train) // per_step) * values["epochs"]), 1)
    fields["max_steps"] = fields.pop("steps", -1)
    fields |= schedule_arguments(steps, values["warmup_steps"], decay_fraction)
    every = max(steps // _EVALUATIONS, _MINIMUM_STEPS_BETWEEN_EVALUATIONS)
    evaluates = data.held_out is not None
    return DrafterTrainingArguments(
        output_dir=str(request.checkpoints),
        train_only=None if request.only is None else request.only.replace("-", "_"),
        teacher=request.teacher,
        per_device_eval_batch_size=values["batch_size"],
        eval_strategy="steps" if evaluates else "no",
        # What a drafter that goes on gained is only seen from where it began.
        eval_on_start=evaluates and request.init is not None and not request.checkpoints.exists(),
        eval_steps=every,
        save_steps=every,
        save_total_limit=KEPT_CHECKPOINTS,
        # Where the hardware does not multiply bfloat16, emulating it is slower than float32.
        bf16=default_dtype(device_type) == torch.bfloat16,
        use_cpu=device_type == "cpu",
        seed=request.seed,
        report_to=[name for name in request.report_to if name != "tensorboard"],
        disable_tqdm=True,
        **fields,
    )
