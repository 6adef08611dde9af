from __future__ import annotations

import json
import sys

import pytest
from full_disk import full_after
from stand_ins import byte_target, byte_tokenizer
from tiny_models import tiny_drafter

from adaflash_hf import embedded_target
from adaflash_hf.cli import main
from adaflash_hf.commands import bench as bench_command
from adaflash_hf.commands import loading
from adaflash_hf.errors import InvalidInputError, UnsupportedGenerationError
from adaflash_hf.evaluation import bench as measuring
from adaflash_hf.evaluation.bench_methods import BenchModels, EngineMethod


LOAD = bench_command._load


@pytest.fixture(autouse=True)
def tiny_targets(monkeypatch):
    target = byte_target()
    models = BenchModels(target, tiny_drafter(target), None, None, 0)
    monkeypatch.setattr(bench_command, "_load", lambda *args: (models, byte_tokenizer(), {}))


def run(out, *extra):
    common = ["--method", "plain,dflash", "--requests", 2, "--repeats", 1, "--max-new-tokens", 8, "--no-plots"]
    return main([str(argument) for argument in ("bench", "--out", out, *common, *extra)])


def test_a_full_disk_costs_no_measurement(tmp_path, capsys):
    with full_after(measuring, "_run_cell", 2, room_bytes=1_000):
        assert run(tmp_path / "bench", "--concurrency", "1,2") == 2
    shown = capsys.readouterr()
    assert "Make room" in shown.err and "Traceback" not in shown.err
    assert [line.split()[2] for line in shown.out.splitlines() if "dflash" in line] == ["1", "2"]
    kept = json.loads((tmp_path / "bench.json").read_text())["results"]
    assert {row["concurrency"] for row in kept} == {1}


def test_without_matplotlib_there_are_no_pictures(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert run(tmp_path / "bench", "--concurrency", 1, "--plots") == 0
    first, *rest = capsys.readouterr().err.splitlines()
    assert first.startswith("Warning: there will be no pictures.") and "'adaflash-hf[bench]'" in first
    assert not any("pictures" in line for line in rest)
    assert {path.name for path in tmp_path.iterdir()} == {"bench.json", "bench.md"}


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench_command, "_load", None)
    (tmp_path / "file").touch()
    assert run(tmp_path / "file" / "bench", "--concurrency", 1) == 2
    assert "nothing was done yet" in capsys.readouterr().err


