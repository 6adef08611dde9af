from __future__ import annotations

import json
import os
import shutil
import signal

import pytest
import torch
from full_disk import full_after, full_disk
from hub_server import running_hub
from safetensors.torch import load_file
from stand_ins import byte_target, byte_tokenizer, load_byte_target
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_trajectories import byte_trajectories, make_trajectories, run_train, run_until_killed

from adaflash_hf import ConfidenceHeadModel, DFlashDrafterModel, embedded_target
from adaflash_hf.cli import main
from adaflash_hf.commands import train_display
from adaflash_hf.embedded_target import LoadedTarget
from adaflash_hf.errors import InvalidInputError
from adaflash_hf.training import presets
from adaflash_hf.training.drafter_trainer import DrafterTrainer
from adaflash_hf.training.presets import DrafterPreset


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


def test_what_is_trained_is_said_before_work_begins(directory, tmp_path, capsys, monkeypatch):
    line = "A new drafter will be trained: neither --init nor --from-scratch was given."

    def load(*args, **kwargs):
        raise InvalidInputError("loading begins")

    monkeypatch.setattr(embedded_target, "load_target", load)
    assert run(directory, tmp_path / "out") == 2
    shown = capsys.readouterr()
    assert shown.out.startswith(line) and "loading begins" in shown.err
    for start in (["--from-scratch"], ["--init", "org/drafter"]):
        assert run(directory, tmp_path / "out", *start) == 2
        assert line not in capsys.readouterr().out


