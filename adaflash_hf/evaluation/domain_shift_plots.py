"""Domain shifts as pictures: tau of the traffic, tau on each domain, and the length head, round by round."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .domain_shift import REFERENCE, FinishedShiftRun
from .pictures import matplotlib_figure, save_pictures


if TYPE_CHECKING:
    from matplotlib.figure import Figure


__all__ = ["plot_shift"]


Value = Callable[[dict[str, Any]], float | None]


def plot_shift(
    runs: Sequence[FinishedShiftRun], references: Sequence[FinishedShiftRun], path: str | Path
) -> list[Path]:
    """
    Draws what the runs can show: means over seeds, bands one standard deviation wide to either side.

    Args:
        runs (`Sequence[FinishedShiftRun]`):
            All methods and seeds.
        references (`Sequence[FinishedShiftRun]`):
            Of the domains; their tau is a dotted line.
        path (`str` or `Path`):
            Where to, without a suffix; the kind of picture and `.png` are added.

    Returns:
        `list[Path]`: the files written

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    if not runs:
        return []
    figure_class = matplotlib_figure()
    pictures = {
        "traffic": _draw_traffic(runs, figure_class),
        "held-out": _draw_held_out(runs, references, figure_class),
        "length-head": _draw_length_head(runs, figure_class),
    }
    return save_pictures(pictures, path)


def _draw_traffic(runs: Sequence[FinishedShiftRun], figure_class: Any) -> Figure:
    figure = figure_class(figsize=(9, 4.5), layout="constrained")
    panel = figure.subplots()
    _draw_lines(panel, runs, lambda entry: entry["served"]["acceptance_length"])
    _draw_shifts(panel, runs[0])
    panel.set(xlabel="round of traffic (0: before the shift)", ylabel="tau of the traffic")
    panel.legend(fontsize="small")
    return figure


def _draw_held_out(
    runs: Sequence[FinishedShiftRun], references: Sequence[FinishedShiftRun], figure_class: Any
) -> Figure:
    """One panel per domain: what is learned of it while it is served, and forgotten while it is not."""
    domains = list(runs[0].rounds[0]["held_out"])
    figure = figure_class(figsize=(9, 0.8 + 2.7 * len(domains)), layout="constrained")
    panels = figure.subplots(len(domains), 1, squeeze=False, sharex=True)[:, 0]
    for panel, domain in zip(panels, domains, strict=True):
        _draw_lines(panel, runs, _held_out("acceptance_length", domain))
        for reference in references:
            if reference.method == f"{REFERENCE}-{domain}":
                tau = reference.rounds[0]["held_out"][domain]["acceptance_length"]
                panel.axhline(tau, color="black", linewidth=0.9, linestyle=":", label=f"trained on {domain}")
        _draw_shifts(panel, runs[0])
        panel.set(ylabel=f"held-out tau, {domain}")
    panels[0].legend(fontsize="small")
    panels[-1].set_xlabel("rounds of adaptation")
    return figure


def _draw_length_head(runs: Sequence[FinishedShiftRun], figure_class: Any) -> Figure | None:
    """Error and chosen rows on the domain that is served."""
    runs = [run for run in runs if all("head_rows" in one for one in run.rounds[0]["held_out"].values())]
    if not runs:
        return None
    figure = figure_class(figsize=(9, 6), layout="constrained")
    panels = figure.subplots(2, 1, sharex=True)
    kinds = {"head_error_tokens": "error of the length head (tokens)", "head_rows": "rows it would verify"}
    for panel, (name, label) in zip(panels, kinds.items(), strict=True):
        _draw_lines(panel, runs, _held_out(name))
        _draw_shifts(panel, runs[0])
        panel.set_ylabel(label)
    panels[0].legend(fontsize="small")
    panels[-1].set_xlabel("rounds of adaptation (held out, on the domain served)")
    return figure


def _held_out(name: str, domain: str | None = None) -> Value:
    """A held-out figure of one domain, or of the one that is served."""
    return lambda entry: entry["held_out"][domain or entry["domain"]][name]


def _draw_lines(panel: Any, runs: Sequence[FinishedShiftRun], value: Value) -> None:
    for method in dict.fromkeys(run.method for run in runs):
        members = [run for run in runs if run.method == method]
        columns = zip(*([value(entry) for entry in run.rounds] for run in members), strict=True)
        points = [(number, known) for number, column in enumerate(columns) if (known := _known(column))]
        xs, means = [number for number, _ in points], [statistics.fmean(known) for _, known in points]
        (line,) = panel.plot(xs, means, marker="o", markersize=3, label=method)
        if len(members) > 1:
            spreads = [statistics.stdev(known) if len(known) > 1 else 0.0 for _, known in points]
            lows = [mean - spread for mean, spread in zip(means, spreads, strict=True)]
            highs = [mean + spread for mean, spread in zip(means, spreads, strict=True)]
            panel.fill_between(xs, lows, highs, color=line.get_color(), alpha=0.15, linewidth=0)


def _known(column: Sequence[float | None]) -> list[float]:
    return [value for value in column if value is not None]


def _draw_shifts(panel: Any, run: FinishedShiftRun) -> None:
    """A line where the traffic changes, with the domain that begins there."""
    for before, entry in zip(run.rounds, run.rounds[1:], strict=False):
        if entry["phase"] != before["phase"]:
            place = entry["number"] - 0.5
            panel.axvline(place, color="black", linewidth=0.8, linestyle="--")
            panel.annotate(
                f" {entry['domain']}", (place, 1.0), xycoords=("data", "axes fraction"), va="top", fontsize="small"
            )
