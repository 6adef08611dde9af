"""The soak test of the engine in short, with a drafter that is often right."""

from __future__ import annotations

import gc
import importlib.util
import sys
from pathlib import Path
from typing import Any

from oracle_drafter import oracle_drafter

from adaflash_hf.generation.engine_requests import GenerationRequest


EXAMPLE = Path(__file__).parents[2] / "examples" / "soak_engine.py"


def load_example() -> Any:
    spec = importlib.util.spec_from_file_location("soak_engine", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def make_drafter(target: Any, references: list[list[int]]) -> Any:
    fields = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 24}
    return oracle_drafter(target, references, wrong_every=5, target_layer_ids=[0, 1], block_size=6, **fields)


def test_a_short_soak() -> None:
    soak = load_example()
    report = soak.soak(60, make_drafter=make_drafter)
    assert report.wrong == []
    assert sum(report.outcomes.values()) == report.submitted == 60
    assert set(report.outcomes) >= {"length", "stop", "error"}
    assert report.acceptance_length > 1.5
    # A run this short says nothing about the size of the process, but whatever a request held must be gone.
    gc.collect()
    assert not [thing for thing in gc.get_objects() if isinstance(thing, GenerationRequest)]


def test_growth_compares_the_last_quarter_with_the_second() -> None:
    soak = load_example()
    # The first quarter is warm-up; then 110 at most, and 121 at the end.
    report = soak.SoakReport(memory_bytes=[10, 500, 110, 100, 100, 100, 121, 90])
    assert report.memory_growth == 1.1
