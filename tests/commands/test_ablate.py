from __future__ import annotations

import json
import shutil

import pytest
from stand_ins import SPECIAL_TOKENS, byte_tokenizer
from tiny_models import tiny_drafter, tiny_target
from tiny_trajectories import make_trajectories

from adaflash_hf import embedded_target
from adaflash_hf.cli import main
from adaflash_hf.embedded_target import LoadedTarget
from adaflash_hf.training.initialization import attach_length_head, new_confidence_head


def make_target():
    return tiny_target("llama", vocab_size=len(SPECIAL_TOKENS) + 256)


@pytest.fixture(autouse=True)
def tiny_targets(monkeypatch):
    monkeypatch.setattr(embedded_target, "load_target", lambda *a, **k: LoadedTarget(make_target(), byte_tokenizer()))


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("trajectories")
    return make_trajectories(path, make_target(), teacher_top_k=4, capture_layer_ids=(0, 2))


@pytest.fixture(scope="module")
def drafter(tmp_path_factory):
    path = tmp_path_factory.mktemp("drafter")
    model = tiny_drafter(make_target())
    attach_length_head(model)
    model.save_pretrained(path / "drafter")
    attach_length_head(model, "mean_last_residual").save_pretrained(path / "other_head")
    new_confidence_head(model).save_pretrained(path / "confidence")
    tiny_drafter(make_target(), target_layer_ids=[1, 2]).save_pretrained(path / "other_layers")
    return path


def run(*arguments):
    return main(["ablate", *map(str, arguments)])


