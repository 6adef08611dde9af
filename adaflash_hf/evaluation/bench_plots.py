"""Benchmark results as pictures: speedup by concurrency, tau by workload, acceptance by position."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .bench_results import PLAIN, BenchRow
from .pictures import matplotlib_figure, save_pictures


if TYPE_CHECKING:
    from matplotlib.figure import Figure


__all__ = ["plot_report"]


def plot_report(rows: Sequence[BenchRow], path: str | Path) -> list[Path]:
    """
    Draws what the rows can show.

    Args:
        rows (`Sequence[BenchRow]`):
            Results.
        path (`str` or `Path`):
            Where to, without a suffix; the kind of picture and `.png` are added.

    Returns:
        `list[Path]`: the files written.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    figure_class = matplotlib_figure()
    pictures = {
        "speedup": _draw_speedup(rows, figure_class),
        "tau": _draw_acceptance_length(rows, figure_class),
        "acceptance": _draw_acceptance_by_position(rows, figure_class),
    }
    return save_pictures(pictures, path)


def _draw_speedup(rows: Sequence[BenchRow], figure_class: Any) -> Figure | None:
    """One panel per workload, one line per method, the spread as bars."""
    rows = [row for row in rows if row.speedup is not None and row.method != PLAIN]
    if not rows:
        return None
    workloads = _distinct(row.workload for row in rows)
    ticks = sorted({row.concurrency for row in rows})
    figure = figure_class(figsize=(1.5 + 3.7 * len(workloads), 4), layout="constrained")
    panels = figure.subplots(1, len(workloads), squeeze=False, sharey=True)[0]
    for panel, workload in zip(panels, workloads, strict=True):
        for method in _distinct(row.method for row in rows):
            line = sorted(
                (row for row in rows if (row.workload, row.method) == (workload, method)),
                key=lambda row: row.concurrency,
            )
            _draw_line(panel, method, line)
        panel.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
        panel.set_xscale("log", base=2)
        panel.set_xticks(ticks, [str(tick) for tick in ticks])
        panel.set(title=workload, xlabel="concurrency")
    panels[0].set_ylabel("speedup over plain decoding")
    panels[-1].legend(fontsize="small")
    return figure


def _draw_line(panel: Any, method: str, line: Sequence[BenchRow]) -> None:
    points = [(row.concurrency, row.speedup, row.speedup_spread) for row in line]
    known = [(x, y, spread) for x, y, spread in points if y is not None and spread is not None]
    if known:
        bars = [[y - low for _, y, (low, _) in known], [high - y for _, y, (_, high) in known]]
        xs, ys = [x for x, _, _ in known], [y for _, y, _ in known]
        panel.errorbar(xs, ys, yerr=bars, marker="o", markersize=4, capsize=2, label=method)


def _draw_acceptance_length(rows: Sequence[BenchRow], figure_class: Any) -> Figure | None:
    """Bars by workload, at the lowest concurrency."""
    rows = [row for row in _at_lowest_concurrency(rows) if row.acceptance_length is not None and row.method != PLAIN]
    if not rows:
        return None
    workloads, methods = _distinct(row.workload for row in rows), _distinct(row.method for row in rows)
    figure = figure_class(figsize=(2 + 1.8 * len(workloads), 4), layout="constrained")
    panel = figure.subplots()
    width = 0.8 / len(methods)
    for place, method in enumerate(methods):
        bars = {row.workload: row.acceptance_length for row in rows if row.method == method}
        xs = [index + (place - (len(methods) - 1) / 2) * width for index, name in enumerate(workloads) if name in bars]
        panel.bar(xs, [bars[name] for name in workloads if name in bars], width, label=method)
    panel.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
    panel.set_xticks(range(len(workloads)), workloads)
    panel.set_ylabel(f"tau at concurrency {rows[0].concurrency}")
    panel.legend(fontsize="small")
    return figure


def _draw_acceptance_by_position(rows: Sequence[BenchRow], figure_class: Any) -> Figure | None:
    """One line per workload, of the method that verified the longest blocks: others cut off what they show."""
    rows = [row for row in _at_lowest_concurrency(rows) if row.acceptance_by_position]
    if not rows:
        return None
    method = max(rows, key=lambda row: row.mean_verify_length or 0).method
    figure = figure_class(figsize=(6, 4), layout="constrained")
    panel = figure.subplots()
    for row in rows:
        if row.method == method:
            positions = range(1, len(row.acceptance_by_position) + 1)
            panel.plot(positions, row.acceptance_by_position, marker="o", markersize=4, label=row.workload)
    panel.set_ylim(0, 1)
    panel.set(xlabel="position in the draft", ylabel=f"share of rounds that accept it ({method})")
    panel.legend(fontsize="small")
    return figure


def _at_lowest_concurrency(rows: Sequence[BenchRow]) -> list[BenchRow]:
    lowest = min((row.concurrency for row in rows), default=1)
    return [row for row in rows if row.concurrency == lowest]


def _distinct(names: Any) -> list[str]:
    return list(dict.fromkeys(names))
