"""Buffers with room to spare hold what a plain dynamic cache holds, whatever is done to it in between."""

from __future__ import annotations

import pytest
import torch
from plain_comparison import generate, prompt
from tiny_models import tiny_drafter, tiny_target
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from adaflash_hf.generation.appending_cache import AppendingLayer, append_in_place, appending_cache
from adaflash_hf.generation.cache_rollback import shift_rows


def states(batch: int, rows: int, head_dim: int = 4) -> torch.Tensor:
    return torch.randn(batch, 2, rows, head_dim)


def test_holds_what_a_dynamic_cache_holds() -> None:
    torch.manual_seed(0)
    caches: list[Cache] = [DynamicCache(), appending_cache()]
    for step in range(60):
        keys, values = states(3, 1 + step % 9), states(3, 1 + step % 9, head_dim=6)
        expected, actual = [cache.update(keys, values, layer_idx=0) for cache in caches]
        assert torch.equal(actual[0], expected[0])
        assert torch.equal(actual[1], expected[1])
        for cache in caches:
            if step % 2:
                cache.crop(-(step % 4))
            if step % 7 == 6:
                cache.layers[0].batch_select_indices(torch.tensor([2, 0, 1]))
            if step % 11 == 10:
                shift_rows(cache, [0, 1, 2])
        assert caches[0].get_seq_length() == caches[1].get_seq_length()
    for cache in caches:
        cache.reset()
        cache.update(states(1, 2), states(1, 2), layer_idx=0)
        assert cache.get_seq_length() == 2


def test_old_states_are_not_copied() -> None:
    cache = appending_cache()
    before, _ = cache.update(states(1, 10), states(1, 10), layer_idx=0)
    after, _ = cache.update(states(1, 8), states(1, 8), layer_idx=0)
    assert after.data_ptr() == before.data_ptr()
    cache.crop(-8)
    again, _ = cache.update(states(1, 3), states(1, 3), layer_idx=0)
    assert again.data_ptr() == before.data_ptr() and again.shape[-2] == 13


def test_buffers_of_inference_mode_are_left_to_it() -> None:
    cache = appending_cache()
    with torch.inference_mode():
        first, _ = cache.update(states(1, 4), states(1, 4), layer_idx=0)
    with torch.no_grad():
        both, _ = cache.update(states(1, 4), states(1, 4), layer_idx=0)
    assert torch.equal(both[:, :, :4], first)


def test_gradients_flow_as_through_a_dynamic_cache() -> None:
    cache = appending_cache()
    first, second = states(1, 2).requires_grad_(), states(1, 3).requires_grad_()
    cache.update(first, first, layer_idx=0)
    keys, _ = cache.update(second, second, layer_idx=0)
    (keys * keys).sum().backward()
    assert torch.equal(first.grad, 2 * first)
    assert torch.equal(second.grad, 2 * second)


def test_only_layers_that_copy_are_changed() -> None:
    cache = DynamicCache(config=tiny_target("gemma3_text").config)
    kinds = [type(layer) for layer in cache.layers]
    append_in_place(cache)
    assert DynamicLayer in kinds
    assert [type(layer) for layer in cache.layers] == [AppendingLayer if k is DynamicLayer else k for k in kinds]


@pytest.mark.parametrize("is_returned", [False, True])
def test_a_cache_that_is_returned_stays_as_it_was(is_returned: bool) -> None:
    target = tiny_target()
    made: list[Cache] = []
    prepare = target._prepare_cache_for_generation

    def remember(config: object, kwargs: dict, *args: object) -> None:
        prepare(config, kwargs, *args)
        made.append(kwargs.get("cache", kwargs.get("past_key_values")))

    target._prepare_cache_for_generation = remember  # type: ignore[method-assign]
    generate(target, prompt(), assistant_model=tiny_drafter(), max_new_tokens=6, return_dict_in_generate=is_returned)
    expected = DynamicLayer if is_returned else AppendingLayer
    assert {type(layer) for layer in made[-1].layers} == {expected}
