"""Comparisons as tables for the terminal."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich import box
from rich.table import Table

from .comparison import Comparison, DecodedRun


__all__ = ["build_comparison_table", "build_statistics_table", "describe_outcome"]


def describe_outcome(comparison: Comparison) -> str:
    """Whether the two responses are the same, and if not, where they part and by how much."""
    if comparison.sampled:
        return "sampled, not compared"
    difference = comparison.first_difference
    if difference is None:
        return "identical"
    kind = "near-tie" if difference.is_near_tie else "DIFFERENT"
    return f"{kind} at token {difference.position} (gap {difference.top_two_gap:.2g})"


def build_comparison_table(rows: Sequence[tuple[str, Comparison]]) -> Table:
    """
    One line per prompt and the medians below.

    Args:
        rows (`Sequence[tuple[str, Comparison]]`):
            Name of the prompt and its comparison.
    """
    table = Table(show_footer=len(rows) > 1, box=box.SIMPLE_HEAD, collapse_padding=True)
    table.add_column("prompt", footer="median", no_wrap=True)
    for header, footer in (
        ("tokens", ""),
        ("plain\ntok/s", _median([row.plain_tok_per_s for _, row in rows], "{:.1f}")),
        ("AdaFlash\ntok/s", _median([row.adaflash_tok_per_s for _, row in rows], "{:.1f}")),
        ("speedup", _median([row.speedup for _, row in rows], "{:.2f}x")),
        ("tau", _median([row.acceptance_length for _, row in rows], "{:.2f}")),
    ):
        table.add_column(header, footer=footer, justify="right", no_wrap=True)
    # The one that wraps on a narrow terminal.
    table.add_column("output", footer=_count_identical([row for _, row in rows]))
    for name, comparison in rows:
        tau = comparison.acceptance_length
        table.add_row(
            name,
            str(len(comparison.adaflash[0].token_ids)),
            f"{comparison.plain_tok_per_s:.1f}",
            f"{comparison.adaflash_tok_per_s:.1f}",
            f"{comparison.speedup:.2f}x",
            "-" if tau is None else f"{tau:.2f}",
            describe_outcome(comparison),
        )
    return table


def build_statistics_table(rows: Sequence[tuple[str, Comparison | DecodedRun]]) -> Table:
    """
    Where the drafts ended up and where the time went, one line per prompt.

    Args:
        rows (`Sequence[tuple[str, Comparison | DecodedRun]]`):
            Name of the prompt and its AdaFlash run, or a comparison, of which the first AdaFlash run is shown.
    """
    table = Table(
        caption="verify lengths: rows sent to the target (the anchor included) x rounds", box=box.SIMPLE_HEAD
    )
    table.add_column("prompt", no_wrap=True)
    for header in ("rounds", "accepted", "prefill + draft + verify + rest s"):
        table.add_column(header, justify="right")
    table.add_column("verify lengths")
    for name, row in rows:
        stats = row.stats if isinstance(row, DecodedRun) else row.adaflash[0].stats
        if stats is None:
            continue
        table.add_row(
            name,
            str(stats.rounds),
            f"{stats.accepted_tokens}/{stats.drafted_tokens}",
            f"{stats.prefill_s:.2f} + {stats.draft_s:.2f} + {stats.verify_s:.2f} + {stats.overhead_s:.2f}",
            " ".join(f"{length}x{count}" for length, count in sorted(stats.verify_lengths.items())),
        )
    return table


def _median(values: Sequence[float | None], pattern: str) -> str:
    known = [value for value in values if value is not None]
    return pattern.format(statistics.median(known)) if known else "-"


def _count_identical(comparisons: Sequence[Comparison]) -> str:
    compared = [comparison for comparison in comparisons if not comparison.sampled]
    identical = sum(comparison.first_difference is None for comparison in compared)
    return f"{identical} of {len(compared)} identical" if compared else ""
