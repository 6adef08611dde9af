from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys

import pytest
import tiny_trainer
import torch
from tiny_models import tiny_drafter, tiny_target
from tiny_trainer import LAYER_IDS, make_trainer, weights_of
from tiny_trajectories import make_trajectories, run_until_killed
from transformers import TrainerCallback

from adaflash_hf import ConfidenceHeadModel
from adaflash_hf.errors import DrafterCompatibilityError, InvalidInputError
from adaflash_hf.training.drafter_trainer import DrafterTrainer, last_complete_checkpoint
from adaflash_hf.training.initialization import new_confidence_head
from adaflash_hf.training.optimizers import MuonWithAdamW
from adaflash_hf.training.training_arguments import DrafterTrainingArguments
from adaflash_hf.training.trajectory_dataset import TrajectoryDataset


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama")


@pytest.fixture(scope="module")
def directory(target, tmp_path_factory):
    path = tmp_path_factory.mktemp("trajectories")
    return make_trajectories(path, target, teacher_top_k=8, capture_layer_ids=tuple(LAYER_IDS))


def changed(before, after):
    return {name for name in before if not torch.equal(before[name], after[name])}


@pytest.mark.parametrize("fields", [{"objective": "cross_entropy"}, {"use_muon": True, "vocabulary_size": 60}])
def test_it_learns_what_it_sees(target, directory, tmp_path, fields):
    trainer = make_trainer(target, directory, tmp_path, num_train_epochs=15, learning_rate=2e-2, **fields)
    seen = trainer.train_dataset
    before = trainer.evaluate(seen)
    trainer.train()
    after = trainer.evaluate(seen)
    assert after["eval_hard_loss"] < 0.5 * before["eval_hard_loss"]
    assert after["eval_acceptance_length"] > before["eval_acceptance_length"] + 0.5
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert {"acceptance_length", "hard_loss", "clipped_share"} <= set(logged[-1])


def test_metrics_do_not_depend_on_the_batch_size(target, directory, tmp_path):
    one = make_trainer(target, directory, tmp_path, with_head=True).evaluate()
    three = make_trainer(target, directory, tmp_path, with_head=True, per_device_eval_batch_size=3).evaluate()
    assert {"eval_acceptance_length_math", "eval_acceptance_position_3", "eval_length_head_error"} <= set(one)
    for name in set(one) - {"eval_runtime", "eval_samples_per_second", "eval_steps_per_second"}:
        assert one[name] == pytest.approx(three[name], rel=1e-5)


@pytest.mark.parametrize(
    ("train_only", "head_changes", "drafter_changes"),
    [(None, True, True), ("drafter", False, True), ("length_head", True, False)],
)
def test_only_what_is_asked_for_is_trained(target, directory, tmp_path, train_only, head_changes, drafter_changes):
    trainer = make_trainer(target, directory, tmp_path, with_head=True, train_only=train_only, num_train_epochs=1)
    before = weights_of(trainer)
    trainer.train()
    head = {name for name in before if name.startswith("length_head.")}
    assert changed(before, weights_of(trainer)) == (head if head_changes else set()) | (
        set(before) - head if drafter_changes else set()
    )
    assert not any(parameter.requires_grad for parameter in trainer.target_model.parameters())


def test_a_confidence_head_learns_on_a_frozen_drafter(target, directory, tmp_path):
    drafter = tiny_drafter(target, seed=4)
    before = {name: value.clone() for name, value in drafter.state_dict().items()}
    trainer = make_trainer(
        target,
        directory,
        tmp_path,
        train_only="confidence_head",
        confidence_head=new_confidence_head(drafter),
        num_train_epochs=4,
        length_head_learning_rate=3e-2,
        save_strategy="epoch",
    )
    first = trainer.evaluate(trainer.train_dataset)
    trainer.train()
    last = trainer.evaluate(trainer.train_dataset)
    assert last["eval_confidence_head_loss"] < first["eval_confidence_head_loss"]
    assert last["eval_confidence_head_error"] < first["eval_confidence_head_error"]
    assert last["eval_acceptance_length"] == first["eval_acceptance_length"]
    frozen = trainer.draft_step.drafter.state_dict()
    assert all(torch.equal(frozen[name], value) for name, value in before.items())
    saved = ConfidenceHeadModel.from_pretrained(last_complete_checkpoint(tmp_path))
    torch.testing.assert_close(saved.proj.weight, trainer.confidence_head.proj.weight)


def test_a_confidence_head_must_fit(target, directory, tmp_path):
    with pytest.raises(InvalidInputError, match="train_only"):
        make_trainer(target, directory, tmp_path, train_only="confidence_head")
    other = new_confidence_head(tiny_drafter(target, block_size=6))
    with pytest.raises(InvalidInputError, match="new_confidence_head"):
        make_trainer(target, directory, tmp_path, train_only="confidence_head", confidence_head=other)


def test_the_head_does_not_disturb_the_drafter(target, directory, tmp_path):
    runs = []
    for train_only in (None, "drafter"):
        trainer = make_trainer(
            target, directory, tmp_path, with_head=True, train_only=train_only, num_train_epochs=1, max_grad_norm=0.0
        )
        trainer.train()
        runs.append({name: value for name, value in weights_of(trainer).items() if "length_head" not in name})
    assert not changed(*runs)


