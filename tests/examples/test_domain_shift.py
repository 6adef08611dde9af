"""The example of a domain shift: one command from prompt files to tables and curves, and again from answers."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from published_drafters import adapted_drafter
from stand_ins import SPECIAL_TOKENS, byte_tokenizer
from tiny_models import tiny_target

from adaflash_hf import cli
from adaflash_hf.commands import shift_run
from adaflash_hf.commands.loading import LoadedModels


EXAMPLE = Path(__file__).parents[2] / "examples" / "domain_shift.py"
SMALL = [
    "--rounds-per-phase", "1", "--trajectories-per-round", "2", "--held-out", "2", "--max-new-tokens", "12",
    "--epochs", "1", "--anchors", "4", "--reference-epochs", "1", "--seeds", "0", "--phases", "code,maths",
]  # fmt: skip


@pytest.fixture
def example(monkeypatch):
    spec = importlib.util.spec_from_file_location("domain_shift_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    target = tiny_target("llama", vocab_size=len(SPECIAL_TOKENS) + 256)
    drafter = adapted_drafter(vocab_size=target.config.vocab_size)
    models = LoadedModels(target, byte_tokenizer(), drafter)
    monkeypatch.setattr(shift_run, "load_models", lambda *a: models)
    monkeypatch.setattr(shift_run, "load_drafter", lambda *a: drafter)
    monkeypatch.setattr(shift_run, "check_checkpoint", lambda *a, **k: drafter.config)
    monkeypatch.setenv("COLUMNS", "200")
    return module


@pytest.fixture
def data(tmp_path):
    directory = tmp_path / "data"
    directory.mkdir()
    lines = [json.dumps({"question": f"{i} + 1?"}) for i in range(9)]
    (directory / "gsm8k_train.jsonl").write_text("\n".join([*lines, lines[0]]), encoding="utf-8")
    (directory / "codealpaca.json").write_text(json.dumps([{"text": f"f{i}"} for i in range(9)]), encoding="utf-8")
    return directory


def test_from_prompts_to_tables_and_curves(example, data, tmp_path, capsys):
    out = tmp_path / "out" / "online"
    arguments = ["--data", str(data), "--out", str(out.parent), "--methods", "adaflash", *SMALL]
    assert example.main(arguments) == 0
    shown = capsys.readouterr().out
    assert "trained on code: held-out tau" in shown and "| 1: code | adaflash |" in shown
    results = json.loads((out / "results.json").read_text())
    assert [run["method"] for run in results["runs"]] == ["static", "adaflash"]
    assert [entry["domain"] for entry in results["runs"][1]["rounds"]] == ["maths", "code", "maths"]
    assert all(entry["served"]["different_responses"] == 0 for run in results["runs"] for entry in run["rounds"])
    assert results["config"]["is_live"] and results["environment"]["torch"] == torch.__version__
    assert str(tmp_path) not in json.dumps(results["config"])
    assert (out / "results.md").read_text().startswith("# online: Ways of adapting a drafter")
    assert len(list(out.glob("results-*.png"))) == 3
    # The same again finds all, and answers that are there may be replayed.
    example.main(arguments)
    assert "static, seed 0: found" in capsys.readouterr().out
    replay = ["--trajectories", str(out / "trajectories"), "--replay", "--out", str(tmp_path / "replay"), "--no-plots"]
    example.main([*replay, "--methods", "static", "--reference", "code=any", *SMALL])
    replayed = json.loads((tmp_path / "replay" / "online" / "results.json").read_text())
    for live, other in zip(results["runs"][0]["rounds"], replayed["runs"][0]["rounds"], strict=True):
        assert live["served"]["rounds"] == other["served"]["rounds"]
        assert live["held_out"] == other["held_out"]
    code = replayed["runs"][0]["phases"][0]
    assert code["reference"] == code["start"] and code["recovered"] is None


def test_what_is_missing_is_said_before_anything_is_answered(example, data, tmp_path, capsys):
    def run(*arguments):
        assert example.main([*SMALL, "--out", str(tmp_path / "out"), *arguments]) == 2
        return capsys.readouterr().err

    assert "No prompts of 'maths': None is not a file" in run()
    message = run("--data", str(data), "--phases", "chat")
    assert "No prompts of 'chat'" in message and "alpaca_seed_tasks.jsonl is not a file" in message
    assert "`--prompts` is 'code'; give it as DOMAIN=VALUE" in run("--data", str(data), "--prompts", "code")
    assert "without `--replay`" in run("--data", str(data), "--stored-teacher")
    assert "choose from static, osd" in run("--data", str(data), "--methods", "magic")
    message = run("--data", str(data), "--rounds-per-phase", "5")
    assert "9 different prompts of 'maths' are there, 14 are needed" in message
    assert not list((tmp_path / "out").rglob("*.*"))


def test_a_drafter_of_each_domain_is_judged_on_all(example, data, tmp_path, capsys):
    budget = ["--rounds-per-phase", "1", "--trajectories-per-round", "3", "--held-out", "2", "--anchors", "4"]
    budget += [
        "--max-new-tokens",
        "12",
        "--reference-epochs",
        "2",
        "--phases",
        "code,maths",
        "--learning-rate",
        "0.01",
    ]
    budget += ["--stored-teacher"]
    assert cli.main(["evaluate", "cross-domain", "--data", str(data), "--out", str(tmp_path), *budget]) == 0
    results = json.loads((tmp_path / "cross-domain" / "results.json").read_text())
    taus = results["acceptance_length"]
    assert set(taus) == {"before", "code", "maths"} and all(set(row) == {"maths", "code"} for row in taus.values())
    assert results["config"]["reference_epochs"] == 2 and results["config"]["teacher_top_k"] == 16
    page = (tmp_path / "cross-domain" / "results.md").read_text()
    change = taus["code"]["maths"] / taus["before"]["maths"] - 1
    assert f"| code | {change:+.1%} |" in page
    assert (tmp_path / "cross-domain" / "results-map.png").is_file()


def test_help_names_every_method(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    shown = subprocess.run([sys.executable, str(EXAMPLE), "--help"], capture_output=True, text=True, check=True).stdout
    assert "adaflash-truncated" in shown and "--replay" in shown
