"""What a training run will take, measured on its first batch before it starts."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.utils.data import DataLoader

from ..errors import InvalidInputError
from .chunked_loss import default_logits_memory


if TYPE_CHECKING:
    from .drafter_trainer import DrafterTrainer


__all__ = ["TrainingEstimate", "checkpoint_bytes", "estimate_training", "format_duration"]


@dataclass(frozen=True)
class TrainingEstimate:
    """
    Time and memory of a run on this machine.

    Attributes:
        trainable_parameters: How many numbers are trained.
        steps: Optimizer steps.
        step_s: Seconds of one optimizer step, all accumulated batches included.
        total_s: Seconds of all steps; evaluations come on top.
        weights_bytes: Drafter and target.
        training_bytes: Gradients, optimizer state and logits; activations come on top.
        peak_bytes: What the first batch took on a GPU at most, all of that and its activations included; None on a
            CPU, where nobody counts.
    """

    trainable_parameters: int
    steps: int
    step_s: float
    total_s: float
    weights_bytes: int
    training_bytes: int
    peak_bytes: int | None = None


def estimate_training(trainer: DrafterTrainer) -> TrainingEstimate:
    """
    Time two passes of the first batch and two updates, and count the weights; no weight changes.

    Args:
        trainer (`DrafterTrainer`):
            A trainer that has not started.

    Raises:
        InvalidInputError: the batch does not fit into the GPU's memory.
    """
    args = trainer.args
    dataset = trainer.train_dataset
    loader = DataLoader(dataset, batch_size=args.per_device_train_batch_size, collate_fn=trainer.data_collator)
    batch = trainer._prepare_inputs(next(iter(loader)))
    device = args.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    try:
        batch_s, update_s = _timed_step(trainer, batch)
    except torch.OutOfMemoryError as error:
        raise InvalidInputError(
            f"`batch_size` is {args.per_device_train_batch_size} and `anchors` {args.anchors_per_trajectory}, and one "
            f"such batch does not fit into the memory of {device} ({error}). Lower `batch_size` and raise "
            "`gradient_accumulation` by the same factor, or lower `anchors`."
        ) from error
    trainer.reset_train_metrics()

    batches = -(-len(dataset) // (args.per_device_train_batch_size * args.world_size))
    steps_per_epoch = max(-(-batches // args.gradient_accumulation_steps), 1)
    steps = args.max_steps if args.max_steps > 0 else round(steps_per_epoch * args.num_train_epochs)
    step_s = batch_s * args.gradient_accumulation_steps + update_s
    trainable = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    count = sum(parameter.numel() for parameter in trainable)
    logits_bytes = args.logits_memory_bytes or default_logits_memory(device)
    return TrainingEstimate(
        trainable_parameters=count,
        steps=steps,
        step_s=step_s,
        total_s=steps * step_s,
        weights_bytes=_bytes_of(trainer.model) + _bytes_of(trainer.target_model),
        training_bytes=4 * (count + _averages(trainer)) + logits_bytes,
        peak_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
    )


def checkpoint_bytes(trainer: DrafterTrainer) -> int:
    """
    What one checkpoint of a run takes on the disk: weights and the optimizer's averages.

    Args:
        trainer (`DrafterTrainer`):
            A trainer that has not started.
    """
    return _bytes_of(trainer.model) + 4 * _averages(trainer)


def format_duration(seconds: float) -> str:
    """Seconds as a person would say them."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"


def _timed_step(trainer: DrafterTrainer, batch: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Seconds of one batch forward and back, and of one update; the better of two, since the first warms up."""
    model = trainer.model
    model.train()
    optimizer = trainer.create_optimizer()
    for group in optimizer.param_groups:
        group["lr"] = 0.0  # all the work of an update, and no change
    batch_s, update_s = [], []
    for _ in range(2):
        begin = _now(model)
        with trainer.compute_loss_context_manager():
            loss = trainer.compute_loss(model, batch)
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        middle = _now(model)
        optimizer.step()
        batch_s.append(middle - begin)
        update_s.append(_now(model) - middle)
        model.zero_grad(set_to_none=True)
    # Its averages hold this batch; the run must start with none.
    trainer.optimizer = None
    return min(batch_s), min(update_s)


def _averages(trainer: DrafterTrainer) -> int:
    """How many numbers the optimizer keeps: Muon one average per matrix, Adam two per parameter."""
    use_muon = trainer.args.use_muon
    trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    return sum(p.numel() * (1 if use_muon and p.ndim == 2 else 2) for p in trained)


def _now(model: torch.nn.Module) -> float:
    if next(model.parameters()).is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def _bytes_of(model: torch.nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
