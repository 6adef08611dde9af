from __future__ import annotations

import json

import datasets
import pytest
from full_disk import full_after
from stand_ins import byte_target, load_byte_target
from tiny_models import rounding_allowed, tiny_drafter

from adaflash_hf import embedded_target
from adaflash_hf.cli import main
from adaflash_hf.commands import trajectories as command
from adaflash_hf.commands.trajectories import interleave, parse_layer_ids
from adaflash_hf.errors import InvalidInputError
from adaflash_hf.training import trajectories
from adaflash_hf.training.trajectories import read_settings
from adaflash_hf.training.trajectory_dataset import TrajectoryDataset


@pytest.fixture(autouse=True)
def tiny_targets(monkeypatch):
    load_byte_target(monkeypatch)


@pytest.fixture
def prompt_files(tmp_path):
    math, code = tmp_path / "math.jsonl", tmp_path / "code.json"
    math.write_text("\n".join(json.dumps({"question": f"{i} + 1?"}) for i in range(8)), encoding="utf-8")
    code.write_text(json.dumps([{"text": f"f{i}" + "x" * 100 * (i == 0)} for i in range(4)]), encoding="utf-8")
    return [str(math), str(code)]


def run(out, prompt_files, *extra):
    files = [part for file in prompt_files for part in ("--prompts", file)]
    return main(
        ["trajectories", *files, "--out", str(out), "--max-new-tokens", "6", "--batch-size", "4", *map(str, extra)]
    )


def test_it_stores_responses_and_shows_lengths(tmp_path, prompt_files, capsys):
    arguments = ("--max-prompt-tokens", "60", "--teacher-top-k", "5", "--features")
    assert run(tmp_path / "out", prompt_files, *arguments) == 0
    shown = capsys.readouterr().out
    assert "Left out, longer than 60 tokens: 1 code" in shown and "66 new tokens" in shown and "tok/s" in shown
    assert "math" in shown and "all" in shown
    dataset = TrajectoryDataset(tmp_path / "out", feature_layer_ids=[2])
    assert len(dataset) == 11 and dataset.domains == ["code", "math"] and dataset.teacher_top_k == 5
    # The same again decodes nothing.
    assert run(tmp_path / "out", prompt_files, *arguments) == 0
    assert "11 trajectories were there from an earlier run" in capsys.readouterr().out


def test_brackets_in_names_are_shown(tmp_path, prompt_files, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run("out[b]", prompt_files[:1], "--domain", "[maths]", "--limit", 2) == 0
    shown = capsys.readouterr().out
    assert "Lengths in tokens (out[b])" in shown and "[maths]" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--drafter", "no/such/drafter"), "`--drafter` is 'no/such/drafter' and cannot be loaded"),
        (("--drafter", "DRAFTER", "--length-policy", "length_head"), "asks for a length head"),
        (("--features", "--target-layer-ids", "1,x"), "`--target-layer-ids` is '1,x'"),
    ],
)
def test_what_needs_no_target_is_refused_before_it_is_loaded(
    tmp_path, prompt_files, monkeypatch, capsys, arguments, message
):
    monkeypatch.setattr(embedded_target, "load_target", None)
    tiny_drafter(byte_target()).save_pretrained(tmp_path / "drafter")
    arguments = [argument.replace("DRAFTER", str(tmp_path / "drafter")) for argument in arguments]
    assert run(tmp_path / "out", prompt_files, *arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("--seed", 6), "seed: 0 there, 6 now"), (("--target", "org/other"), "target: 'org/one' there, 'org/other' now")],
)
def test_a_place_with_others_is_refused_before_the_target_is_loaded(
    tmp_path, prompt_files, monkeypatch, capsys, arguments, message
):
    assert run(tmp_path / "out", prompt_files, "--limit", 2) == 0
    path = tmp_path / "out" / "trajectories.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "target": "org/one"}))
    monkeypatch.setattr(embedded_target, "load_target", None)
    assert run(tmp_path / "out", prompt_files, "--limit", 2, *arguments) == 2
    assert message in capsys.readouterr().err


def test_limit_domain_and_sampling(tmp_path, prompt_files):
    assert run(tmp_path / "out", prompt_files, "--limit", 6, "--domain", "all", "--temperature", 0.7, "--seed", 5) == 0
    settings = read_settings(tmp_path / "out")
    assert settings["temperature"] == 0.7 and settings["seed"] == 5 and settings["teacher_top_k"] == 16
    dataset = TrajectoryDataset(tmp_path / "out")
    assert len(dataset) == 6 and dataset.domains == ["all"]


