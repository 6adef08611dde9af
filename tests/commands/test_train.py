from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from stand_ins import byte_target, byte_tokenizer, load_byte_target
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_models import tiny_drafter
from tiny_trajectories import byte_trajectories, run_train

from adaflash_hf import DFlashDrafterModel, embedded_target
from adaflash_hf.cli import main
from adaflash_hf.embedded_target import LoadedTarget
from adaflash_hf.errors import InvalidInputError
from adaflash_hf.training import presets
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


def test_what_is_trained_is_said_before_work_begins(directory, tmp_path, capsys, monkeypatch):
    line = "A new drafter will be trained: neither --init nor --from-scratch was given."

    def load(*args, **kwargs):
        raise InvalidInputError("loading begins")

    monkeypatch.setattr(embedded_target, "load_target", load)
    assert run(directory, tmp_path / "out") == 2
    shown = capsys.readouterr()
    assert shown.out.startswith(line) and "loading begins" in shown.err
    tiny_drafter(byte_target(), target_layer_ids=[2]).save_pretrained(tmp_path / "drafter")
    for start in (["--from-scratch"], ["--init", tmp_path / "drafter"]):
        assert run(directory, tmp_path / "out", *start) == 2
        assert line not in capsys.readouterr().out


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
        (["--init", "x", "--from-scratch"], "--from-scratch"),
        (["--only", "confidence-head"], "--init"),
        (["--only", "length-head"], "--init"),
    ],
)
def test_wrong_usage_is_one_line(directory, tmp_path, capsys, arguments, message):
    assert run(directory, tmp_path / "out", *arguments) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


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
