"""Training in two processes on a CPU, joined by gloo, against one process that accumulates the same batches."""

from __future__ import annotations

import multiprocessing
import signal

import pytest
import torch
from free_ports import free_port
from safetensors.torch import load_file
from tiny_models import tiny_target
from tiny_trainer import LAYER_IDS, make_trainer, train_as_rank
from tiny_trajectories import make_trajectories

from adaflash_hf import DFlashDrafterModel
from adaflash_hf.training.lora import load_lora


# Averaged across processes instead of added up over batches.
SAME_UPDATES = {"atol": 1e-5, "rtol": 1e-4}
METRICS = ("eval_blocks", "eval_acceptance_length", "eval_loss", "eval_length_head_error")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("trajectories")
    return make_trajectories(path, tiny_target("llama"), teacher_top_k=8, capture_layer_ids=tuple(LAYER_IDS))


def train_in_two_processes(directory, output_dir, expected_code=0, **runs):
    """What each rank left of each run: weights, metrics before and metrics after."""
    # Forked: importing everything anew would take longer than the training.
    context = multiprocessing.get_context("fork")
    arguments = (free_port(), directory, output_dir, runs)
    processes = [context.Process(target=train_as_rank, args=(rank, *arguments), daemon=True) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(1200)
    assert [process.exitcode for process in processes] == [expected_code] * 2
    if expected_code == 0:
        return {name: [torch.load(output_dir / f"{name}-rank{rank}") for rank in range(2)] for name in runs}


def train_alone(directory, output_dir, **fields):
    trainer = make_trainer(
        tiny_target("llama"),
        directory,
        output_dir,
        rows=8,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        **fields,
    )
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    trainer.train()
    after = trainer.model.state_dict()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert any("length_head." in name for name in moved) and len(moved) > 4
    return after, trainer.evaluate()


def assert_same(weights, metrics, expected_weights, expected_metrics):
    assert weights.keys() == expected_weights.keys()
    for name, value in expected_weights.items():
        torch.testing.assert_close(weights[name], value, **SAME_UPDATES)
    for name in METRICS:
        assert metrics[name] == pytest.approx(expected_metrics[name], rel=1e-4)


@pytest.mark.slow
def test_two_processes_train_what_one_does(directory, tmp_path):
    expected = train_alone(directory, tmp_path / "alone", with_head=True)
    ranks = train_in_two_processes(directory, tmp_path, ddp={"with_head": True})["ddp"]
    (weights, _, metrics), (other_weights, _, other_metrics) = ranks
    assert_same(weights, metrics, *expected)
    assert all(torch.equal(other_weights[name], value) for name, value in weights.items())
    assert all(metrics[name] == other_metrics[name] for name in METRICS)
    saved = load_file(tmp_path / "ddp" / "model.safetensors")
    assert all(torch.equal(saved[name], value) for name, value in weights.items())


@pytest.mark.slow
def test_sharded_killed_and_resumed_it_trains_what_one_process_does(directory, tmp_path):
    # Three held-out trajectories for two processes: one of them has a batch less, and must not leave the other alone.
    whole = {
        "with_head": True,
        "fsdp": True,
        "fsdp_config": {"version": 2, "state_dict_type": "FULL_STATE_DICT"},
        "gradient_checkpointing": True,
        "save_strategy": "steps",
        "save_steps": 5,
    }
    adapted = {**whole, "lora_rank": 2, "num_train_epochs": 1, "save_strategy": "no"}
    train_in_two_processes(directory, tmp_path, -signal.SIGKILL, whole={**whole, "kill_at": 7})
    assert sorted(path.name for path in (tmp_path / "whole-run").glob("checkpoint-*")) == ["checkpoint-5"]
    # The full state under the native names, though no process held it all.
    checkpoint = DFlashDrafterModel.from_pretrained(tmp_path / "whole-run" / "checkpoint-5")
    results = train_in_two_processes(directory, tmp_path, whole=whole, adapted=adapted)

    expected = train_alone(directory, tmp_path / "alone", with_head=True)
    (weights, _, metrics), (_, _, other_metrics) = results["whole"]
    assert_same(weights, metrics, *expected)
    assert all(metrics[name] == other_metrics[name] for name in METRICS)
    saved = DFlashDrafterModel.from_pretrained(tmp_path / "whole").state_dict()
    assert all(torch.equal(saved[name], value) for name, value in weights.items())
    assert any(not torch.equal(checkpoint.state_dict()[name], value) for name, value in saved.items())

    expected = train_alone(directory, tmp_path / "alone-adapted", with_head=True, lora_rank=2, num_train_epochs=1)
    (weights, _, metrics), _ = results["adapted"]
    assert_same(weights, metrics, *expected)
    loaded = load_lora(tmp_path / "adapted" / "adapter").state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in weights.items())
