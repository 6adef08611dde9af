"""Ablations as pictures: tau of every row of a comparison, with its spread over seeds and over domains."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .ablations import HEAD
from .pictures import matplotlib_figure, save_pictures


if TYPE_CHECKING:
    from matplotlib.figure import Figure


__all__ = ["plot_ablations"]

_DOMAIN = "acceptance_length_"
_SPREAD = f"{_DOMAIN}spread"


def plot_ablations(results: Mapping[str, Any], path: str | Path) -> list[Path]:
    """
    Draw one picture for each comparison.

    Args:
        results (`Mapping[str, Any]`):
            From [`ablation_results`].
        path (`str` or `Path`):
            Where to, without a suffix; the name of the comparison and `.png` are added.

    Returns:
        `list[Path]`: the files written

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    by_key: dict[str, list[Mapping[str, Any]]] = {}
    for run in results["runs"]:
        by_key.setdefault(run["key"], []).append(run)
    figures: dict[str, Figure | None] = {}
    for name, rows in results["comparisons"].items():
        runs = {label: by_key[variant["key"]] for label, variant in rows.items() if variant["key"] in by_key}
        draw = _draw_heads if name == "heads" else _draw_drafters
        figures[name.replace("_", "-")] = draw(runs) if runs else None
    return save_pictures(figures, path)


def _draw_drafters(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    figure, panel = _panel(runs)
    for place, of_row in enumerate(runs.values()):
        _draw_bar(panel, place, [run["metrics"]["acceptance_length"] for run in of_row])
    names = {name for of_row in runs.values() for run in of_row for name in run["metrics"]}
    for number, domain in enumerate(sorted(name for name in names if name.startswith(_DOMAIN) and name != _SPREAD)):
        means = {
            place: statistics.mean(run["metrics"][domain] for run in of_row if domain in run["metrics"])
            for place, of_row in enumerate(runs.values())
            if any(domain in run["metrics"] for run in of_row)
        }
        label = domain.removeprefix(_DOMAIN)
        panel.scatter(means.values(), means.keys(), s=28, color=f"C{number + 1}", zorder=3, label=label)
    panel.set_xlim(left=1)
    panel.set_xlabel("tau on held-out prompts\npoints: by domain, whiskers: standard deviation over seeds")
    if names:
        panel.legend(fontsize="small")
    return figure


def _draw_heads(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    figure, panel = _panel(runs)
    for place, of_row in enumerate(runs.values()):
        errors = [run["head"]["estimates"][HEAD]["mean_absolute_error_tokens"] for run in of_row if run["head"]]
        if errors:
            _draw_bar(panel, place, errors)
    panel.set_xlabel("mean absolute error, tokens\nwhiskers: standard deviation over seeds")
    return figure


def _panel(runs: Mapping[str, Any]) -> tuple[Figure, Any]:
    figure: Figure = matplotlib_figure()(figsize=(8, 1.5 + 0.5 * len(runs)), layout="constrained")
    panel = figure.subplots()
    panel.set_yticks(range(len(runs)), list(runs))
    panel.invert_yaxis()
    return figure, panel


def _draw_bar(panel: Any, place: int, values: Sequence[float]) -> None:
    spread = statistics.stdev(values) if len(values) > 1 else None
    panel.barh(place, statistics.mean(values), height=0.6, xerr=spread, color="C0", alpha=0.5, capsize=3)
