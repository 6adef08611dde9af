"""The headline: medians and quartiles by hand, and the text made of them."""

from __future__ import annotations

from typing import Any

import pytest

from adaflash_hf.errors import InvalidInputError
from adaflash_hf.evaluation.comparison import Comparison, DecodedRun, FirstDifference
from adaflash_hf.evaluation.speed import headline_table, headline_text, measure_speed, speed_sections, summarise_speed
from adaflash_hf.generation.statistics import GenerationStats


def decoded(tokens: int, seconds: float, stats: GenerationStats | None = None) -> DecodedRun:
    return DecodedRun(tuple(range(tokens)), seconds, stats)


def made_result() -> dict[str, Any]:
    """Four prompts at speedups 1, 1.5, 2 and 3; drafting alone gives half of that."""
    comparisons, prepacked = [], []
    for seconds, gap in ((10.0, None), (10 / 1.5, 0.25), (5.0, 0.5), (10 / 3, None)):
        stats = GenerationStats(rounds=10, committed_tokens=20, draft_s=0.1, verify_s=0.4, prefill_s=0.2, total_s=0.8)
        difference = None if gap is None else FirstDifference(7, 1, 2, gap, is_near_tie=gap < 0.4)
        sides = (decoded(100, 10.0),), (decoded(100, seconds, stats),)
        comparisons.append(Comparison(*sides, first_difference=difference))
        prepacked.append(decoded(100, 5.0))
    result = summarise_speed(comparisons, prepacked)
    environment = {"device": "cpu", "dtype": "bfloat16", "cpu_capability": "AVX2", "threads": 2}
    return {
        "environment": {**environment, "torch": "2.13.0+cpu", "transformers": "5.24.0"},
        "settings": {"prompts": "gsm8k", "max_new_tokens": 100},
        **result,
        "per_prompt": [comparison.as_dict() for comparison in comparisons],
    }


def test_summary_by_hand() -> None:
    result = made_result()
    assert result["plain_tok_per_s"] == 10 and result["prepacked_plain_tok_per_s"] == 20
    assert result["adaflash_tok_per_s"] == pytest.approx(17.5)
    assert result["speedup_median"] == pytest.approx(1.75)
    assert result["speedup_quartiles"] == pytest.approx([1.5, 3.0])
    assert result["speedup_over_prepacked_median"] == pytest.approx(0.875)
    assert result["acceptance_length"] == 2 and result["draft_ms_per_round"] == pytest.approx(10)
    assert result["verify_ms_per_round"] == pytest.approx(40) and result["overhead_ms_per_round"] == pytest.approx(10)
    assert (result["identical"], result["near_ties"]) == (2, 1)


def test_text_by_hand() -> None:
    result = made_result()
    place, *cells = headline_table(result).splitlines()[-1].strip("| ").split(" | ")
    assert place == "bfloat16, 2 AVX2 threads without bfloat16 instructions"
    assert cells == ["10.0 tok/s", "20.0 tok/s", "17.5 tok/s", "1.75x", "2.00"]
    text = headline_text(result)
    assert text.startswith("Medians over the first 4 prompts of gsm8k, 100 new tokens each")
    assert "torch 2.13.0, transformers 5.24.0; half of the speedups lie between 1.50x and 3.00x" in text
    assert text.endswith("2 of the 4 answers part from plain decoding's at some place, where the two best logits lie "
                         "within 0.5 of each other.")  # fmt: skip
    page = "\n".join(speed_sections(result))
    assert "near-tie at 7 (gap 0.25)" in page and "DIFFERENT at 7 (gap 0.5)" in page and "| draft | 10.0 |" in page


def test_without_prompts_nothing_is_measured() -> None:
    with pytest.raises(InvalidInputError, match="`prompts` is empty"):
        measure_speed(None, None, [], max_new_tokens=8, length_policy="fixed")  # type: ignore[arg-type]
