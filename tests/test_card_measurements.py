from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from adaflash_hf.card_measurements import ResultFile, read_result_file
from adaflash_hf.cli import main
from adaflash_hf.errors import InvalidInputError
from adaflash_hf.evaluation.bench import BenchReport, BenchSettings
from adaflash_hf.evaluation.bench_results import MethodRun, summarise
from adaflash_hf.generation.statistics import GenerationStats


IDENTITY = {"block_size": 4, "drafter_parameters": 12_345, "drafter_sha256": "ab" * 32}
ENVIRONMENT = {
    "date": "2026-11-29T20:00:00+00:00",
    "processor": "Some CPU",
    "device": "cpu",
    "threads": 2,
    "dtype": "float32",
    "torch": "2.13.0",
    "transformers": "5.24.0",
    "adaflash_hf": "0.1.0",
    "target": "org/target",
    "drafter": "/home/someone/runs/my-drafter",
    "block_size": 4,
}


def bench_data() -> dict[str, Any]:
    """As `adaflash bench` writes it: two methods, once each, on one workload."""
    stats = GenerationStats(rounds=10, drafted_tokens=30, accepted_tokens=15, committed_tokens=25)
    plain = [MethodRun(token_ids=None, generated_tokens=100, seconds=10.0)]
    drafted = [MethodRun(token_ids=None, generated_tokens=100, seconds=4.0, stats=stats)]
    rows = [
        summarise("plain", "gsm8k", 8, plain, 16, plain),
        summarise("adaflash", "gsm8k", 8, drafted, 16, plain),
    ]
    settings = {**vars(BenchSettings(methods=("plain", "adaflash"), concurrencies=(8,))), "workloads": ["gsm8k"]}
    return json.loads(json.dumps(BenchReport(ENVIRONMENT, settings, rows).as_dict()))


def read(directory: Path, data: Any) -> ResultFile:
    path = directory / "bench.json"
    path.write_text(json.dumps(data))
    return read_result_file(path, IDENTITY, "org/drafter")


def speed_data() -> dict[str, Any]:
    """As `adaflash evaluate speed` writes it."""
    return {
        "environment": {**ENVIRONMENT, "cpu_capability": "AVX512"},
        "settings": {"prompts": "gsm8k", "limit": 5, "max_new_tokens": 64, "length_policy": "cost_aware"},
        "prompts": 5,
        "plain_tok_per_s": 20.0,
        "prepacked_plain_tok_per_s": 30.0,
        "adaflash_tok_per_s": 50.0,
        "speedup_median": 2.5,
        "speedup_quartiles": [2.0, 3.0],
        "speedup_over_prepacked_median": 1.5,
        "acceptance_length": 2.25,
        "per_prompt": [{"first_difference": None}] * 5,
    }


def test_tables_and_results_are_what_was_measured(tmp_path: Path) -> None:
    bench = read(tmp_path, bench_data())
    title, table = bench.table
    assert title == "Speed and tau on gsm8k, Some CPU, 2 threads, float32"
    assert "| plain | 8 | 10.0 | 1.00x | - | - | - |" in table
    assert "| adaflash | 8 | 25.0 | 2.50x | 2.50 | 4.00 | - |" in table
    assert "Medians of 3 runs, answers of up to 128 tokens" in table
    assert "torch 2.13.0, transformers 5.24.0, adaflash-hf 0.1.0, 2026-11-29" in table
    assert "`adaflash` verifies what the length head keeps" in table and "`dflash`" not in table
    measured = {result.metric_type: result.metric_value for result in bench.results()}
    assert measured == {"speedup": 2.5, "acceptance_length": 2.5}
    assert {result.dataset_type for result in bench.results()} == {"openai/gsm8k"}
    assert {result.dataset_config for result in bench.results()} == {
        "adaflash, 8 of 16 requests at once, median of 3 runs, Some CPU, 2 threads, float32"
    }


def test_several_workloads_share_a_table(tmp_path: Path) -> None:
    data = bench_data()
    data["results"] += [{**row, "workload": "vicuna"} for row in data["results"]]
    data["settings"]["repeats"] = 1
    title, table = read(tmp_path, data).table
    assert title.startswith("Speed and tau on gsm8k, vicuna, ") and "Measured once, " in table
    assert "| gsm8k | adaflash | 8 |" in table and "| vicuna | adaflash | 8 |" in table


def test_ways_of_decoding_without_the_drafter_are_not_its_results(tmp_path: Path) -> None:
    data = bench_data()
    data["results"] += [{**data["results"][1], "method": method} for method in ("transformers", "osd:4", "dflash:2")]
    bench = read(tmp_path, data)
    assert "| transformers | 8 | 25.0 |" in bench.table[1]
    assert [result.dataset_config.split(",")[0] for result in bench.results()] == ["adaflash"] * 2 + ["dflash:2"] * 2


def test_the_headline_is_a_table_and_two_results(tmp_path: Path) -> None:
    speed = read(tmp_path, speed_data())
    title, table = speed.table
    assert title == "`generate()` on gsm8k, one prompt at a time, Some CPU, 2 threads, float32"
    assert "| float32, 2 AVX512 threads | 20.0 tok/s | 30.0 tok/s | 50.0 tok/s | 2.50x | 2.25 |" in table
    assert "half of the speedups lie between 2.00x and 3.00x" in table and "2026-11-29" in table
    assert {result.metric_type: result.metric_value for result in speed.results()} == {
        "speedup": 2.5,
        "acceptance_length": 2.25,
    }


@pytest.mark.parametrize("data", [bench_data(), speed_data()], ids=["bench", "speed"])
def test_the_command_is_one_that_the_program_takes(
    data: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = read(tmp_path, data).command
    assert "--drafter org/drafter" in command and "/home/someone" not in command and "temperature" not in command
    assert main([*command.split()[1:], "--help"]) == 0
    capsys.readouterr()


def test_the_command_of_sampled_answers_says_how(tmp_path: Path) -> None:
    data = bench_data()
    data["settings"] |= {"temperature": 1.0, "draft_proposal": "sample"}
    assert "--temperature 1.0 --draft-proposal sample" in read(tmp_path, data).command


def test_tokens_that_differ_are_counted(tmp_path: Path) -> None:
    data = bench_data()
    data["results"][1] |= {"identical": False, "identical_requests": 13, "near_tie_requests": 3}
    assert "| 13 of 16, 3 near-ties |" in read(tmp_path, data).table[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.pop("results"), "not a result file of `adaflash bench`"),
        (lambda data: data.update(results=[]), "holds no results"),
        (lambda data: data["results"][0].pop("workload"), "not a result file"),
        (lambda data: data["settings"].update(sweep={"64 tokens": {}, "128 tokens": {}}), "(64 tokens, 128 tokens)"),
        (lambda data: data["environment"].update(block_size=16), "whose `block_size` is 16, but this drafter's is 4"),
        (lambda data: data["environment"].pop("block_size"), "whose `block_size` is None"),
        (lambda data: data["environment"].update(drafter_parameters=12_346), "whose `drafter_parameters` is 12346"),
        (lambda data: data["environment"].update(drafter_sha256="cd" * 32), "whose `drafter_sha256` is cdcd"),
    ],
)
def test_other_files_are_refused(change: Any, message: str, tmp_path: Path) -> None:
    data = bench_data()
    change(data)
    with pytest.raises(InvalidInputError, match=re.escape(message)):
        read(tmp_path, data)


def test_missing_and_broken_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{")
    for name in ("nothing.json", "broken.json"):
        with pytest.raises(InvalidInputError, match=name):
            read_result_file(tmp_path / name, IDENTITY, "org/drafter")
