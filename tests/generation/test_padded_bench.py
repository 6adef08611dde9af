"""Scratch steps have the rows they are said to have, and leave nothing behind."""

from __future__ import annotations

import pytest
from plain_comparison import exact_target, rows_per_forward
from tiny_models import tiny_drafter, tiny_target

from adaflash_hf.generation.padded_bench import PaddedRoundBench


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3_text", "qwen3_next"])
def test_steps(architecture: str) -> None:
    target = exact_target(architecture) if architecture == "qwen3" else tiny_target(architecture)
    # Recurrent layers are decoded one sequence at a time.
    sizes = (1,) if architecture == "qwen3_next" else (1, 3)
    bench = PaddedRoundBench(target, tiny_drafter(target), max(sizes))
    rows = rows_per_forward(target)
    for size in sizes:
        bench.run_draft(size)
        rows.clear()
        bench.run_target([1] * (size - 1) + [4])
        bench.run_target([1] * size)
        assert rows[0] == 4
        assert rows[-1] == 1
    bench.close()
    assert bench._batch is None


def test_fingerprint_tells_models_and_loops_apart() -> None:
    target = exact_target()
    one = PaddedRoundBench(target, tiny_drafter(target), 1).fingerprint()
    assert one == PaddedRoundBench(target, tiny_drafter(target, seed=5), 4).fingerprint()
    assert one != PaddedRoundBench(target, tiny_drafter(target, num_hidden_layers=1), 1).fingerprint()
    assert one["loop"] == "generate"