def test_datasets_beside_files_and_a_drafter(tmp_path, prompt_files, capsys):
    datasets.Dataset.from_dict({"asked": [f"Why {i}?" for i in range(4)] + [""]}).save_to_disk(tmp_path / "why")
    tiny_drafter(byte_target()).save_pretrained(tmp_path / "drafter")
    arguments = ("--dataset", tmp_path / "why", "--column", "asked", "--domain", "a", "--domain", "b", "--domain", "c")
    assert run(tmp_path / "plain", prompt_files, *arguments) == 0
    shown = capsys.readouterr().out
    assert "without a prompt: 1 records" in shown and "tau" not in shown
    drafting = ("--drafter", tmp_path / "drafter", "--length-policy", "fixed")
    assert run(tmp_path / "drafted", prompt_files, *arguments, *drafting) == 0
    shown = capsys.readouterr().out
    assert "drafts accepted" in shown and "tau" in shown
    plain, drafted = (TrajectoryDataset(tmp_path / name) for name in ("plain", "drafted"))
    assert plain.domains == ["a", "b", "c"] and len(plain) == 8 + 4 + 4
    for row in range(len(plain)):
        assert plain.response_ids(row).tolist() == drafted.response_ids(row).tolist()
    provenance = read_settings(tmp_path / "plain")["provenance"]
    assert provenance == {"files": ["math.jsonl", "code.json"], "datasets": []}


def test_drafts_may_round_and_the_target_may_not(tmp_path, prompt_files, monkeypatch):
    tiny_drafter(byte_target()).save_pretrained(tmp_path / "drafter")
    models, make = [], command._drafted_decoder
    monkeypatch.setattr(command, "_drafted_decoder", lambda *args: models.extend(args[:2]) or make(*args))
    assert run(tmp_path / "out", prompt_files, "--drafter", tmp_path / "drafter", "--dtype", "float32") == 0
    assert [rounding_allowed(model) for model in models] == [{False}, {True}]


def test_a_full_disk_costs_no_batch_that_was_written(tmp_path, prompt_files, capsys):
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert run(whole, prompt_files) == 0
    with full_after(trajectories, "_write_shard", 2, room_bytes=1_000):
        assert run(out, prompt_files) == 2
    error = capsys.readouterr().err
    assert "2 of 3 batches are there: repeat to go on" in error and "Make room" in error
    assert not list(out.glob("*.partial"))
    assert run(out, prompt_files) == 0
    assert "8 trajectories were there from an earlier run" in capsys.readouterr().out
    for path in whole.glob("*.parquet"):
        assert path.read_bytes() == (out / path.name).read_bytes()


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_read(tmp_path, prompt_files, capsys):
    assert run(prompt_files[0], prompt_files) == 2
    assert "nothing was done yet" in capsys.readouterr().err


def test_files_are_spread_evenly():
    assert interleave([["a", "b", "c", "d"], ["x", "y"]]) == ["a", "x", "b", "c", "y", "d"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--domain", "a", "--domain", "b", "--domain", "c"], "--domain"),
        (["--max-prompt-tokens", "2"], "--max-prompt-tokens"),
        (["--features", "--target-layer-ids", "one"], "--target-layer-ids"),
        (["--length-policy", "fixed"], "--drafter"),
        (["--column", "a"], "--column"),
        (["--top-p", "0.5"], "top_p"),
        (["--dataset", "nowhere/at/all"], "cannot be read"),
    ],
)
def test_wrong_usage_is_one_line(tmp_path, prompt_files, capsys, arguments, message):
    assert run(tmp_path / "out", prompt_files, *arguments) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_layer_ids():
    assert parse_layer_ids("1, 8,14") == [1, 8, 14] and parse_layer_ids(None) is None
    with pytest.raises(InvalidInputError):
        parse_layer_ids("1;2")


def test_help(capsys):
    assert main(["trajectories", "--help"]) == 0
    shown = capsys.readouterr().out
    assert all(option in shown for option in ("--prompts", "--dataset", "--drafter", "--top-p"))
    assert run("unused", []) == 2
    assert "--dataset" in capsys.readouterr().err
