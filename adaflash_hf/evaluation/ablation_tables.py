"""Finished ablation runs as tables: means and standard deviations over seeds, differences within a seed."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from .ablation_variants import REFERENCE, Variant
from .ablations import HEAD, AblationSettings, FinishedRun
from .result_files import markdown_table, mean_and_spread


__all__ = ["ablation_results", "ablation_sections"]

_TITLES = {
    "objective": "Objective",
    "hard_label_weight": "Share α of the hard label, beside the clipped reverse KL",
    "clip_threshold": "Threshold δ of the clipped entries",
    "clip": "What is clipped, at δ = 0.01",
    "position_decay": "Slots after which a slot weighs 1/e in the loss",
    "vocabulary": "Softmax of the training loss (decoding always drafts from all tokens)",
    "block": "Rows of a block that see each other both ways, or only those before",
    "start": "What a new drafter starts from",
    "heads": "Length labels and heads, on a frozen drafter",
}
_DOMAIN = "acceptance_length_"
_SCALE = "1.3"

Comparisons = Mapping[str, Mapping[str, Variant]]


def ablation_results(
    comparisons: Comparisons, runs: Sequence[FinishedRun], common: AblationSettings, seeds: Sequence[int]
) -> dict[str, Any]:
    """
    Everything measured, as plain data.

    Args:
        comparisons (`Mapping[str, Mapping[str, Variant]]`):
            From `ablation_variants`.
        runs (`Sequence[FinishedRun]`):
            What is finished so far.
        common (`AblationSettings`):
            What all runs have in common.
        seeds (`Sequence[int]`):
            Seeds that are planned.
    """
    return {
        "common": vars(common),
        "seeds": list(seeds),
        "comparisons": {
            name: {row: {"key": variant.key, **variant.settings, **variant.config} for row, variant in rows.items()}
            for name, rows in comparisons.items()
        },
        "runs": [
            {"key": run.key, "seed": run.seed, "metrics": run.metrics, "head": run.head, "train_s": run.train_s}
            for run in runs
        ],
    }


def ablation_sections(
    comparisons: Comparisons, runs: Sequence[FinishedRun], common: AblationSettings, seeds: Sequence[int]
) -> list[str]:
    """
    Paragraphs and tables of a Markdown report; takes the arguments of [`ablation_results`].

    Returns:
        `list[str]`: one paragraph, heading or table each
    """
    by_key: dict[str, dict[int, FinishedRun]] = {}
    for run in runs:
        by_key.setdefault(run.key, {})[run.seed] = run
    sections = [_budget(common, seeds)]
    for name, rows in comparisons.items():
        sections.append(f"## {_TITLES[name]}")
        table = _heads_table if name == "heads" else _drafters_table
        reference = REFERENCE.get(name, next(iter(rows)))
        sections.append(table(rows, by_key, reference))
    return sections


def _budget(common: AblationSettings, seeds: Sequence[int]) -> str:
    blocks = common.steps * common.batch_size * common.anchors
    decay = "none" if common.position_decay is None else f"{common.position_decay:g} slots"
    text = (
        f"Every drafter starts from {common.start} and learns for {common.steps} steps of {common.batch_size} "
        f"trajectories with up to {common.anchors} blocks each (at most {blocks:,} blocks), AdamW at "
        f"{common.learning_rate:g}, position decay {decay} unless a row says otherwise. There are "
        f"{common.train_trajectories} trajectories to learn from; it is judged on {common.held_out_trajectories} of "
        f"other prompts, {common.eval_anchors} blocks each, all tokens, greedy hindsight. Seeds: "
        f"{', '.join(map(str, seeds))}. Values are means ± standard deviations over seeds; differences are taken "
        "within a seed, where all runs see the same blocks in the same order."
    )
    if common.trained is not None:
        text += (
            f" Heads learn for {common.head_steps} steps at {common.head_learning_rate:g} on {common.trained}, which "
            "stays as it is."
        )
    return text


def _drafters_table(
    rows: Mapping[str, Variant], by_key: Mapping[str, Mapping[int, FinishedRun]], reference: str
) -> str:
    of_reference = by_key.get(rows[reference].key, {})
    domains = sorted(
        {
            name
            for variant in rows.values()
            for run in by_key.get(variant.key, {}).values()
            for name in run.metrics
            if name.startswith(_DOMAIN) and name != f"{_DOMAIN}spread"
        }
    )
    header = ["", "tau", f"against {reference}", *(f"tau {name.removeprefix(_DOMAIN)}" for name in domains)]
    header += ["spread over domains", "hard loss", "clipped", "seeds", "training s, median"]
    lines = []
    for label, variant in rows.items():
        runs = by_key.get(variant.key, {})
        differences = [
            run.metrics["acceptance_length"] - of_reference[seed].metrics["acceptance_length"]
            for seed, run in runs.items()
            if seed in of_reference
        ]
        lines.append(
            [
                label,
                _over_seeds(runs, "acceptance_length"),
                "-" if label == reference else mean_and_spread(differences),
                *(_over_seeds(runs, name) for name in domains),
                _over_seeds(runs, f"{_DOMAIN}spread"),
                _over_seeds(runs, "hard_loss"),
                _over_seeds(runs, "clipped_share"),
                str(len(runs)),
                # Not the mean: another process may have held one of them up for minutes.
                f"{statistics.median(run.train_s for run in runs.values()):.0f}" if runs else "-",
            ]
        )
    return markdown_table(header, lines)


def _heads_table(rows: Mapping[str, Variant], by_key: Mapping[str, Mapping[int, FinishedRun]], reference: str) -> str:
    """All against the label over the full block, whatever a head was trained on; a constant comes last."""
    header = ["", "error (tokens)", f"against {reference}", "correlation", f"rows at scale {_SCALE}", "rows saved"]
    header += ["accepted tokens kept", "kept by a fixed length of as many rows", "seeds"]
    of_reference = by_key.get(rows[reference].key, {})
    lines: list[list[Any]] = []
    constant: list[float] = []
    for label, variant in rows.items():
        runs = by_key.get(variant.key, {})
        reports = {seed: run.head for seed, run in runs.items() if run.head is not None}
        error = {seed: _estimate(report) for seed, report in reports.items()}
        baseline = {seed: _estimate(run.head) for seed, run in of_reference.items() if run.head is not None}
        chosen = [_choice_at_scale(report) for report in reports.values()]
        correlations = [report["estimates"][HEAD]["correlation"] for report in reports.values()]
        lines.append(
            [
                label,
                mean_and_spread(list(error.values())),
                "-"
                if label == reference
                else mean_and_spread([error[s] - baseline[s] for s in error if s in baseline]),
                mean_and_spread([value for value in correlations if value is not None]),
                mean_and_spread([choice["mean_rows"] for choice in chosen], digits=2),
                mean_and_spread([choice["rows_saved"] for choice in chosen]),
                mean_and_spread([choice["tokens_kept"] for choice in chosen]),
                mean_and_spread([choice["tokens_kept_fixed"] for choice in chosen]),
                str(len(runs)),
            ]
        )
        constant = constant or [
            report["estimates"]["constant"]["mean_absolute_error_tokens"] for report in reports.values()
        ]
    lines.append(["a constant", mean_and_spread(constant[:1]), *([None] * (len(header) - 2))])
    return markdown_table(header, lines)


def _over_seeds(runs: Mapping[int, FinishedRun], metric: str) -> str:
    return mean_and_spread([run.metrics[metric] for run in runs.values() if metric in run.metrics])


def _estimate(report: Mapping[str, Any]) -> float:
    return float(report["estimates"][HEAD]["mean_absolute_error_tokens"])


def _choice_at_scale(report: Mapping[str, Any]) -> Mapping[str, Any]:
    choices = report["choices"][f"{HEAD}, scale"]
    return next(choice for choice in choices if choice["setting"] == _SCALE)
