from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_drafter, tiny_target
from tiny_trajectories import make_trajectories

from adaflash_hf.errors import InvalidInputError
from adaflash_hf.training.drafter_trainer import DrafterTrainer
from adaflash_hf.training.estimates import estimate_training, format_duration
from adaflash_hf.training.training_arguments import DrafterTrainingArguments
from adaflash_hf.training.trajectory_dataset import TrajectoryDataset


def test_an_estimate_counts_and_times_without_changing_anything(tmp_path, monkeypatch):
    target = tiny_target("llama")
    dataset = TrajectoryDataset(make_trajectories(tmp_path / "t", target))
    args = DrafterTrainingArguments(
        output_dir=str(tmp_path / "out"),
        use_cpu=True,
        objective="cross_entropy",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        num_train_epochs=3,
        use_muon=True,
        logits_memory_bytes=1000,
    )
    trainer = DrafterTrainer(tiny_drafter(target), target, args, dataset)
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    estimate = estimate_training(trainer)
    # 12 trajectories in 6 batches, two steps an epoch.
    assert estimate.steps == 6 and 0 < estimate.step_s < 60
    assert estimate.total_s == 6 * estimate.step_s
    parameters = list(trainer.model.parameters())
    count = sum(p.numel() for p in parameters)
    matrices = sum(p.numel() for p in parameters if p.ndim == 2)
    assert estimate.trainable_parameters == count
    assert estimate.training_bytes == 4 * (count + matrices + 2 * (count - matrices)) + 1000
    assert estimate.weights_bytes == 4 * (count + sum(p.numel() for p in target.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(before, parameters, strict=True))
    assert all(p.grad is None for p in parameters)
    assert estimate.peak_bytes is None, "measured on a GPU only"
    args.max_steps = 50
    assert estimate_training(trainer).steps == 50

    def run_out_of_memory(*args, **kwargs):
        raise torch.OutOfMemoryError("tried to allocate 80 GiB")

    monkeypatch.setattr(trainer, "compute_loss", run_out_of_memory)
    with pytest.raises(InvalidInputError, match="`batch_size` is 2 and `anchors` 512.*80 GiB"):
        estimate_training(trainer)


def test_durations():
    assert [format_duration(seconds) for seconds in (5, 89, 300, 9000)] == ["5 s", "89 s", "5 min", "2.5 h"]
