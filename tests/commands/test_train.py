from __future__ import annotations

import json
import os
import signal

import pytest
import torch
from safetensors.torch import load_file
from stand_ins import SPECIAL_TOKENS, byte_tokenizer
from tiny_models import tiny_target
from tiny_trajectories import make_trajectories, run_until_killed

from adaflash_hf import DFlashDrafterModel, embedded_target
from adaflash_hf.cli import main
from adaflash_hf.commands import train_display
from adaflash_hf.embedded_target import LoadedTarget


def make_target():
    return tiny_target("llama", vocab_size=len(SPECIAL_TOKENS) + 256)


@pytest.fixture(autouse=True)
def tiny_targets(monkeypatch):
    monkeypatch.setattr(embedded_target, "load_target", lambda *a, **k: LoadedTarget(make_target(), byte_tokenizer()))
    monkeypatch.setenv("COLUMNS", "160")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("trajectories")
    return make_trajectories(path, make_target(), teacher_top_k=4, capture_layer_ids=(2,))


def run(directory, out, *extra):
    fixed = ["--layers", 2, "--block-size", 4] if "--init" not in extra else []
    common = ["--held-out", 3, "--steps", 30, "--batch-size", 3, "--anchors", 4]
    arguments = ["train", "--trajectories", directory, "--out", out, *common, *fixed, *extra]
    return main([str(argument) for argument in arguments])


def test_from_scratch_then_on_then_the_head_alone(directory, tmp_path, capsys):
    first, second, third = tmp_path / "first", tmp_path / "second", tmp_path / "third"
    assert run(directory, first) == 0
    shown = capsys.readouterr().out
    for expected in ("Settings", "half hard, half soft", "trained parameters, 30 steps", "held out: tau", "Held-out"):
        assert expected in shown
    assert "target features: stored" in shown
    drafter = DFlashDrafterModel.from_pretrained(first)
    assert drafter.config.block_size == 4 and drafter.config.mask_token_id == 3 and drafter.dtype == torch.bfloat16
    record = json.loads((first / "run.json").read_text())
    assert record["settings"]["optimizer"] == "adamw" and record["settings"]["train_trajectories"] == 9
    steps = [json.loads(line)["step"] for line in (first / "training_log.jsonl").read_text().splitlines()]
    assert steps[-1] == 30
    assert json.loads((first / "metrics.json").read_text())["eval_acceptance_length"] >= 1

    assert run(directory, second, "--init", first, "--features", "compute") == 0
    assert "the paper's objective" in capsys.readouterr().out
    assert run(directory, third, "--init", second, "--only", "length-head") == 0
    before, after = load_file(second / "model.safetensors"), load_file(third / "model.safetensors")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all(name.startswith("length_head.") for name in changed)


def test_a_killed_run_resumes_to_the_same_drafter(directory, tmp_path, capsys, monkeypatch):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert run(directory, whole) == 0

    class KillingCallback(train_display.ConsoleCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 28:
                os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(train_display, "ConsoleCallback", KillingCallback)
        run_until_killed(lambda: run(directory, killed))
    capsys.readouterr()
    assert run(directory, killed, "--seed", 1) == 2
    assert "seed: 0 there, 1 now" in capsys.readouterr().err
    assert run(directory, killed) == 0
    assert "Resuming from checkpoint-25" in capsys.readouterr().out
    one, two = load_file(whole / "model.safetensors"), load_file(killed / "model.safetensors")
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_features_can_be_cached_for_trajectories_without(tmp_path, capsys):
    directory = make_trajectories(tmp_path / "t", make_target())
    arguments = ("--features", "cache", "--length-head", "none", "--held-out", 0, "--steps", 2)
    assert run(directory, tmp_path / "out", *arguments) == 0
    assert "target features: cache" in capsys.readouterr().out
    assert len(list(directory.glob("features-*.safetensors"))) == 3
    assert DFlashDrafterModel.from_pretrained(tmp_path / "out").length_head is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--init", "x", "--from-scratch"], "--from-scratch"),
        (["--only", "length-head"], "--init"),
        (["--init", "DRAFTER", "--layers", "3"], "num_hidden_layers"),
        (["--objective", "cross_entropy", "--clip", "sum"], "clip"),
        (["--held-out", "12"], "num_held_out"),
    ],
)
def test_wrong_usage_is_one_line(directory, tmp_path, capsys, arguments, message):
    assert run(directory, tmp_path / "out", *arguments) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_help_names_every_option(capsys):
    assert main(["train", "--help"]) == 0
    shown = capsys.readouterr().out
    for option in ("--trajectories", "--init", "--only", "--objective", "--anchors", "--features", "--resume"):
        assert option in shown
