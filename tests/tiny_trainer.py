"""A trainer of a tiny drafter; run as a program with RANK and WORLD_SIZE set, one process of several that train."""

from __future__ import annotations

import faulthandler
import os
import sys
from pathlib import Path
from typing import Any

import torch
from tiny_models import tiny_drafter, tiny_target
from torch.utils.data import Subset
from transformers import PreTrainedModel, TrainerCallback

from adaflash_hf import ConfidenceHeadModel
from adaflash_hf.training.drafter_trainer import DrafterTrainer
from adaflash_hf.training.initialization import attach_length_head
from adaflash_hf.training.lora import add_lora
from adaflash_hf.training.training_arguments import DrafterTrainingArguments
from adaflash_hf.training.trajectory_dataset import TrajectoryDataset


LAYER_IDS = [0, 2]
TIMEOUT_S = 90


def make_trainer(
    target: PreTrainedModel,
    directory: Path,
    output_dir: Path,
    *,
    with_head: bool = False,
    lora_rank: int | None = None,
    features: bool = True,
    callbacks: list[TrainerCallback] | None = None,
    rows: int = 9,
    confidence_head: ConfidenceHeadModel | None = None,
    **fields: Any,
) -> DrafterTrainer:
    """A trainer on the first `rows` of twelve trajectories, the last three held out."""
    dataset = TrajectoryDataset(directory, feature_layer_ids=LAYER_IDS if features else None)
    drafter = tiny_drafter(target, seed=4)
    if with_head:
        torch.manual_seed(5)
        attach_length_head(drafter)
    if lora_rank is not None:
        torch.manual_seed(6)
        drafter = add_lora(drafter, lora_rank, base_name_or_path="org/base")
    defaults = {
        "output_dir": str(output_dir),
        "use_cpu": True,
        "disable_tqdm": True,
        "anchors_per_trajectory": 6,
        "per_device_train_batch_size": 2,
        "num_train_epochs": 3,
        "learning_rate": 2e-3,
        "save_strategy": "no",
        "logging_steps": 2,
    }
    args = DrafterTrainingArguments(**{**defaults, **fields})
    train, held_out = Subset(dataset, range(rows)), Subset(dataset, range(9, 12))
    return DrafterTrainer(drafter, target, args, train, held_out, callbacks, confidence_head)


def weights_of(trainer: DrafterTrainer) -> dict[str, torch.Tensor]:
    """Copies of the drafter's weights."""
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


def main(directory: Path, output_dir: Path) -> None:
    """Train as this rank and leave weights and held-out metrics in `output_dir`."""
    torch.set_num_threads(1)
    # A process that waits for the other in vain says where, and ends.
    faulthandler.dump_traceback_later(TIMEOUT_S, exit=True)
    trainer = make_trainer(
        tiny_target("llama"),
        directory,
        output_dir,
        with_head=True,
        rows=8,
        per_device_train_batch_size=1,
        ddp_backend="gloo",
    )
    trainer.train()
    torch.save([weights_of(trainer), trainer.evaluate()], output_dir / f"rank{os.environ['RANK']}")
    # Without gloo's clean-up, which now and then waits for ever for a process that has already gone.
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
