from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny_drafter

from adaflash_hf.card_measurements import read_bench_file
from adaflash_hf.cli import main
from adaflash_hf.errors import InvalidInputError
from adaflash_hf.evaluation.bench import BenchReport, BenchSettings
from adaflash_hf.evaluation.bench_results import MethodRun, summarise
from adaflash_hf.generation.statistics import GenerationStats


CONFIG = tiny_drafter().config
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
    "block_size": CONFIG.block_size,
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


def write(path: Path, data: Any) -> Path:
    path.write_text(json.dumps(data))
    return path


def test_tables_and_results_are_what_was_measured(tmp_path: Path) -> None:
    bench = read_bench_file(write(tmp_path / "bench.json", bench_data()), CONFIG)
    [(title, table)] = bench.tables()
    assert title == "Speed on gsm8k, Some CPU, 2 threads, float32"
    assert "| plain | 8 | 10.0 | 1.00x | - | - | - |" in table
    assert "| adaflash | 8 | 25.0 | 2.50x | 2.50 | 4.00 | - |" in table
    assert "torch 2.13.0, transformers 5.24.0, adaflash-hf 0.1.0, 2026-11-29" in table
    measured = {result.metric_type: result.metric_value for result in bench.results()}
    assert measured == {"speedup": 2.5, "acceptance_length": 2.5}
    assert {result.dataset_type for result in bench.results()} == {"openai/gsm8k"}


def test_the_command_is_one_that_the_program_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = read_bench_file(write(tmp_path / "bench.json", bench_data()), CONFIG).command()
    assert "--drafter my-drafter" in command and "/home/someone" not in command
    assert main([*command.split()[1:], "--help"]) == 0
    capsys.readouterr()


def test_tokens_that_differ_are_counted(tmp_path: Path) -> None:
    data = bench_data()
    data["results"][1] |= {"identical": False, "identical_requests": 15}
    [(_, table)] = read_bench_file(write(tmp_path / "bench.json", data), CONFIG).tables()
    assert "| 15 of 16 |" in table


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.pop("results"), "not a result file of `adaflash bench`"),
        (lambda data: data.update(results=[]), "holds no results"),
        (lambda data: data["results"][0].pop("workload"), "holds no results"),
        (lambda data: data["environment"].update(block_size=16), "of block size 16, but this drafter's is 4"),
        (lambda data: data["environment"].pop("block_size"), "of block size None"),
    ],
)
def test_other_files_are_refused(change: Any, message: str, tmp_path: Path) -> None:
    data = bench_data()
    change(data)
    with pytest.raises(InvalidInputError, match=message):
        read_bench_file(write(tmp_path / "bench.json", data), CONFIG)


def test_missing_and_broken_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{")
    for name in ("nothing.json", "broken.json"):
        with pytest.raises(InvalidInputError, match=name):
            read_bench_file(tmp_path / name, CONFIG)