def test_objectives_go_on_where_they_were(directory, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out[b]"
    common = ("objectives", "--trajectories", directory, "--out", out, "--from-scratch", "--layers", 1)
    common = (*common, "--block-size", 4, "--compare", "clip", "--steps", 2, "--anchors", 4, "--held-out", 3)
    assert run(*common, "--seed", 5) == 2
    assert "--features compute" in capsys.readouterr().err  # stored are those of other layers
    common = (*common[:-2], "--features", "compute", *common[-2:])
    assert run(*common, "--seed", 5) == 0
    assert "3 of 3" in capsys.readouterr().out
    assert run(*common, "--seed", 5, "--seed", 6) == 0
    shown = capsys.readouterr().out
    assert shown.count("(kept)") == 3 and "6 of 6" in shown and "each entry (paper)" in shown
    assert f"The results are in {out / 'results'}.md" in shown
    results = json.loads((out / "results.json").read_text())
    assert results["seeds"] == [5, 6] and len(results["runs"]) == 6 and results["common"]["steps"] == 2
    assert "its target's last layers (1 layers, block 4" in (out / "results.md").read_text()
    assert json.loads((out / "run.json").read_text())["settings"]["learning_rate"] == 1e-3
    monkeypatch.setattr(embedded_target, "load_target", None)
    assert run(*common[:-2], "--held-out", 4) == 2
    assert "held_out_trajectories" in capsys.readouterr().err


def test_heads_are_compared_on_the_drafter_that_runs_start_from(directory, drafter, tmp_path, capsys):
    arguments = ("--compare", "heads", "--seed", 0, "--head-steps", 1, "--anchors", 4, "--held-out", 3)
    start = ("--init", drafter / "drafter")
    assert run("objectives", "--trajectories", directory, "--out", tmp_path, *start, *arguments) == 0
    assert "| truncated labels, authors' shape |" in (tmp_path / "results.md").read_text()
    assert "on drafter, which stays as it is" in capsys.readouterr().out


def test_length_heads_side_by_side(directory, drafter, tmp_path, capsys):
    heads = ("--head", f"other={drafter / 'other_head'}", "--confidence-head", f"DSpark={drafter / 'confidence'}")
    arguments = ("--drafter", drafter / "drafter", "--out", tmp_path, *heads, "--held-out", 3, "--scale", 1.3)
    assert run("length-head", "--trajectories", directory, *arguments, "--threshold", 0.5) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert set(results["estimates"]) == {"constant", "length head", "other", "DSpark"}
    assert [choice["setting"] for choice in results["choices"]["DSpark, threshold"]] == ["0.5"]
    assert "| length head, scale 1.3 |" in capsys.readouterr().out
    assert results["held_out"] == 3


@pytest.mark.parametrize("command", [("objectives", "--from-scratch"), ("length-head", "--drafter", "org/x")])
def test_a_place_that_cannot_be_written_is_refused_before_the_target_is_loaded(command, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(embedded_target, "load_target", None)
    (tmp_path / "file").touch()
    assert run(*command, "--trajectories", tmp_path, "--out", tmp_path / "file") == 2
    assert "nothing was done yet" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["objectives"], "--from-scratch"),
        (["objectives", "--init", "x", "--from-scratch"], "--from-scratch"),
        (["objectives", "--from-scratch", "--compare", "heads"], "--head-drafter"),
        (["objectives", "--from-scratch", "--held-out", "0"], "--held-out"),
        (["objectives", "--from-scratch", "--held-out", "12"], "(--held-out) is 12, but there are 12 trajectories"),
        (["objectives", "--from-scratch", "--head-learning-rate", "0"], "`head_learning_rate` is 0"),
        (["objectives", "--init", "DRAFTER", "--layers", "2"], "num_hidden_layers"),
        (["objectives", "--init", "DRAFTER/../other_layers"], "holds features of the layers [0, 2]"),
        (["objectives", "--init", "no/such/drafter"], "`--init` is 'no/such/drafter' and cannot be loaded (there is"),
        (["objectives", "--from-scratch", "--head-drafter", "no/such/one"], "`--head-drafter` is 'no/such/one' and"),
        (["length-head", "--drafter", "DRAFTER", "--held-out", "12"], "(--held-out) is 12, but there are 12"),
        (["length-head", "--drafter", "DRAFTER/../confidence"], "confidence"),
        (["length-head", "--drafter", "DRAFTER", "--head", "nameless"], "NAME=DIRECTORY"),
        (["length-head", "--drafter", "DRAFTER", "--head", "a=no/such/head"], "`--head` is 'no/such/head' and cannot"),
        (["length-head", "--drafter", "DRAFTER", "--confidence-head", "a=no/such/head"], "`--confidence-head` is 'no"),
    ],
)
def test_wrong_usage_is_one_line_before_the_target_is_loaded(
    directory, drafter, tmp_path, capsys, monkeypatch, arguments, message
):
    monkeypatch.setattr(embedded_target, "load_target", None)
    arguments = [argument.replace("DRAFTER", str(drafter / "drafter")) for argument in arguments]
    held_out = [] if "--held-out" in arguments else ["--held-out", 3]
    assert run(*arguments, *held_out, "--trajectories", directory, "--out", tmp_path) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def shorter(directory, out, *options):
    """Three runs of two steps."""
    budget = ("--from-scratch", "--layers", 1, "--block-size", 4, "--steps", 2, "--anchors", 4, "--held-out", 3)
    common = ("--trajectories", directory, "--out", out, "--compare", "clip", "--seed", 0, "--features", "compute")
    return run("objectives", *common, *budget, *options)


def test_runs_of_another_target_or_other_trajectories_are_not_taken_for_these(directory, tmp_path, capsys):
    shutil.copytree(directory, tmp_path / "trajectories")
    directory, out = tmp_path / "trajectories", tmp_path / "out"
    assert shorter(directory, out) == 0
    assert shorter(directory, out, "--target", "org/other") == 2
    assert "`target` 'smollm2-135m', now it is 'org/other'" in capsys.readouterr().err
    # Others in the same place.
    shutil.rmtree(directory)
    make_trajectories(directory, make_target(), teacher_top_k=4, max_new_tokens=9)
    assert shorter(directory, out) == 2
    assert "with `trajectories_sha256` '" in capsys.readouterr().err


