"""The benchmark of training losses: its parts on tiny sizes, in this process."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch


EXAMPLE = Path(__file__).parents[2] / "examples" / "benchmark_training.py"
SIZES = {
    "vocab_size": 97, "hidden_size": 64, "block_size": 4, "anchors": 5, "logits_memory_bytes": 97 * 24 * 8,
    "dtype": "float32", "device": "cpu", "threads": 1, "layers": 1, "tokens": 20, "steps": 1, "only": "",
}  # fmt: skip


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("benchmark_training", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_objective_is_measured(benchmark, tmp_path):
    sizes = {**SIZES, "others": str(tmp_path)}
    for name in benchmark.OWN_LOSSES:
        memory = benchmark.measure_memory(sizes, name)
        steps = benchmark.measure_throughput(sizes, "adaflash_hf", name)
        assert memory["loss"] > 0 and memory["peak_bytes"] >= 0 and memory["seconds"] > 0
        assert steps["loss"] > 0 and steps["tokens_per_s"] == pytest.approx(20 / steps["step_s"])
        assert steps["blocks_per_s"] == pytest.approx(5 / steps["step_s"])
    sys.path.remove(str(tmp_path))


def test_the_peak_is_above_the_start(benchmark):
    memory = benchmark.MemoryAboveStart(torch.device("cpu"))
    block = torch.ones(50_000_000)  # 200 MB, gone again before the question
    del block
    assert 150e6 < memory.read_bytes() < 400e6


def test_other_projects_are_left_out_where_they_are_not_installed(benchmark, monkeypatch, tmp_path, capsys):
    tasks = []

    def measured(task):
        tasks.append((task["project"], task["name"]))
        return {"loss": 1.0, "step_s": 0.5, "tokens_per_s": 40.0, "peak_bytes": 2e9}

    monkeypatch.setattr(benchmark, "in_a_process", measured)
    arguments = ["throughput", "--out", str(tmp_path / "result"), "--only", "forward KL", "--others", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["benchmark_training.py", *arguments])
    benchmark.main()
    assert tasks == [("adaflash_hf", "forward KL, full teacher")]
    shown = capsys.readouterr().out
    assert "speculators is not in" in shown and "specforge is not in" in shown
    row = "| adaflash_hf: forward KL, full teacher | 40.000 | 0.500 | 2.000 | 1.000 | - |"
    assert row in shown and row in (tmp_path / "result.md").read_text()
    assert json.loads((tmp_path / "result.json").read_text())["sizes"]["vocab_size"] == 151_936


def test_a_loss_that_dies_does_not_end_the_benchmark(benchmark, monkeypatch):
    def run(code, stderr):
        monkeypatch.setattr(
            benchmark.subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, code, "", stderr)
        )
        return benchmark.in_a_process({})

    assert run(-9, "") == {"failed": "killed by signal 9"}
    assert run(1, "Traceback\nRuntimeError: out of memory\n") == {"failed": "RuntimeError: out of memory"}
