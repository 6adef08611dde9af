"""What `adaflash train` refuses, all that can be known without the target before it is loaded."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ..errors import InvalidInputError


if TYPE_CHECKING:
    from ..training.drafter_trainer import DrafterTrainer
    from .train_request import TrainRequest
    from .train_settings import TrainData
    from .train_start import TrainStart


__all__ = ["check_places", "check_room", "check_without_target"]

_WRITTEN_MODEL_TYPES = ("dflash_drafter", "adaflash_confidence_head")


def check_places(request: TrainRequest) -> None:
    """
    Refuse places and loggers that cannot be written to or would lose something.

    Args:
        request (`TrainRequest`):
            Of the run.
    """
    from ..output_places import check_writable
    from ..training.run_records import check_reporting

    check_reporting(request.report_to)
    if request.is_main:
        check_writable(request.out)
        _check_holds_no_other_model(request)
        for path in request.trajectories if request.features == "cache" else ():
            check_writable(path, "trajectories")
    if request.num_processes > 1 and request.features == "cache":
        raise InvalidInputError(
            "`--features` is 'cache', but several processes would write the same files; run with one process "
            "first (--steps 1), then with all of them and --features stored."
        )
    if request.push_to_hub is not None and request.trains_confidence_head:
        raise InvalidInputError(
            f"`--push-to-hub` is {request.push_to_hub!r}, but a confidence head alone is not a drafter; leave it out."
        )


def check_without_target(request: TrainRequest, start: TrainStart | None, data: TrainData, device_type: str) -> None:
    """
    Refuse settings that have no effect, are out of range, do not go with the trajectories or the drafter, or are
    others than those of the run that is to go on.

    Args:
        request (`TrainRequest`):
            Of the run.
        start (`TrainStart`, *optional*):
            What it begins with; None for a new drafter, for which there must be a target first.
        data (`TrainData`):
            Trajectories.
        device_type (`str`):
            Where it will be trained.
    """
    from ..training.drafter_trainer import resolve_teacher
    from ..training.recipes import GIVEN
    from ..training.trajectory_dataset import check_stored_features
    from .train_records import check_same_run, recorded_settings
    from .train_settings import settle, training_arguments

    settings = settle(request, start, data, device_type)
    resolve_teacher(training_arguments(request, settings, data, device_type), data.dataset)
    fields = {**(request.preset.fields if request.preset is not None else {}), **request.shape}
    layer_ids = fields.get("target_layer_ids") if start is None else start.drafter.config.target_layer_ids
    check_stored_features(data.dataset, request.features, layer_ids)
    # What nobody gave may depend on the target.
    given = [row for row in [*settings, *([] if start is None else start.decisions)] if row.reason == GIVEN]
    config = None if start is None else start.drafter.config
    check_same_run(request, {**recorded_settings(request, len(data.train), config, given), **request.shape})


def check_room(request: TrainRequest, trainer: DrafterTrainer) -> None:
    """
    Refuse a disk without room for the checkpoints that are kept, the one that is written before the oldest goes, and
    the drafter.

    Args:
        request (`TrainRequest`):
            Of the run.
        trainer (`DrafterTrainer`):
            Which has not started.
    """
    from ..output_places import check_room as check_room_at
    from ..training.estimates import checkpoint_bytes
    from .train_settings import KEPT_CHECKPOINTS

    args = trainer.args
    weights = sum(parameter.numel() for parameter in trainer.model.parameters())
    saves = math.ceil(args.max_steps / args.save_steps) if args.max_steps > 0 else KEPT_CHECKPOINTS + 1
    files = [file for file in request.checkpoints.rglob("*") if file.is_file()]
    needed = min(saves, KEPT_CHECKPOINTS + 1) * checkpoint_bytes(trainer) + 2 * weights
    check_room_at(request.out, needed - sum(file.stat().st_size for file in files))


def _check_holds_no_other_model(request: TrainRequest) -> None:
    """The drafter's files would take the place of that model's: of the target's, where the two are mixed up."""
    from ..checkpoint_files import stored_model_type

    try:
        model_type = stored_model_type(request.out)
    except (OSError, ValueError):
        return
    if model_type not in _WRITTEN_MODEL_TYPES:
        raise InvalidInputError(
            f"`--out` is {str(request.out)!r}, which holds a model of type {model_type!r} that would be overwritten; "
            "pass another directory for the drafter."
        )