def test_prompts_that_are_used_more_than_once_are_told_before_models_are_loaded(tmp_path, capsys, monkeypatch):
    def load(*args):
        raise InvalidInputError("loading begins")

    monkeypatch.setattr(bench_command, "_load", load)
    for name, count in (("few", 6), ("enough", 8)):
        lines = [json.dumps({"prompt": f"{i}?"}) for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    workloads = ["--workload", tmp_path / "few.jsonl", "--workload", tmp_path / "enough.jsonl"]
    assert run(tmp_path / "bench", *workloads, "--requests", 8, "--concurrency", "1,2") == 2
    told, error = capsys.readouterr().err.splitlines()
    assert told == "few: 6 prompts, 8 requests: prompts are used more than once."
    assert "loading begins" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--concurrency", 4], "(--requests) is 2, but `concurrencies` (--concurrency) goes up to 4"),
        (["--concurrency", 0], "(--concurrency) is [0]"),
        (["--concurrency", "1,1"], "(--concurrency) [1, 1] names one twice"),
    ],
)
def test_errors_name_options(tmp_path, capsys, arguments, message):
    assert run(tmp_path / "bench", *arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "adaflash"], "`method` is 'adaflash', but the drafter has no length head"),
        (["--method", "osd"], "pass --osd-drafter"),
        (["--method", "assistant"], "pass --assistant"),
        (["--method", "transformers_mtp"], "leave transformers_mtp out"),
        (["--method", "dflash:x"], "'x' is not a number"),
        (["--method", "dflash:99"], "`method` is 'dflash:99', but the drafter's blocks have 4 rows to verify"),
        (["--method", "osd:9", "--osd-drafter", "DRAFTER"], "`method` is 'osd:9', but the drafter's blocks have 4"),
        (["--method", "prompt_lookup:0"], "1 token or more"),
        (["--temperature", "inf"], "`temperature` is inf"),
        (["--workload", "gsm8k,gsm8k"], "`--workload` names two that would both be 'gsm8k'"),
        (["--drafter", "no/such/drafter"], "`--drafter` is 'no/such/drafter' and cannot be loaded"),
        (["--osd-drafter", "no/such/drafter"], "`--osd-drafter` is 'no/such/drafter' and cannot be loaded"),
        (["--confidence-head", "no/such/head"], "`--confidence-head` is 'no/such/head' and cannot be loaded"),
        (["--assistant", "no/such/model"], "`--assistant` is 'no/such/model' and cannot be loaded"),
    ],
)
def test_what_a_method_lacks_is_told_before_models_are_loaded(tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.setattr(bench_command, "_load", LOAD)
    for module in (embedded_target, loading):
        monkeypatch.setattr(module, "load_target", None)
    tiny_drafter(byte_target()).save_pretrained(tmp_path / "drafter")
    common = ["--concurrency", 1, "--drafter", tmp_path / "drafter"]
    arguments = [word.replace("DRAFTER", str(tmp_path / "drafter")) for word in arguments]
    assert run(tmp_path / "bench", *common, *arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("suffix", [".json", ".md"])
def test_a_directory_in_the_place_of_results_is_told_before_models_are_loaded(tmp_path, capsys, monkeypatch, suffix):
    monkeypatch.setattr(bench_command, "_load", None)
    (tmp_path / f"bench{suffix}").mkdir()
    assert run(tmp_path / "bench", "--concurrency", 1) == 2
    assert f"bench{suffix}', which is a directory" in capsys.readouterr().err


def test_what_has_no_room_in_the_context_is_refused_before_anything_is_measured(tmp_path, capsys):
    lines = [json.dumps({"prompt": "short"}), json.dumps({"prompt": "long " * 500})]
    (tmp_path / "own.jsonl").write_text("\n".join(lines))
    assert (
        run(tmp_path / "bench", "--concurrency", 1, "--workload", "gsm8k", "--workload", tmp_path / "own.jsonl") == 2
    )
    error = capsys.readouterr().err
    assert "A prompt of own has 25" in error and "(--max-new-tokens) is 8, but the target's context ends at" in error
    assert "warming up" not in error


def test_results_of_finished_workloads_are_named_where_a_later_one_fails(tmp_path, capsys, monkeypatch):
    real = measuring._run_cell

    def interrupted(models, methods, workload, *args):
        if workload == "vicuna":
            raise KeyboardInterrupt
        return real(models, methods, workload, *args)

    monkeypatch.setattr(measuring, "_run_cell", interrupted)
    assert run(tmp_path / "bench", "--concurrency", 1, "--workload", "gsm8k,vicuna") == 130
    error = capsys.readouterr().err
    assert (
        f"are in {tmp_path / 'bench'}.json and {tmp_path / 'bench'}.md." in error
        and "Results so far (2 rows)" in error
    )


def test_a_target_that_the_engine_refuses(tmp_path, capsys, monkeypatch):
    def refuse(*args):
        raise UnsupportedGenerationError("Use `generate()` with this target.")

    monkeypatch.setattr(EngineMethod, "prepare", refuse)
    assert run(tmp_path / "bench", "--concurrency", 1) == 2
    assert "with this target. For a benchmark of it pass --via generate." in capsys.readouterr().err
    assert run(tmp_path / "bench", "--concurrency", 1, "--via", "generate") == 0


def test_a_draft_proposal_has_no_effect_on_greedy_decoding(tmp_path, capsys):
    arguments = ["--concurrency", 1, "--draft-proposal", "sample"]
    assert run(tmp_path / "greedy", *arguments) == 0
    warning = "Warning: `--draft-proposal` is 'sample', but decoding is greedy; it has no effect."
    assert warning in capsys.readouterr().err.splitlines()
    assert run(tmp_path / "sampled", *arguments, "--temperature", 0.5) == 0
    assert warning not in capsys.readouterr().err


def test_the_options_say_what_is_taken(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert run(tmp_path / "bench", "--max-new-tokens", measuring._LEAST_NEW_TOKENS - 1) == 2
    assert f"greater than or equal to {measuring._LEAST_NEW_TOKENS} " in capsys.readouterr().err
    assert main(["bench", "--help"]) == 0
    assert f"twice the concurrency, at least {measuring._LEAST_REQUESTS}." in " ".join(capsys.readouterr().out.split())
