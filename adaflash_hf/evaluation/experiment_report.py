"""What `adaflash evaluate` adds to a command's results: tables and pictures that only one experiment needs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .ablation_plots import plot_ablations
from .published_comparison import plot_published, published_sections
from .result_files import markdown_table
from .speed import plot_speed


if TYPE_CHECKING:
    from .experiments import Experiment


__all__ = ["experiment_sections", "plot_experiment"]


def experiment_sections(experiment: Experiment, results: Mapping[str, Any]) -> list[str]:
    """
    Headings, tables and paragraphs that follow the command's own.

    Args:
        experiment (`Experiment`):
            What was done.
        results (`Mapping[str, Any]`):
            Content of its results file.
    """
    own = {"positions": _positions, "domains": _domains}
    sections = own[experiment.name](results) if experiment.name in own else []
    return [*sections, *published_sections(experiment, results)]


def plot_experiment(experiment: Experiment, results: Mapping[str, Any], path: str | Path) -> list[Path]:
    """
    Draw what the command itself does not draw.

    Args:
        experiment (`Experiment`):
            What was done.
        results (`Mapping[str, Any]`):
            Content of its results file.
        path (`str` or `Path`):
            Where to, without a suffix.

    Returns:
        `list[Path]`: the files written

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    own = {"speed": plot_speed, "ablation": plot_ablations}
    written = own[experiment.kind](results, path) if experiment.kind in own else []
    return [*written, *plot_published(experiment, results, path)]


def _positions(results: Mapping[str, Any]) -> list[str]:
    rows = [row for row in results["results"] if row["acceptance_by_position"]]
    longest = max((len(row["acceptance_by_position"]) for row in rows), default=0)
    header = ["workload", "method", *(f"draft {position}" for position in range(1, longest + 1))]
    cells = []
    for row in rows:
        shares = [f"{share:.2f}" for share in row["acceptance_by_position"]]
        cells.append([row["workload"], row["method"], *shares, *[None] * (longest - len(shares))])
    return ["## Share of the rounds that accept the draft at a position", markdown_table(header, cells)]


def _domains(results: Mapping[str, Any]) -> list[str]:
    by_method: dict[str, list[Mapping[str, Any]]] = {}
    for row in results["results"]:
        if row["acceptance_length"] is not None and row["method"] != "plain":
            by_method.setdefault(row["method"], []).append(row)
    cells = []
    for method, rows in by_method.items():
        taus = [row["acceptance_length"] for row in rows]
        speedups = [row["speedup"] for row in rows if row["speedup"] is not None]
        cells.append([method, *_spread(taus), *_spread(speedups)])
    header = ["method", "tau: mean", "least", "largest", "standard deviation"]
    header += ["speedup: mean", "least", "largest", "standard deviation"]
    return ["## Spread over domains", markdown_table(header, cells)]


def _spread(values: list[float]) -> list[float | None]:
    if not values:
        return [None] * 4
    return [statistics.mean(values), min(values), max(values), statistics.pstdev(values)]
