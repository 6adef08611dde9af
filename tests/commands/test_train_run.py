from __future__ import annotations

import json
import os
import signal

import pytest
import torch
from full_disk import full_after
from hub_server import running_hub
from safetensors.torch import load_file
from stand_ins import byte_target, load_byte_target
from tiny_trajectories import byte_trajectories, make_trajectories, run_train, run_until_killed

from adaflash_hf import ConfidenceHeadModel, DFlashDrafterModel
from adaflash_hf.commands import train_display
from adaflash_hf.training.drafter_trainer import DrafterTrainer


@pytest.fixture(autouse=True)
def tiny_targets(monkeypatch):
    load_byte_target(monkeypatch)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return byte_trajectories(tmp_path_factory.mktemp("trajectories"))


def run(directory, out, *extra):
    fixed = ["--layers", 2, "--block-size", 4] if "--init" not in extra else []
    return run_train(directory, out, *fixed, *extra)


def test_from_scratch_then_on_then_the_head_alone(directory, tmp_path, capsys):
    first, second, third = tmp_path / "first[b]", tmp_path / "second", tmp_path / "third"
    assert run(directory, first) == 0
    shown = capsys.readouterr().out
    assert f"The drafter is in {first}." in " ".join(shown.split())
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
    assert record["reasons"]["block_size"] == "given" and record["data"]["held_out_trajectories"] == 3

    assert run(directory, second, "--init", first, "--features", "compute") == 0
    shown = capsys.readouterr().out
    assert "the paper's objective" in shown and "step 0/30  held out: tau" in shown, "what it began with"
    assert run(directory, third, "--init", second, "--only", "length-head") == 0
    before, after = load_file(second / "model.safetensors"), load_file(third / "model.safetensors")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all(name.startswith("length_head.") for name in changed)
    card = (third / "README.md").read_text()
    assert card.index("Stage 1: drafter and length head") < card.index("Stage 2") < card.index("Stage 3: the length")
    assert str(tmp_path) not in card
    previous = json.loads((third / "run.json").read_text())["previous"]
    assert [record["settings"]["init"] for record in previous] == [None, str(first)]


def test_blocks_of_a_new_or_old_drafter_become_causal(directory, tmp_path, capsys):
    one, two, three = tmp_path / "one", tmp_path / "two", tmp_path / "three"
    assert run(directory, one, "--steps", 2) == 0
    assert run(directory, two, "--steps", 2, "--init", one, "--causal-blocks") == 0
    assert run(directory, three, "--steps", 2, "--causal-blocks") == 0
    configs = [DFlashDrafterModel.from_pretrained(path).config for path in (one, two, three)]
    assert [config.is_block_causal for config in configs] == [False, True, True]
    assert json.loads((two / "run.json").read_text())["settings"]["drafter"]["is_causal"] is True
    assert run(directory, tmp_path / "four", "--steps", 2, "--init", two) == 0
    assert DFlashDrafterModel.from_pretrained(tmp_path / "four").config.is_block_causal


def test_a_draft_vocabulary_stays_with_the_drafter(directory, tmp_path, capsys):
    first, second = tmp_path / "first", tmp_path / "second"
    assert run(directory, first, "--vocabulary-size", 60, "--draft-vocabulary", "--length-head", "none") == 0
    drafted = DFlashDrafterModel.from_pretrained(first).draft_token_ids
    assert 2 <= len(drafted) <= 60
    capsys.readouterr()
    assert run(directory, second, "--init", first) == 0
    assert "a draft vocabulary of its own" in " ".join(capsys.readouterr().out.split())
    assert torch.equal(DFlashDrafterModel.from_pretrained(second).draft_token_ids, drafted)


def test_heads_on_a_drafter_trained_for_acceptance(directory, tmp_path, capsys):
    drafter, confidence, truncated = tmp_path / "drafter", tmp_path / "confidence", tmp_path / "truncated"
    assert run(directory, drafter, "--objective", "acceptance", "--length-head", "none") == 0
    assert "as far as they are reached" in capsys.readouterr().out
    assert json.loads((drafter / "run.json").read_text())["settings"]["position_decay"] is None
    assert run(directory, confidence, "--init", drafter, "--only", "confidence-head") == 0
    shown = capsys.readouterr().out
    assert "confidence head, mean error" in shown and "The confidence head is in" in shown
    head = ConfidenceHeadModel.from_pretrained(confidence)
    assert head.config.draft_length == 3 and head.dtype == torch.bfloat16
    assert not (confidence / "README.md").exists()
    labels = ("--only", "length-head", "--length-labels", "truncated")
    (drafter / "run.json").unlink()
    assert run(directory, truncated, "--init", drafter, *labels) == 0
    assert json.loads((truncated / "run.json").read_text())["settings"]["length_labels"] == "truncated"
    assert "has no run.json of its training" in " ".join(capsys.readouterr().out.split())
    assert DFlashDrafterModel.from_pretrained(truncated).length_head is not None


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


def test_a_full_disk_costs_nothing_that_was_written(directory, tmp_path, capsys):
    out = tmp_path / "out"
    with full_after(DrafterTrainer, "_save_checkpoint", 1, room_bytes=20_000):
        assert run(directory, out) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "where writing failed" in error and "Make room" in error and "resume from the last one" in error
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["checkpoint-25"]
    with full_after(DrafterTrainer, "train", 1, room_bytes=20_000):
        assert run(directory, out) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert f"`out` is '{out}'" in error and "in the last checkpoint: repeat the command" in error
    assert not list(out.glob("*.safetensors")) and not list(out.glob(".*"))
    assert run(directory, out) == 0
    assert "Resuming from checkpoint-30" in capsys.readouterr().out
    before = (out / "model.safetensors").read_bytes()
    with full_after(DrafterTrainer, "train", 1, room_bytes=20_000):
        assert run(directory, out, "--no-resume", "--seed", 1, "--steps", 1) == 2
    assert (out / "model.safetensors").read_bytes() == before


def test_features_can_be_cached_for_trajectories_without(tmp_path, capsys):
    directory = make_trajectories(tmp_path / "t", byte_target())
    arguments = ("--features", "cache", "--length-head", "none", "--held-out", 0, "--steps", 2)
    assert run(directory, tmp_path / "out", *arguments) == 0
    assert "target features: cache" in capsys.readouterr().out
    assert len(list(directory.glob("features-*.safetensors"))) == 3
    assert DFlashDrafterModel.from_pretrained(tmp_path / "out").length_head is None


def test_a_drafter_is_pushed_with_its_card(directory, tmp_path, monkeypatch, capsys):
    with running_hub() as hub:
        hub.serve_this_process(monkeypatch, tmp_path / "cache")
        assert run(directory, tmp_path / "out", "--steps", 2, "--push-to-hub", "org/new", "--license", "mit") == 0
        files = hub.repositories["org/new"]
    assert "Pushed to http://127.0.0.1" in capsys.readouterr().out
    assert {"README.md", "config.json", "model.safetensors", "metrics.json"} <= set(files)
    card = files["README.md"].decode()
    assert "license: mit" in card and 'from_pretrained("org/new"' in card


def test_responses_of_another_target_are_told(tmp_path, capsys):
    target = byte_target()
    target.name_or_path = "org/other"
    trajectories = make_trajectories(tmp_path / "t", target)
    assert run(trajectories, tmp_path / "out", "--steps", 1) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"Warning: {trajectories} holds responses of 'org/other', and the target is ''" in shown
