"""`adaflash evaluate` on tiny models: files, tables of each kind, others' figures marked, and what is refused."""

from __future__ import annotations

import json
import sys

import pytest
from full_disk import full_after
from published_drafters import adapted_drafter
from stand_ins import SPECIAL_TOKENS, byte_target, load_byte_target
from tiny_trajectories import make_trajectories

from adaflash_hf import embedded_target
from adaflash_hf.cli import main
from adaflash_hf.commands import evaluate_speed, loading
from adaflash_hf.evaluation.experiments import EXPERIMENTS


@pytest.fixture(autouse=True)
def tiny_targets(monkeypatch):
    load_byte_target(monkeypatch)


@pytest.fixture(scope="module")
def drafter(tmp_path_factory):
    path = tmp_path_factory.mktemp("drafter")
    adapted_drafter(vocab_size=len(SPECIAL_TOKENS) + 256).save_pretrained(path)
    return path


def run(*arguments):
    return main(["evaluate", *map(str, arguments)])


def results(directory, name):
    path = directory / name / "results"
    return json.loads(path.with_suffix(".json").read_text()), path.with_suffix(".md").read_text()


def test_the_list_names_every_experiment_and_workload(capsys):
    assert run("list") == 0
    shown = capsys.readouterr().out
    assert all(f" {name} " in shown for name in EXPERIMENTS)
    for workload in "gsm8k math500 mathqa humaneval mbpp codealpaca opencodeinstruct sharegpt mtbench aime25".split():
        assert f" {workload} " in shown


