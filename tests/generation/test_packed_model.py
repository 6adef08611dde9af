"""What packed target and drafter share."""

from __future__ import annotations

from tiny_models import tiny_target

from adaflash_hf.generation.packed_model import cache_bytes_per_layer
from adaflash_hf.generation.packed_target import PackedTarget


def test_memory_is_estimated_before_the_first_forward() -> None:
    target = tiny_target("llama")
    packed = PackedTarget(target)
    slot = packed.allocate()
    estimates = packed.bytes_per_token, packed.bytes_for(10)
    assert estimates == (4 * 2 * 2 * 8 * 4, 64 * 4 * 2 * 2 * 8 * 4)
    packed.forward([slot], [[5, 6]])
    assert (packed.bytes_per_token, packed.bytes_for(10)) == estimates
    assert packed.memory_bytes == packed.bytes_for(2)


def test_estimate_without_a_head_size() -> None:
    config = tiny_target("llama").config
    config.head_dim = None
    assert cache_bytes_per_layer(config, 2) == 2 * 2 * 8 * 2
