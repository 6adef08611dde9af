"""What training on one domain is worth on the others: a square of tau, and of what it gained over the start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .domain_shift import REFERENCE, DomainShiftSettings, FinishedShiftRun
from .pictures import matplotlib_figure, save_pictures
from .result_files import markdown_table


if TYPE_CHECKING:
    from matplotlib.figure import Figure


__all__ = ["cross_domain_results", "cross_domain_sections", "plot_cross_domain"]

_START = "before"


def cross_domain_results(
    start: FinishedShiftRun,
    trained: Sequence[FinishedShiftRun],
    settings: DomainShiftSettings,
    environment: Mapping[str, Any],
) -> dict[str, Any]:
    """
    Everything measured, as plain data.

    Args:
        start (`FinishedShiftRun`):
            A static run; its first round has what the untrained drafter accepts.
        trained (`Sequence[FinishedShiftRun]`):
            From [`DomainShift.run_reference`], one for each domain.
        settings (`DomainShiftSettings`):
            What all have in common.
        environment (`Mapping[str, Any]`):
            Machine and versions.
    """
    rows = {_START: start, **{run.method.removeprefix(f"{REFERENCE}-"): run for run in trained}}
    return {
        "config": asdict(settings),
        "environment": dict(environment),
        "acceptance_length": {
            name: {domain: one["acceptance_length"] for domain, one in run.rounds[0]["held_out"].items()}
            for name, run in rows.items()
        },
        "seconds": {name: run.seconds for name, run in rows.items()},
    }


def cross_domain_sections(results: Mapping[str, Any]) -> list[str]:
    """
    Paragraphs and tables of the Markdown file.

    Args:
        results (`Mapping[str, Any]`):
            From [`cross_domain_results`].
    """
    taus = results["acceptance_length"]
    before, domains = taus[_START], list(taus[_START])
    config = results["config"]
    trained = {name: row for name, row in taus.items() if name != _START}
    gained = [
        [name, *(f"{row[domain] / before[domain] - 1:+.1%}" for domain in domains)] for name, row in trained.items()
    ]
    return [
        f"The drafter {config['start']}, trained on {config['shape']['rounds_per_phase']} x "
        f"{config['shape']['trajectories_per_round']} responses of one domain for {config['reference_epochs']} "
        f"epochs, judged on {config['shape']['held_out']} responses of each domain that it never saw, "
        f"{config['held_out_anchors']} blocks each.",
        "## Tau",
        markdown_table(["trained on", *domains], [[name, *(row[d] for d in domains)] for name, row in taus.items()]),
        "## Change against the drafter before",
        markdown_table(["trained on", *domains], gained),
    ]


def plot_cross_domain(results: Mapping[str, Any], path: str | Path) -> list[Path]:
    """
    Draw tau as a map: rows by what the drafter was trained on, columns by what it is judged on.

    Args:
        results (`Mapping[str, Any]`):
            From [`cross_domain_results`].
        path (`str` or `Path`):
            Where to, without a suffix.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    taus = results["acceptance_length"]
    domains = list(taus[_START])
    values = [[row[domain] for domain in domains] for row in taus.values()]
    figure: Figure = matplotlib_figure()(figsize=(2 + 1.2 * len(domains), 1.5 + 0.7 * len(taus)), layout="constrained")
    panel = figure.subplots()
    image = panel.imshow(values, cmap="viridis")
    middle = (min(map(min, values)) + max(map(max, values))) / 2
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            color = "black" if value > middle else "white"  # against viridis, which ends in yellow
            panel.text(x, y, f"{value:.2f}", ha="center", va="center", color=color)
    panel.set_xticks(range(len(domains)), domains)
    panel.set_yticks(range(len(taus)), list(taus))
    panel.set(xlabel="judged on", ylabel="trained on")
    figure.colorbar(image, label="tau")
    return save_pictures({"map": figure}, path)