def test_the_list_is_readable_on_a_narrow_terminal(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    assert run("list") == 0
    shown = capsys.readouterr().out
    assert "…" not in shown and "What does generate() gain on one" in shown


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_help(name, capsys):
    assert run(name, "--help") == 0
    shown = capsys.readouterr().out
    assert "--out" in shown and "--no-plots" in shown and f"evaluate {name}" in shown


def test_speed(drafter, tmp_path, capsys):
    arguments = ("--limit", 2, "--max-new-tokens", 8, "--length-policy", "fixed", "--drafter", drafter)
    assert run("speed", *arguments, "--out", tmp_path) == 0
    data, page = results(tmp_path, "speed")
    assert data["prompts"] == len(data["per_prompt"]) == data["identical"] == 2
    assert data["settings"] == {"prompts": "gsm8k", "limit": 2, "max_new_tokens": 8, "length_policy": "fixed"}
    assert data["environment"]["drafter"] == drafter.name and "prepacked" in data["environment"]
    assert "All answers are those of plain decoding" in page and "DFlash, Qwen3-8B, *theirs*" in page
    assert {path.name for path in (tmp_path / "speed").glob("*.png")} == {
        "results-published.png", "results-speedup.png"
    }  # fmt: skip
    assert str(tmp_path) not in json.dumps(data)


def test_what_was_measured_is_told_where_the_disk_is_full_by_then(drafter, tmp_path, capsys):
    arguments = ("--limit", 1, "--max-new-tokens", 8, "--length-policy", "fixed", "--drafter", drafter, "--no-plots")
    with full_after(evaluate_speed, "run_speed", 1, room_bytes=100):
        assert run("speed", *arguments, "--out", tmp_path) == 2
    shown = capsys.readouterr()
    assert "Make room" in shown.err and "| AdaFlash | speedup |" in shown.out and "tok/s" in shown.out


def test_a_benchmark_with_other_defaults(drafter, tmp_path, capsys):
    assert EXPERIMENTS["gamma"].settings["methods"][2:] == [
        "adaflash:1.0", "adaflash:1.15", "adaflash:1.3", "adaflash:1.6", "adaflash:2.0"
    ]  # fmt: skip
    small = ("--concurrency", 2, "--requests", 2, "--max-new-tokens", 8, "--drafter", drafter, "--no-plots")
    assert run("gamma", "--method", "adaflash:1.0,adaflash:2.0", *small, "--out", tmp_path) == 0
    data, page = results(tmp_path, "gamma")
    assert [row["method"] for row in data["results"]] == ["plain", "adaflash:1.0", "adaflash:2.0"]
    assert {row["repeats"] for row in data["results"]} == {2}
    assert data["published"][0]["measured_here"] is False and "γ = 1.3" in page
    assert page.startswith("# gamma: The scale γ") and not list(tmp_path.rglob("*.png"))


def test_positions_and_the_spread_over_domains(drafter, tmp_path):
    small = ("--requests", 1, "--max-new-tokens", 8, "--drafter", drafter)
    assert run("positions", *small, "--workload", "gsm8k", "--out", tmp_path) == 0
    _, page = results(tmp_path, "positions")
    assert "| gsm8k | dflash | " in page and "draft 3" in page and "0.88 of the first drafts" in page
    one_method = ("--method", "dflash", "--repeats", 1, "--no-plots")
    assert run("domains", *small, *one_method, "--workload", "gsm8k,humaneval", "--out", tmp_path) == 0
    data, page = results(tmp_path, "domains")
    taus = [row["acceptance_length"] for row in data["results"] if row["method"] == "dflash"]
    assert f"| dflash | {sum(taus) / 2:.3f} | {min(taus):.3f} | {max(taus):.3f} |" in page
    assert "| gsm8k |" in page and "6.55" in page


def test_without_matplotlib_there_are_no_pictures(drafter, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    small = ("--requests", 1, "--max-new-tokens", 8, "--drafter", drafter, "--workload", "gsm8k")
    assert run("positions", *small, "--out", tmp_path) == 0
    assert capsys.readouterr().err.count("Warning: there will be no pictures.") == 1
    assert {path.name for path in (tmp_path / "positions").iterdir()} == {"results.json", "results.md"}


def test_one_setting_after_the_other(drafter, tmp_path):
    small = ("--method", "dflash", "--requests", 1, "--repeats", 1, "--workload", "gsm8k", "--max-new-tokens", 8)
    assert run("sampling", *small, "--drafter", drafter, "--out", tmp_path) == 0
    data, page = results(tmp_path, "sampling")
    assert [(row["workload"], row["method"]) for row in data["results"]] == [
        (f"gsm8k, {drafts} drafts at {temperature}", method)
        for temperature in ("0.7", "1")
        for drafts in ("argmax", "sampled")
        for method in ("plain", "dflash")
    ]
    assert {row["identical"] for row in data["results"]} == {None}  # answers drawn at random are not compared
    assert data["settings"]["sweep"]["sampled drafts at 1"]["draft_proposal"] == "sample"
    assert "## gsm8k, argmax drafts at 0.7" in page and "temperature 1, *theirs*" in page
    assert (tmp_path / "sampling" / "results-tau.png").is_file()


@pytest.fixture(scope="module")
def trajectories(tmp_path_factory):
    return make_trajectories(tmp_path_factory.mktemp("trajectories"), byte_target(), teacher_top_k=4)


def test_ablations_start_from_scratch(trajectories, tmp_path):
    sizes = ("--layers", 1, "--block-size", 4, "--steps", 1, "--anchors", 4, "--held-out", 3, "--seed", 0)
    data = ("--trajectories", trajectories, "--out", tmp_path)
    assert run("causal", *data, *sizes) == 0
    found, page = results(tmp_path, "causal")
    assert [row["is_causal"] for row in found["comparisons"]["block"].values()] == [False, True]
    first, second = (run["metrics"]["acceptance_length"] for run in found["runs"])
    assert first >= 1 and second >= 1 and "spread over domains" in page and "both ways (DFlash), ours" in page
    assert (tmp_path / "causal" / "results-block.png").is_file()
    assert run("scratch", *data, *sizes, "--no-plots") == 0
    found, page = results(tmp_path, "scratch")
    losses = [run["metrics"]["hard_loss"] for run in found["runs"]]
    assert len(set(losses)) == 4 and "AdaFlash from scratch, Qwen3-1.7B, *theirs*" in page


def test_heads_are_compared_on_a_trained_drafter(trajectories, drafter, tmp_path):
    budget = ("--head-steps", 1, "--anchors", 4, "--held-out", 3, "--seed", 0, "--head-drafter", drafter)
    assert run("head", "--trajectories", trajectories, "--out", tmp_path, *budget) == 0
    found, page = results(tmp_path, "head")
    assert len(found["runs"]) == 5 and all(run["head"] for run in found["runs"])
    assert "Beside published figures" not in page and (tmp_path / "head" / "results-heads.png").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--reference", "code=no/such/drafter"), "`--reference` is 'no/such/drafter' and cannot be loaded"),
        (("--learning-rate", 0), "`learning_rate` is 0"),
        (("--lora-learning-rate", 0), "`learning_rate` is 0"),
        (("--max-new-tokens", 99), "`max_new_tokens` is 99"),
        ((), "6 different prompts"),
    ],
)
@pytest.mark.parametrize("are_answered", [True, False])
def test_what_a_shift_lacks_is_told_before_the_target_is_loaded(
    trajectories, drafter, tmp_path, capsys, monkeypatch, arguments, message, are_answered
):
    for module in (embedded_target, loading):
        monkeypatch.setattr(module, "load_target", None)
    data = ["--trajectories", trajectories]
    if not are_answered:
        lines = [json.dumps({"prompt": f"{i}?"}) for i in range(6)]
        (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
        data = [word for domain in ("math", "code") for word in ("--prompts", f"{domain}={tmp_path}/prompts.jsonl")]
        message = message if "max" not in message else "6 different prompts"
    common = ("--home", "math", "--phases", "code", "--drafter", drafter, "--max-new-tokens", 10, "--out", tmp_path)
    assert run("online", *data, *common, *arguments) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert message in error and "Traceback" not in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("mtp",), "num_mtp_layers"),
        (("servers",), "`--base-url` is not given"),
        (("sampling", "--workload", "gsm9k"), "neither one of gsm8k"),
    ],
)
def test_wrong_usage_is_one_line(arguments, message, tmp_path, capsys):
    assert run(*arguments, "--out", tmp_path) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