def test_features_on_the_fly_train_the_same_drafter(target, directory, tmp_path):
    runs = []
    for features in (True, False):
        trainer = make_trainer(target, directory, tmp_path, features=features, num_train_epochs=1)
        trainer.train()
        runs.append(weights_of(trainer))
    for name, value in runs[0].items():
        # Adam divides by the gradient's size, which for tiny ones amplifies the rounding of the features.
        torch.testing.assert_close(value, runs[1][name], atol=1e-4, rtol=1e-3)


class KillAt(TrainerCallback):
    """Ends the process the hard way after a step."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("use_muon", [True, False])
def test_killed_and_resumed_gives_the_weights_of_an_uninterrupted_run(target, directory, tmp_path, use_muon):
    # Nine trajectories in five batches, accumulated in pairs: three steps an epoch, the last one of a single batch.
    fields = {
        "with_head": True,
        "use_muon": use_muon,
        "gradient_accumulation_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "vocabulary_size": 80,
        "draft_vocabulary": True,
    }
    whole = make_trainer(target, directory, tmp_path / "whole", **fields)
    whole.train()
    assert whole.state.global_step == 9
    killed = tmp_path / "killed"

    def train_and_die():
        make_trainer(target, directory, killed, callbacks=[KillAt(5)], **fields).train()

    run_until_killed(train_and_die)
    assert last_complete_checkpoint(killed).name == "checkpoint-4"
    # A checkpoint that was being written when the run was killed is not one.
    shutil.copytree(killed / "checkpoint-4", killed / "checkpoint-5")
    (killed / "checkpoint-5" / "trainer_state.json").write_text('{"global_step": 5')
    resumed = make_trainer(target, directory, killed, **fields)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 9
    assert not changed(weights_of(whole), weights_of(resumed))
    assert resumed.model.config.draft_vocab_size == len(resumed.vocabulary) <= 80
    assert torch.equal(whole.model.draft_token_ids, resumed.model.draft_token_ids)


@pytest.mark.slow
def test_two_processes_train_what_one_does(target, directory, tmp_path):
    fields = {"with_head": True, "per_device_train_batch_size": 1, "rows": 8}
    alone = make_trainer(target, directory, tmp_path, gradient_accumulation_steps=2, **fields)
    alone.train()
    expected = alone.evaluate()
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    command = [sys.executable, tiny_trainer.__file__, str(directory), str(tmp_path)]
    processes = [
        subprocess.Popen(command, env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(2)
    ]
    assert [process.wait(timeout=300) for process in processes] == [0, 0]
    (weights, metrics), (other_weights, other_metrics) = (torch.load(tmp_path / f"rank{rank}") for rank in range(2))
    assert not changed(weights, other_weights)
    for name, value in weights_of(alone).items():
        # Averaged across processes instead of added up over batches.
        torch.testing.assert_close(weights[name], value, atol=1e-5, rtol=1e-4)
    for name in ("eval_blocks", "eval_acceptance_length", "eval_loss", "eval_length_head_error"):
        assert metrics[name] == other_metrics[name] == pytest.approx(expected[name], rel=1e-4)


def test_resuming_without_a_checkpoint_starts_anew(target, directory, tmp_path):
    assert last_complete_checkpoint(tmp_path) is None
    trainer = make_trainer(target, directory, tmp_path, num_train_epochs=1)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 5


def test_learning_rates_of_the_groups(target, directory, tmp_path):
    fields = {"use_muon": True, "vector_learning_rate": 5e-4, "length_head_learning_rate": 7e-4}
    optimizer = make_trainer(target, directory, tmp_path, with_head=True, **fields).create_optimizer()
    assert isinstance(optimizer, MuonWithAdamW)
    assert [(group["lr"], group["use_muon"]) for group in optimizer.param_groups] == [
        (2e-3, True), (5e-4, False), (7e-4, False)
    ]  # fmt: skip
    plain = make_trainer(target, directory, tmp_path, with_head=True).create_optimizer()
    assert [group["lr"] for group in plain.param_groups] == [2e-3, 2e-3, 2e-4]


def test_float32_weights_train_for_a_bfloat16_target(directory, tmp_path):
    target = tiny_target("llama").to(torch.bfloat16)
    trainer = make_trainer(target, directory, tmp_path, num_train_epochs=1, teacher="full", bf16=True)
    before = weights_of(trainer)
    trainer.train()
    after = weights_of(trainer)
    assert changed(before, after) and all(value.dtype == torch.float32 for value in after.values())
    assert all(value.isfinite().all() for value in after.values())


def test_contradictions_are_refused(target, directory, tmp_path):
    with pytest.raises(InvalidInputError, match="attach_length_head"):
        make_trainer(target, directory, tmp_path, train_only="length_head")
    with pytest.raises(InvalidInputError, match="dataloader_persistent_workers"):
        make_trainer(target, directory, tmp_path, dataloader_num_workers=1, dataloader_persistent_workers=True)
    args = DrafterTrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    with pytest.raises(InvalidInputError, match="train_dataset"):
        DrafterTrainer(tiny_drafter(target), target, args, [1, 2])
    with pytest.raises(DrafterCompatibilityError):
        DrafterTrainer(tiny_drafter(num_target_layers=9), target, args, TrajectoryDataset(directory))
    trainer = make_trainer(target, directory, tmp_path)
    trainer.eval_dataset = None
    with pytest.raises(InvalidInputError, match="eval_dataset"):
        trainer.evaluate()
