from __future__ import annotations

import io

import pytest
from rich.console import Console

from adaflash_hf.evaluation.comparison import Comparison, DecodedRun, FirstDifference
from adaflash_hf.evaluation.comparison_table import build_comparison_table, build_statistics_table, describe_outcome
from adaflash_hf.generation.statistics import GenerationStats


STATS = GenerationStats(
    rounds=4,
    drafted_tokens=12,
    accepted_tokens=6,
    committed_tokens=10,
    verify_lengths={4: 3, 2: 1},
    prefill_s=0.25,
    draft_s=0.5,
    verify_s=1.0,
    total_s=2.0,
)


def comparison(adaflash_s: float, **fields) -> Comparison:
    tokens = tuple(range(20))
    return Comparison((DecodedRun(tokens, 4.0),), (DecodedRun(tokens, adaflash_s, STATS),), **fields)


def rendered(table, width=160) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    return console.file.getvalue()


def test_outcomes_are_told_apart():
    near = FirstDifference(57, 3, 4, 0.012, True)
    far = FirstDifference(2, 3, 4, 1.5, False)
    assert describe_outcome(comparison(2.0)) == "identical"
    assert describe_outcome(comparison(2.0, first_difference=near)) == "near-tie at token 57 (gap 0.012)"
    assert describe_outcome(comparison(2.0, first_difference=far)) == "DIFFERENT at token 2 (gap 1.5)"
    assert describe_outcome(comparison(2.0, sampled=True)) == "sampled, not compared"


def test_table_has_speeds_tau_and_medians():
    text = rendered(build_comparison_table([("a", comparison(1.0)), ("b", comparison(2.0)), ("c", comparison(3.2))]))
    row = next(line for line in text.splitlines() if " a " in line)
    assert all(value in row for value in ("20", "5.0", "20.0", "4.00x", "2.50", "identical"))
    footer = next(line for line in text.splitlines() if "median" in line)
    assert all(value in footer for value in ("5.0", "10.0", "2.00x", "2.50", "3 of 3 identical"))


@pytest.mark.parametrize("name", ["maths (GSM8K test/0)", f"12: {'x' * 20}"])
def test_nothing_is_cut_on_a_narrow_terminal(name):
    near_tie = FirstDifference(57, 3, 4, 0.012, True)
    rows = [(name, comparison(0.15, first_difference=near_tie)), (name, comparison(0.2))]
    text = rendered(build_comparison_table(rows), width=80)
    assert "…" not in text and max(map(len, text.splitlines())) <= 80
    assert all(value in text for value in (name, "AdaFlash", "speedup", "26.67x", "near-tie", " identical "))


def test_one_row_needs_no_median():
    assert "median" not in rendered(build_comparison_table([("a", comparison(1.0))]))


def test_statistics_table_splits_the_time():
    text = rendered(build_statistics_table([("a", comparison(1.0)), ("b", DecodedRun((1,), 1.0))]))
    row = next(line for line in text.splitlines() if " a " in line)
    assert all(value in row for value in ("6/12", "0.25 + 0.50 + 1.00 + 0.25", "2x1 4x3"))
    # The second run was plain and has nothing to show.
    assert " b " not in text
