"""Benchmark results as tables: Markdown for files, rich for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from .bench import BenchReport
from .bench_results import BenchRow
from .result_files import markdown_table


__all__ = ["build_bench_table", "report_sections"]

_HEADER = (
    "method",
    "concurrency",
    "tok/s",
    "speedup",
    "vs transformers",
    "tau",
    "verify length",
    "draft time",
    "token ms p50 / p95",
    "first token ms p50 / p95",
    "memory MiB",
    "identical",
)
# What is read first, where the terminal has no room for all. Spreads are in the files.
_NARROW_HEADER = ("method", "concurrency", "tok/s", "speedup", "tau", "identical")
_FULL_WIDTH = 150
_MEBIBYTE = 2**20


def report_sections(report: BenchReport) -> list[str]:
    """
    Paragraphs and tables of the Markdown file.

    Args:
        report (`BenchReport`):
            What was measured.
    """
    sections = [markdown_table(("environment", "value"), report.environment.items())]
    for workload in dict.fromkeys(row.workload for row in report.rows):
        sections.append(f"## {workload}")
        rows = [_cells(row) for row in report.rows if row.workload == workload]
        sections.append(markdown_table(_HEADER, rows))
    if report.rows:
        sections.append(
            "Medians over repeats, with the least and the largest in brackets. Speedup is against `plain` in the same "
            "repeat: the same loop without a drafter, on weights that are prepacked if the others' are. tau: tokens "
            "committed per verification of a request. Verify length: rows per request and round, the anchor included. "
            "A near-tie is a difference where the target's two best logits are as close as its dtype rounds."
        )
    if report.skipped:
        header = ("method", "workload", "concurrency", "not measured, because")
        sections += ["## Not measured", markdown_table(header, [tuple(entry.values()) for entry in report.skipped])]
    return sections


def build_bench_table(rows: Sequence[BenchRow], width: int = _FULL_WIDTH) -> Table:
    """
    One line per row, for the terminal.

    Args:
        rows (`Sequence[BenchRow]`):
            Results.
        width (`int`, *optional*):
            Columns of the terminal; a narrow one gets the most important figures alone.
    """
    is_narrow = width < _FULL_WIDTH
    titles = _NARROW_HEADER if is_narrow else _HEADER
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("workload", no_wrap=True)
    for index, title in enumerate(titles):
        table.add_column(title, justify="left" if index == 0 else "right", no_wrap=index == 0)
    for row in rows:
        texts = dict(zip(_HEADER, map(_text, _cells(row)), strict=True))
        cells = (texts[title].partition(" [")[0] if is_narrow else texts[title] for title in titles)
        table.add_row(*map(escape, (row.workload, *cells)))  # a file's name may have brackets
    return table


def _cells(row: BenchRow) -> tuple[Any, ...]:
    return (
        row.method,
        row.concurrency,
        _spread(row.tokens_per_second, row.tokens_per_second_spread, 1),
        _spread(row.speedup, row.speedup_spread, 2),
        _number(row.speedup_over_transformers, 2),
        _number(row.acceptance_length, 2),
        _number(row.mean_verify_length, 2),
        None if row.draft_time_share is None else f"{100 * row.draft_time_share:.0f} %",
        _milliseconds(row.token_latency_p50_s, row.token_latency_p95_s),
        _milliseconds(row.first_token_p50_s, row.first_token_p95_s),
        None if row.peak_memory_bytes is None else f"{row.peak_memory_bytes / _MEBIBYTE:.0f}",
        row.agreement_text,
    )


def _number(value: float | None, digits: int) -> str | None:
    return None if value is None else f"{value:.{digits}f}"


def _spread(value: float | None, spread: tuple[float, float] | None, digits: int) -> str | None:
    if value is None or spread is None:
        return None
    low, high = spread
    return f"{value:.{digits}f}" + ("" if low == high else f" [{low:.{digits}f}, {high:.{digits}f}]")


def _milliseconds(p50: float | None, p95: float | None) -> str | None:
    return None if p50 is None or p95 is None else f"{1000 * p50:.1f} / {1000 * p95:.1f}"


def _text(cell: Any) -> str:
    return "-" if cell is None else str(cell)
