"""Others' figures beside ours: the right rows, marked, and never counted as measured."""

from __future__ import annotations

from typing import Any

import pytest

from adaflash_hf.errors import InvalidInputError
from adaflash_hf.evaluation.experiments import EXPERIMENTS, find_experiment
from adaflash_hf.evaluation.published_comparison import our_figures, published_data, published_sections
from adaflash_hf.evaluation.published_figures import PUBLISHED


def row(method: str, workload: str, concurrency: int, speedup: float, tau: float) -> dict[str, Any]:
    fields = {"method": method, "workload": workload, "concurrency": concurrency}
    return {**fields, "speedup": speedup, "acceptance_length": tau}


RESULTS = {
    "results": [
        row("plain", "gsm8k", 1, 1.0, 1.0),
        row("dflash", "gsm8k", 1, 1.5, 2.0),
        row("dflash", "gsm8k", 8, 0.9, 2.0),
        row("dflash", "humaneval", 1, 1.4, 1.9),
        row("adaflash", "gsm8k", 8, 1.1, 1.8),
    ]
}


def test_every_experiment_names_figures_that_are_there() -> None:
    for experiment in EXPERIMENTS.values():
        assert set(experiment.published) <= set(PUBLISHED)
        assert all(not entry["measured_here"] and entry["source"] for entry in published_data(experiment))
    with pytest.raises(InvalidInputError, match="'speeed'; choose from speed"):
        find_experiment("speeed")


def test_ours_along_each_axis() -> None:
    by_workload = our_figures(EXPERIMENTS["domains"], RESULTS, "workload")
    assert by_workload == {"dflash": {"gsm8k": (1.5, 2.0), "humaneval": (1.4, 1.9)}}
    by_concurrency = our_figures(EXPERIMENTS["methods"], RESULTS, "concurrency")
    assert by_concurrency == {"dflash": {"1": (1.5, 2.0), "8": (0.9, 2.0)}, "adaflash": {"8": (1.1, 1.8)}}
    swept = {"results": [row("dflash", f"vicuna, {n} tokens", 1, 1.2, 1.6) for n in (128, 1024)]}
    assert our_figures(EXPERIMENTS["long"], swept, "sweep") == {
        "dflash": {"128 tokens": (1.2, 1.6), "1024 tokens": (1.2, 1.6)}
    }


def test_the_table() -> None:
    sections = published_sections(EXPERIMENTS["methods"], RESULTS)
    assert sections[0] == "## Beside published figures" and "not measured here" in sections[1]
    header, _, *lines = sections[2].splitlines()
    assert header.startswith("| requests at once | dflash, ours: speedup / tau | adaflash, ours: speedup / tau |")
    assert header.count("*theirs*") == 3
    cells = {line.split(" | ")[0].strip("| "): line for line in lines}
    assert list(cells) == ["1", "8", "16", "32", "128"]
    assert cells["1"] == "| 1 | 1.50x / 2.00 | - | 3.50x / - | 1.70x / - | - |"
    assert cells["128"].endswith("| 0.76x / - |")
    assert "AdaFlash, arXiv 2607.19223" in sections[-1]
    # Notes alone need no table, and what nobody published has no section.
    assert len(published_sections(EXPERIMENTS["gamma"], RESULTS)) == 2
    assert published_sections(EXPERIMENTS["head"], {"comparisons": {}, "runs": []}) == []
