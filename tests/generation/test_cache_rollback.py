"""Cropping, realigning and snapshotting caches whose contents are numbers one can follow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plain_comparison import exact_target
from tiny_models import tiny_target
from transformers import DynamicCache, PreTrainedConfig, StaticCache
from transformers.cache_utils import DynamicSlidingWindowLayer, EncoderDecoderCache, LinearAttentionLayer, StaticLayer

from adaflash_hf import UnsupportedGenerationError
from adaflash_hf.generation.cache_rollback import (
    check_cache_can_roll_back,
    has_linear_attention,
    remove_slots,
    restore_recurrent,
    rows_by_shift,
    select_cache_rows,
    shift_rows,
    start_recording,
    stop_recording,
    take_recurrent_snapshot,
    working_cache,
    write_back,
)


def states(*rows: list[int]) -> torch.Tensor:
    """Keys or values `(len(rows), 1, slots, 1)`."""
    return torch.tensor(rows, dtype=torch.float32)[:, None, :, None]


def config(*layer_types: str, window: int = 4) -> PreTrainedConfig:
    return tiny_target(
        "gemma3_text", layer_types=list(layer_types), num_hidden_layers=len(layer_types), sliding_window=window
    ).config


def contents(cache: Any, layer_idx: int = 0) -> list[list[int]]:
    layer = cache.layers[layer_idx]
    assert torch.equal(layer.values, -layer.keys)
    return layer.keys[:, 0, :, 0].int().tolist()


def filled(cache: Any, *rows: list[int]) -> Any:
    for layer_idx in range(len(cache.layers)):
        cache.update(states(*rows), -states(*rows), layer_idx)
    return cache


def test_remove_slots_of_full_attention() -> None:
    cache = filled(DynamicCache(config=config("full_attention")), [1, 2, 3, 4])
    remove_slots(cache, 0)
    assert contents(cache) == [[1, 2, 3, 4]]
    remove_slots(cache, 3)
    assert contents(cache) == [[1]]


def test_remove_slots_of_sliding_attention() -> None:
    cache = filled(DynamicCache(config=config("sliding_attention")), [1, 2, 3, 4, 5, 6])
    recording = start_recording(cache)
    assert contents(cache) == [[4, 5, 6]]
    filled(cache, [7, 8])
    assert contents(cache) == [[4, 5, 6, 7, 8]]
    remove_slots(cache, 1)
    assert contents(cache) == [[5, 6, 7]]
    assert cache.get_seq_length() == 7
    filled(cache, [9, 10])
    remove_slots(cache, 0)
    assert contents(cache) == [[7, 9, 10]]
    stop_recording(recording)
    assert not cache.layers[0].record_past


def test_recording_that_was_on_stays_on() -> None:
    cache = DynamicCache(config=config("sliding_attention", "full_attention"))
    cache.layers[0].record_past = True
    stop_recording(start_recording(cache))
    assert cache.layers[0].record_past


def test_rows_by_shift() -> None:
    assert rows_by_shift([2, 0, -1, 2]) == {2: [0, 3], -1: [2]}


def test_shift_rows() -> None:
    cache = filled(DynamicCache(config=config("full_attention", "full_attention")), [1, 2, 3], [4, 5, 6], [7, 8, 9])
    shift_rows(cache, [1, 0, -1])
    for layer_idx in range(2):
        assert contents(cache, layer_idx) == [[3, 1, 2], [4, 5, 6], [8, 9, 7]]


def test_shift_rows_of_a_cropped_cache() -> None:
    cache = filled(DynamicCache(config=config("full_attention")), [1, 2, 3, 99], [4, 5, 6, 99])
    cache.crop(-1)
    shift_rows(cache, [0, 2])
    assert contents(cache) == [[1, 2, 3], [5, 6, 4]]


def test_select_rows() -> None:
    cache = filled(DynamicCache(config=config("full_attention")), [1], [2], [3])
    select_cache_rows(cache, torch.tensor([0, 2]))
    assert contents(cache) == [[1], [3]]


def test_recurrent_states_come_back() -> None:
    layer = LinearAttentionLayer()
    cache = DynamicCache()
    cache.layers = [layer]
    assert has_linear_attention(cache)
    layer.update_conv_state(torch.ones(1, 2, 3))
    layer.update_recurrent_state(torch.full((1, 2), 5.0))
    snapshots = take_recurrent_snapshot(cache)
    layer.update_conv_state(torch.zeros(1, 2, 3))
    layer.update_recurrent_state(torch.full((1, 2), 6.0))
    restore_recurrent(snapshots)
    assert layer.conv_states[0].tolist() == [[[1.0] * 3] * 2]
    assert layer.recurrent_states[0].tolist() == [[5.0, 5.0]]


class TestWorkingCache:
    def test_dynamic_cache_is_used_itself(self) -> None:
        cache = DynamicCache(config=config("full_attention"))
        for batch_size in (1, 3):
            assert working_cache(cache, config("full_attention"), batch_size, is_returned=True) is cache

    def test_static_cache_of_one_sequence(self) -> None:
        own = config("full_attention")
        cache = StaticCache(config=own, max_cache_len=8)
        working = working_cache(cache, own, 1, is_returned=True)
        assert (working is cache) == hasattr(StaticLayer, "crop")

    def test_warm_static_cache_of_a_batch_and_back(self) -> None:
        own = config("full_attention", "full_attention")
        cache = filled(StaticCache(config=own, max_cache_len=6), [1, 2], [3, 4])
        working = working_cache(cache, own, 2, is_returned=True)
        assert type(working) is DynamicCache
        assert contents(working, 1) == [[1, 2], [3, 4]]
        filled(working, [5], [6])
        write_back(working, cache)
        assert int(cache.get_seq_length()) == 3
        assert contents(cache, 1) == [[1, 2, 5, 0, 0, 0], [3, 4, 6, 0, 0, 0]]

    def test_static_sliding_layers(self) -> None:
        own = config("sliding_attention", "full_attention")
        cache = StaticCache(config=own, max_cache_len=12)
        assert type(working_cache(cache, own, 2, is_returned=False)) is DynamicCache
        with pytest.raises(UnsupportedGenerationError, match="StaticSlidingWindowLayer"):
            working_cache(cache, own, 2, is_returned=True)


class TestRefusals:
    @pytest.mark.parametrize(
        ("cache", "message"),
        [
            (None, "`use_cache` is False"),
            (((1, 2),), "`cache` is a tuple"),
            (EncoderDecoderCache(DynamicCache(), DynamicCache()), "EncoderDecoderCache"),
        ],
    )
    def test_no_usable_cache(self, cache: Any, message: str) -> None:
        with pytest.raises(UnsupportedGenerationError, match=message):
            check_cache_can_roll_back(cache, 1, use_cache=False)

    def test_target_without_a_cache(self) -> None:
        with pytest.raises(UnsupportedGenerationError, match="This target makes no `Cache`"):
            check_cache_can_roll_back(None, 1)

    def test_layer_that_cannot_be_cropped(self) -> None:
        class Frozen(DynamicSlidingWindowLayer):
            is_croppable = False

        cache = DynamicCache()
        cache.layers = [Frozen(sliding_window=4)]
        with pytest.raises(UnsupportedGenerationError, match="Frozen, which cannot forget"):
            check_cache_can_roll_back(cache, 1)

    def test_layer_that_cannot_be_realigned(self) -> None:
        class Special(DynamicSlidingWindowLayer):
            pass

        cache = DynamicCache()
        cache.layers = [Special(sliding_window=4)]
        assert check_cache_can_roll_back(cache, 1) is cache
        with pytest.raises(UnsupportedGenerationError, match="Special and the batch holds 2"):
            check_cache_can_roll_back(cache, 2)

    def test_offloaded_batch(self) -> None:
        cache = DynamicCache(config=config("full_attention"))
        cache.offloading = True
        assert check_cache_can_roll_back(cache, 1) is cache
        with pytest.raises(UnsupportedGenerationError, match="`cache` is offloaded and the batch holds 2"):
            check_cache_can_roll_back(cache, 2)

    def test_recurrent_layers_only(self) -> None:
        cache = DynamicCache()
        cache.layers = [LinearAttentionLayer()]
        with pytest.raises(UnsupportedGenerationError, match="only recurrent layers"):
            check_cache_can_roll_back(cache, 1)


def test_hybrid_cache_is_accepted() -> None:
    cache = DynamicCache(config=exact_target("qwen3_next").config)
    assert check_cache_can_roll_back(cache, 4) is cache
    assert has_linear_attention(cache)