def test_too_few_trajectories_are_refused_before_the_target_is_loaded(directory, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(embedded_target, "load_target", None)
    assert main(["train", "--trajectories", str(directory), "--out", str(tmp_path / "out")]) == 2
    assert "(--held-out) is 64, but there are 12 trajectories" in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_refused_before_the_target_is_loaded(
    directory, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(embedded_target, "load_target", None)
    (tmp_path / "file").touch()
    assert run(directory, tmp_path / "file" / "out") == 2
    assert "nothing was done yet" in capsys.readouterr().err
    with full_disk(100):
        assert run(directory, tmp_path / "out") == 2
    assert "Make room" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_too_little_room_is_told_before_training(directory, tmp_path, capsys, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    assert run(directory, tmp_path / "out") == 2
    assert "MB are needed there and 0 MB are free" in capsys.readouterr().err
    assert not (tmp_path / "out" / "run.json").exists()


def test_features_can_be_cached_for_trajectories_without(tmp_path, capsys):
    directory = make_trajectories(tmp_path / "t", byte_target())
    arguments = ("--features", "cache", "--length-head", "none", "--held-out", 0, "--steps", 2)
    assert run(directory, tmp_path / "out", *arguments) == 0
    assert "target features: cache" in capsys.readouterr().out
    assert len(list(directory.glob("features-*.safetensors"))) == 3
    assert DFlashDrafterModel.from_pretrained(tmp_path / "out").length_head is None


def test_a_finished_run_can_be_repeated_from_its_config(directory, tmp_path, capsys):
    one, two, three = tmp_path / "one", tmp_path / "two", tmp_path / "three"
    report = ("--steps", 10, "--report-to", "tensorboard")
    assert run(directory, one, *report, "--objective", "forward_kl", "--target-layer-ids", "2") == 0
    config = ["train", "--config", str(one / "train_config.yaml")]
    assert main([*config, "--out", str(two)]) == 0
    first, second = load_file(one / "model.safetensors"), load_file(two / "model.safetensors")
    assert all(torch.equal(first[name], second[name]) for name in first)
    configs = [path.joinpath("train_config.yaml").read_text().splitlines() for path in (one, two)]
    # But for the directory, and for who said so.
    without_remarks = [{line.partition("  #")[0] for line in lines} for lines in configs]
    assert without_remarks[0] ^ without_remarks[1] == {f"out: {one}", f"out: {two}"}
    events = EventAccumulator(str(one / "tensorboard")).Reload()
    assert {"train/loss", "eval/acceptance_length"} <= set(events.Tags()["scalars"])
    assert events.Scalars("eval/acceptance_length")[-1].step == 10
    # The command line wins, and what has no effect any more is left out.
    capsys.readouterr()
    assert main([*config, "--out", str(three), "--objective", "cross_entropy", "--steps", "2"]) == 0
    shown = capsys.readouterr().out
    assert "trained parameters, 2 steps" in shown and "cross_entropy" in shown


def test_a_drafter_is_pushed_with_its_card(directory, tmp_path, monkeypatch, capsys):
    with running_hub() as hub:
        hub.serve_this_process(monkeypatch, tmp_path / "cache")
        assert run(directory, tmp_path / "out", "--steps", 2, "--push-to-hub", "org/new", "--license", "mit") == 0
        files = hub.repositories["org/new"]
    assert "Pushed to http://127.0.0.1" in capsys.readouterr().out
    assert {"README.md", "config.json", "model.safetensors", "metrics.json"} <= set(files)
    card = files["README.md"].decode()
    assert "license: mit" in card and 'from_pretrained("org/new"' in card


def test_a_preset_gives_target_and_shape(directory, tmp_path, monkeypatch, capsys):
    shape = {"num_hidden_layers": 3, "block_size": 6, "target_layer_ids": [2], "mask_token_id": 3, "head_dim": 16}
    preset = DrafterPreset("tiny", "org/tiny-target", shape)
    monkeypatch.setattr(presets, "PRESETS", {"tiny": preset})
    targets = []

    def load_target(name, *args, **kwargs):
        targets.append(name)
        return LoadedTarget(byte_target(), byte_tokenizer())

    monkeypatch.setattr(embedded_target, "load_target", load_target)
    common = ["train", "--trajectories", str(directory), "--steps", "2", "--held-out", "3", "--preset", "tiny"]
    assert main([*common, "--out", str(tmp_path / "one"), "--block-size", "5"]) == 0
    assert "preset tiny" in capsys.readouterr().out
    config = DFlashDrafterModel.from_pretrained(tmp_path / "one").config
    assert config.num_hidden_layers == 3 and config.block_size == 5 and config.head_dim == 16
    assert main([*common, "--out", str(tmp_path / "two"), "--target", "org/finetuned", "--init", "x"]) == 2
    assert "--preset" in capsys.readouterr().err
    assert main([*common, "--out", str(tmp_path / "two"), "--target", "org/finetuned", "--layers", "1"]) == 0
    assert targets == ["org/tiny-target", "org/finetuned"]


def test_presets_are_listed_without_a_run(capsys):
    assert main(["train", "--list-presets"]) == 0
    shown = capsys.readouterr().out
    assert "qwen3-coder-30b-a3b" in shown and "248070" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "qwen3-9b"], "Did you mean"),
        (["--report-to", "tensorbord"], "tensorbord"),
        (["--push-to-hub", "not a name"], "push_to_hub"),
        (["--init", "x", "--from-scratch"], "--from-scratch"),
        (["--only", "confidence-head"], "--init"),
        (["--only", "confidence-head", "--init", "x", "--push-to-hub", "o/n"], "--push-to-hub"),
        (["--only", "length-head"], "--init"),
        (["--init", "DRAFTER", "--layers", "3"], "`layers`"),
        (["--objective", "cross_entropy", "--clip", "sum"], "clip"),
        (["--held-out", "12"], "(--held-out) is 12, but there are 12 trajectories"),
        (["--init", "no/such/drafter"], "`--init` is 'no/such/drafter' and cannot be loaded (there is no"),
    ],
)
def test_wrong_usage_is_one_line(directory, tmp_path, capsys, arguments, message):
    assert run(directory, tmp_path / "out", *arguments) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_a_model_of_another_kind_is_not_overwritten(directory, tmp_path, capsys):
    byte_target().save_pretrained(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert run(directory, tmp_path) == 2
    assert "holds a model of type 'llama' that would be overwritten" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_responses_of_another_target_are_told(tmp_path, capsys):
    target = byte_target()
    target.name_or_path = "org/other"
    trajectories = make_trajectories(tmp_path / "t", target)
    assert run(trajectories, tmp_path / "out", "--steps", 1) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"Warning: {trajectories} holds responses of 'org/other', and the target is ''" in shown


def test_features_that_were_not_stored_are_told(tmp_path, capsys):
    trajectories = make_trajectories(tmp_path / "t", byte_target())
    assert run(trajectories, tmp_path / "out", "--features", "stored") == 2
    assert "these trajectories were made without --features" in capsys.readouterr().err


def test_help_names_every_option(capsys):
    assert main(["train", "--help"]) == 0
    shown = capsys.readouterr().out
    for option in (
        "--trajectories",
        "--init",
        "--only",
        "--objective",
        "--anchors",
        "--features",
        "--resume",
        "--config",
    ):
        assert option in shown