def test_runs_that_began_with_other_weights_are_not_taken_for_these(directory, tmp_path, capsys):
    start, out = tmp_path / "drafter", tmp_path / "out"
    options = ("--trajectories", directory, "--out", out, "--init", start, "--compare", "clip", "--seed", 0)
    budget = ("--steps", 2, "--anchors", 4, "--held-out", 3, "--features", "compute")
    tiny_drafter(make_target(), seed=1).save_pretrained(start)
    assert run("objectives", *options, *budget) == 0
    assert str(tmp_path) not in (out / "results.json").read_text()
    tiny_drafter(make_target(), seed=2).save_pretrained(start)
    assert run("objectives", *options, *budget) == 2
    assert "with `start_sha256` '" in capsys.readouterr().err


def test_comparisons_share_what_they_have_in_common(directory, tmp_path, capsys):
    runs = ("--runs", tmp_path / "shared")
    assert shorter(directory, tmp_path / "one", *runs) == 0
    assert "3 of 3" in capsys.readouterr().out
    assert shorter(directory, tmp_path / "two", "--compare", "position_decay", *runs) == 0
    shown = capsys.readouterr().out
    assert shown.count("(kept)") == 3 and "each entry (paper)" in shown and "no decay" in shown
    assert not (tmp_path / "one" / "runs").exists() and (tmp_path / "two" / "results.json").is_file()


def test_a_damaged_run_is_named(directory, tmp_path, capsys, monkeypatch):
    assert shorter(directory, tmp_path) == 0
    file = next((tmp_path / "runs").glob("*.json"))
    file.write_text(file.read_text()[:100])
    monkeypatch.setattr(embedded_target, "load_target", None)
    assert shorter(directory, tmp_path) == 2
    error = capsys.readouterr().err
    assert f"'{file}' cannot be read as a finished run" in error and "Remove it" in error


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"vocab_size": 100}, "vocabulary ends at 99"),
        ({"hidden_size": 64}, "width 64 from 2 layers, but the target's hidden size is 64"),
    ],
)
@pytest.mark.parametrize("command", [("objectives", "--from-scratch"), ("length-head", "--drafter", "DRAFTER")])
def test_trajectories_of_another_target_are_refused_before_it_is_loaded(
    directory, tmp_path, capsys, monkeypatch, command, other, message
):
    target = tiny_target("llama", **{"vocab_size": len(SPECIAL_TOKENS) + 256, **other})
    target.save_pretrained(tmp_path / "target")
    tiny_drafter(target, target_layer_ids=[0, 2]).save_pretrained(tmp_path / "drafter")
    monkeypatch.setattr(embedded_target, "load_target", None)
    command = [word.replace("DRAFTER", str(tmp_path / "drafter")) for word in command]
    common = ("--trajectories", directory, "--held-out", 3, "--out", tmp_path / "out")
    assert run(*command, *common, "--target", tmp_path / "target") == 2
    assert message in capsys.readouterr().err


def test_a_start_of_another_target_is_refused_before_it_is_loaded(directory, drafter, tmp_path, capsys, monkeypatch):
    tiny_target("llama", vocab_size=len(SPECIAL_TOKENS) + 256).save_pretrained(tmp_path / "target")
    other = tiny_drafter(tiny_target("llama", vocab_size=len(SPECIAL_TOKENS) + 256, hidden_size=64))
    other.save_pretrained(tmp_path / "drafter")
    monkeypatch.setattr(embedded_target, "load_target", None)
    common = ("objectives", "--trajectories", directory, "--held-out", 3, "--out", tmp_path / "out")
    assert run(*common, "--target", tmp_path / "target", "--init", tmp_path / "drafter") == 2
    assert "hidden_size" in capsys.readouterr().err


@pytest.mark.parametrize("command", [[], ["objectives"], ["length-head"]])
def test_help(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    assert run(*command, "--help") == 0
    shown = capsys.readouterr().out
    assert "Usage" in shown and ("--trajectories" in shown) == bool(command)
