"""Our results and others' published figures in one table and one picture, the others' marked as theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .pictures import matplotlib_figure, save_pictures
from .published_figures import PUBLISHED, PublishedFigures
from .result_files import markdown_table


if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .experiments import Experiment


__all__ = ["OurFigures", "our_figures", "plot_published", "published_data", "published_sections"]

# Speedup and tau by key of an axis, for each of our methods.
OurFigures = Mapping[str, Mapping[str, tuple[float | None, float | None]]]

_TITLES = {"workload": "workload", "concurrency": "requests at once", "sweep": "setting"}
_WARNING = (
    "Columns marked *theirs* are published by others, on other targets and machines, and were not measured here: they "
    "show what the method reaches and how it falls off, not what this run should have given."
)


def our_figures(experiment: Experiment, results: Mapping[str, Any], axis: str) -> OurFigures:
    """
    What this run gave along an axis: at the lowest concurrency by workload, else on the first workload.

    Args:
        experiment (`Experiment`):
            Decides whose results stand beside the published ones.
        results (`Mapping[str, Any]`):
            Content of its results file.
        axis (`str`):
            See [`PublishedFigures`].
    """
    if experiment.kind == "speed":
        name = str(results["settings"]["prompts"]).partition("_")[0]
        return {"AdaFlash": {name: (results["speedup_median"], results["acceptance_length"])}}
    if experiment.kind == "ablation":
        return _of_ablation(results, axis)
    if "results" not in results:
        return {}
    rows = [row for row in results["results"] if not experiment.compared or row["method"] in experiment.compared]
    if not rows:
        return {}
    lowest, first = min(row["concurrency"] for row in rows), rows[0]["workload"]
    found: dict[str, dict[str, tuple[float | None, float | None]]] = {}
    for row in rows:
        if axis == "concurrency" and row["workload"] == first:
            key = str(row["concurrency"])
        elif axis != "concurrency" and row["concurrency"] == lowest:
            workload, _, label = row["workload"].partition(", ")
            key = label if axis == "sweep" else workload
        else:
            continue
        # Of settings that are gone through, the first stands for a workload.
        found.setdefault(row["method"], {}).setdefault(key, (row["speedup"], row["acceptance_length"]))
    return found


def published_sections(experiment: Experiment, results: Mapping[str, Any]) -> list[str]:
    """
    Heading, tables and notes for the Markdown file; none if nothing is published that is known here.

    Args:
        experiment (`Experiment`):
            What was done.
        results (`Mapping[str, Any]`):
            Content of its results file.
    """
    chosen = [PUBLISHED[key] for key in experiment.published]
    if not chosen:
        return []
    sections = ["## Beside published figures"]
    tabled = [figures for figures in chosen if figures.values]
    if tabled:
        sections.append(_WARNING)
    for axis in dict.fromkeys(figures.axis for figures in tabled):
        theirs = [figures for figures in tabled if figures.axis == axis]
        sections.append(_table(axis, our_figures(experiment, results, axis), theirs))
    notes = [
        f"- {figures.label} (*theirs*): {figures.source}." + (f" {figures.note}" if figures.note else "")
        for figures in chosen
    ]
    return [*sections, "\n".join(notes)]


def published_data(experiment: Experiment) -> list[dict[str, Any]]:
    """
    The published figures of an experiment, for its results file.

    Args:
        experiment (`Experiment`):
            What was done.
    """
    return [
        {
            "label": figures.label,
            "source": figures.source,
            "measured_here": False,
            "axis": figures.axis,
            "values": {
                key: {"speedup": speedup, "acceptance_length": tau} for key, (speedup, tau) in figures.values.items()
            },
            "note": figures.note,
        }
        for figures in (PUBLISHED[key] for key in experiment.published)
    ]


def plot_published(experiment: Experiment, results: Mapping[str, Any], path: str | Path) -> list[Path]:
    """
    Draw ours filled and theirs hatched, along the axis that most of the published figures have.

    Args:
        experiment (`Experiment`):
            What was done.
        results (`Mapping[str, Any]`):
            Content of its results file.
        path (`str` or `Path`):
            Where to, without a suffix.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    tabled = [PUBLISHED[key] for key in experiment.published if PUBLISHED[key].values]
    if not tabled:
        return []
    axis = tabled[0].axis
    theirs = [figures for figures in tabled if figures.axis == axis]
    ours = our_figures(experiment, results, axis)
    # Tau is comparable across machines; along other axes it is the speedup that changes.
    place = 1 if axis == "workload" else 0
    columns = [(f"{name} (ours)", values, "") for name, values in ours.items()]
    columns += [(f"{figures.label} (theirs)", figures.values, "//") for figures in theirs]
    series = [
        (name, {key: pair[place] for key, pair in values.items() if pair[place] is not None}, hatch)
        for name, values, hatch in columns
    ]
    figure = _bars(axis, [one for one in series if one[1]])
    return save_pictures({"published": figure}, path)


def _of_ablation(results: Mapping[str, Any], axis: str) -> OurFigures:
    """Mean tau of each row of a comparison, over seeds; the data it is judged on are no workload by name."""
    if axis != "workload":
        return {}
    figures: dict[str, dict[str, tuple[float | None, float | None]]] = {}
    for rows in results["comparisons"].values():
        for label, variant in rows.items():
            taus = [run["metrics"]["acceptance_length"] for run in results["runs"] if run["key"] == variant["key"]]
            if taus:
                figures[label] = {"held-out": (None, sum(taus) / len(taus))}
    return figures


def _table(axis: str, ours: OurFigures, theirs: Sequence[PublishedFigures]) -> str:
    columns = [(f"{name}, ours", values) for name, values in ours.items()]
    columns += [(f"{figures.label}, *theirs*", figures.values) for figures in theirs]
    keys = dict.fromkeys(key for _, values in columns for key in values)
    header = [_TITLES[axis], *(f"{name}: speedup / tau" for name, _ in columns)]
    return markdown_table(header, [[key, *(_pair(values.get(key)) for _, values in columns)] for key in keys])


def _pair(pair: tuple[float | None, float | None] | None) -> str | None:
    if pair is None:
        return None
    speedup, tau = pair
    return f"{'-' if speedup is None else f'{speedup:.2f}x'} / {'-' if tau is None else f'{tau:.2f}'}"


def _bars(axis: str, series: Sequence[tuple[str, Mapping[str, Any], str]]) -> Figure | None:
    if not series:
        return None
    keys = list(dict.fromkeys(key for _, values, _ in series for key in values))
    figure: Figure = matplotlib_figure()(figsize=(3 + 1.2 * len(keys), 4.5), layout="constrained")
    panel = figure.subplots()
    width = 0.8 / len(series)
    for index, (name, values, hatch) in enumerate(series):
        offset = (index - (len(series) - 1) / 2) * width
        places = [place + offset for place, key in enumerate(keys) if key in values]
        heights = [values[key] for key in keys if key in values]
        panel.bar(places, heights, width, label=name, hatch=hatch, alpha=0.9)
    panel.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
    panel.set_xticks(range(len(keys)), keys)
    panel.set(xlabel=_TITLES[axis], ylabel="tau" if axis == "workload" else "speedup over plain decoding")
    panel.legend(fontsize="x-small")
    return figure
