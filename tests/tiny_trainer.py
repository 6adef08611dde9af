"""A trainer of a tiny drafter, alone or as one of several processes that train together.

FSDP is for accelerators only as far as accelerate is concerned; torch's runs on CPUs as well, with gloo.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
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
TIMEOUT_S = 1100


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
        base = Path(output_dir) / "base"
        drafter.save_pretrained(base)
        drafter = add_lora(drafter, lora_rank, base_name_or_path=base)
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


class KillAt(TrainerCallback):
    """
    Ends the process the hard way after a step. Of processes that train together none does so before all have come
    that far: one that still waited for another's part of the step would end by an error of its own.
    """

    def __init__(self, step: int, meeting: Path | None = None) -> None:
        self.step, self._meeting = step, meeting

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            if self._meeting is not None:
                self._wait_for_the_others(self._meeting)
            os.kill(os.getpid(), signal.SIGKILL)

    @staticmethod
    def _wait_for_the_others(meeting: Path) -> None:
        meeting.mkdir(exist_ok=True)
        (meeting / os.environ["RANK"]).touch()
        while len(list(meeting.iterdir())) < int(os.environ["WORLD_SIZE"]):
            time.sleep(0.01)


def allow_fsdp_on_cpu() -> None:
    """Has accelerate take this CPU for an accelerator when it decides whether to shard."""
    initialize = PartialState.__init__

    def initialize_as_accelerator(self: PartialState, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_XPU

    PartialState.__init__ = initialize_as_accelerator


def train_as_rank(rank: int, port: int, directory: Path, output_dir: Path, runs: dict[str, dict[str, Any]]) -> None:
    """
    In a process of its own: train as one of two, one run after another, each given by the fields of its trainer.

    Leaves the drafter in `output_dir / name`, and weights and held-out metrics of this rank beside it.
    """
    torch.set_num_threads(1)  # the threads of the parent's pool do not exist in a fork
    os.environ["OMP_NUM_THREADS"] = "1"  # else accelerate sets more
    os.environ.update(WORLD_SIZE="2", RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    # A process that waits for the other in vain says where, and ends.
    faulthandler.dump_traceback_later(TIMEOUT_S, exit=True)
    if any("fsdp" in fields for fields in runs.values()):
        allow_fsdp_on_cpu()
    for name, fields in runs.items():
        fields = dict(fields)
        kill_at = fields.pop("kill_at", None)
        trainer = make_trainer(
            tiny_target("llama"),
            directory,
            output_dir / f"{name}-run",
            rows=8,
            per_device_train_batch_size=1,
            ddp_backend="gloo",
            callbacks=None if kill_at is None else [KillAt(kill_at, output_dir / "meeting")],
            **fields,
        )
        before = trainer.evaluate()
        trainer.train(resume_from_checkpoint=True)
        weights = trainer.accelerator.get_state_dict(trainer.model)
        metrics = trainer.evaluate()
        trainer.save_drafter(output_dir / name)
        torch.save([weights, before, metrics], output_dir / f"{name}-rank{rank}")
    # Without gloo's clean-up, which now and then waits for ever for a process that has already gone.
    os._exit(0)
