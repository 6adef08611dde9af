"""Tables and pictures of results made by hand."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from adaflash_hf import MissingDependencyError
from adaflash_hf.evaluation.bench import BenchReport
from adaflash_hf.evaluation.bench_plots import plot_report
from adaflash_hf.evaluation.bench_report import build_bench_table, report_sections
from adaflash_hf.evaluation.bench_results import Agreement, BenchRow, Latency, MethodRun, summarise
from adaflash_hf.generation.statistics import GenerationStats


def rows() -> list[BenchRow]:
    stats = GenerationStats(
        rounds=10, drafted_tokens=30, accepted_tokens=12, committed_tokens=22, acceptance_by_position=[0.7, 0.5],
        verify_lengths={4: 10}, draft_s=0.25,
    )  # fmt: skip
    plain = [MethodRun([[1]], 100, seconds) for seconds in (2.0, 4.0)]
    own = [
        MethodRun([[1]], 100, seconds, Latency(0.01, 0.02), Latency(0.1, 0.2), stats, 3 * 2**20)
        for seconds in (1.0, 2.5)
    ]
    result = []
    for workload in ("maths", "chat"):
        for concurrency in (1, 8):
            result.append(summarise("plain", workload, concurrency, plain, 8, plain))
            result.append(summarise("dflash", workload, concurrency, own, 8, plain, None, Agreement(8, 6, 1)))
    return result


def test_markdown() -> None:
    skipped = {"method": "assistant", "workload": "chat", "concurrency": 8, "reason": "one at a time"}
    text = "\n\n".join(report_sections(BenchReport({"device": "cpu"}, {}, rows(), [skipped])))
    assert "| device | cpu |" in text
    assert "## maths" in text and "## chat" in text
    line = next(line for line in text.splitlines() if line.startswith("| dflash | 1 |"))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells == [
        "dflash", "1", "70.0 [40.0, 100.0]", "1.80 [1.60, 2.00]", "-", "2.20", "4.00", "14 %", "10.0 / 20.0",
        "100.0 / 200.0", "3", "6 of 8, 1 near-ties, 1 DIFFERENT",
    ]  # fmt: skip
    assert "| assistant | chat | 8 | one at a time |" in text


def test_terminal_table() -> None:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))
    console.print(build_bench_table([replace(row, identical=True) for row in rows()]))
    text = console.export_text()
    assert text.count("dflash") == 4 and "yes" in text and "1.80 [1.60, 2.00]" in text
    console.print(build_bench_table([replace(rows()[0], workload="own[b]prompts")]))
    assert "own[b]prompts" in console.export_text()


def test_terminal_table_of_a_narrow_terminal() -> None:
    console = Console(width=80, record=True, file=open("/dev/null", "w"))
    console.print(build_bench_table([replace(row, identical=True) for row in rows()], console.width))
    text = console.export_text()
    assert "1.80" in text and "70.0" in text and "yes" in text
    assert "…" not in text and "[" not in text and "memory" not in text


def test_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files = plot_report(rows(), tmp_path / "bench")
    assert [file.name for file in files] == ["bench-speedup.png", "bench-tau.png", "bench-acceptance.png"]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)
    # Of plain decoding alone there is nothing to draw, and a server may know no acceptance.
    assert plot_report([row for row in rows() if row.method == "plain"], tmp_path / "plain") == []
    blind = [replace(row, acceptance_length=None, acceptance_by_position=[]) for row in rows()]
    assert [file.name for file in plot_report(blind, tmp_path / "blind")] == ["blind-speedup.png"]


def test_pictures_need_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependencyError, match=r"adaflash-hf\[bench\]"):
        plot_report(rows(), tmp_path / "bench")
