"""What packed target and drafter share."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

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


def test_estimate_where_layers_have_different_sizes() -> None:
    layers = [SimpleNamespace(num_key_value_heads=2, head_dim=8), SimpleNamespace(num_key_value_heads=4, head_dim=16)]
    config: Any = SimpleNamespace(is_heterogeneous=True, per_layer_config=layers)
    assert cache_bytes_per_layer(config, 2) == 2 * 4 * 16 * 2
