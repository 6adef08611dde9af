"""Slots of a packed cache, what a forward pass does to them, and what transformers may ask of it."""

from __future__ import annotations

import pytest
import torch

from adaflash_hf.errors import InvalidInputError
from adaflash_hf.generation.packed_cache import PackedCache
from adaflash_hf.generation.visibility import Visibility


FULL, SLIDING = Visibility(), Visibility(True, 8)


def states(rows: int, heads: int = 2, head_dim: int = 4) -> torch.Tensor:
    return torch.randn(1, heads, rows, head_dim)


def run(cache: PackedCache, slots: list[int], counts: list[int], layers: int = 2) -> None:
    cache.begin(slots, counts)
    for layer in range(layers):
        new = states(sum(counts))
        cache.update(new, new, layer)
    cache.finish()


def test_lengths() -> None:
    cache = PackedCache([FULL, SLIDING])
    first, second = cache.allocate(), cache.allocate()
    run(cache, [first], [5])
    run(cache, [second, first], [3, 1])
    assert (cache.length(first), cache.length(second), cache.num_slots) == (6, 3, 2)
    cache.truncate(first, 4)
    assert cache.length(first) == 4
    cache.release(first)
    assert cache.num_slots == 1
    assert cache.allocate() not in (first, second)  # a handle kept too long is noticed, not reused


def test_context_stays_and_the_block_goes() -> None:
    cache = PackedCache([FULL])
    slot = cache.allocate()
    cache.begin([slot], [4], [3])
    cache.update(states(7), states(7), 0)
    cache.finish(keep_rows=False)
    assert cache.length(slot) == 3


def test_a_forward_that_fails_leaves_no_trace() -> None:
    cache = PackedCache([FULL])
    slot = cache.allocate()
    run(cache, [slot], [5], layers=1)
    cache.begin([slot], [4])
    cache.abandon()
    assert cache.length(slot) == 5


def test_memory() -> None:
    """Two heads of four float32 are 64 bytes of keys and values per token and layer; rooms are powers of two."""
    cache = PackedCache([FULL, SLIDING], layer_bytes_per_token=999)
    assert cache.bytes_per_token == 999
    slot = cache.allocate()
    run(cache, [slot], [70])
    assert cache.bytes_per_token == 64
    assert cache.bytes_for(70) == 64 * (128 + 64)
    run(cache, [slot], [1])  # the sliding layer gives back what only the long chunk needed
    assert cache.memory_bytes == cache.bytes_for(71)
    cache.release(slot)
    assert cache.memory_bytes == 0


def test_heads_of_keys_and_values_may_differ() -> None:
    cache = PackedCache([FULL])
    slot = cache.allocate()
    cache.begin([slot], [3])
    keys, values = states(3, head_dim=6), states(3, head_dim=2)
    cache.update(keys, values, 0)
    cache.finish()
    buffer = cache.groups[0].places[slot].arena.layers[0]
    torch.testing.assert_close(buffer.keys[0, :3], keys[0].transpose(0, 1))
    torch.testing.assert_close(buffer.values[0, :3], values[0].transpose(0, 1))


def test_buffers_made_in_inference_mode_are_written_outside() -> None:
    cache = PackedCache([FULL])
    slot = cache.allocate()
    with torch.inference_mode():
        run(cache, [slot], [3], layers=1)
    run(cache, [slot], [90], layers=1)
    with torch.inference_mode():
        run(cache, [slot], [1], layers=1)


class TestRefusals:
    def test_closed_slot(self) -> None:
        cache = PackedCache([FULL])
        slot = cache.allocate()
        cache.release(slot)
        for call in (cache.length, cache.release, lambda slot: cache.begin([slot], [1])):
            with pytest.raises(InvalidInputError, match=f"`slot` is {slot}, which is not open"):
                call(slot)

    def test_same_slot_twice(self) -> None:
        cache = PackedCache([FULL])
        slot = cache.allocate()
        with pytest.raises(InvalidInputError, match="pass different slots"):
            cache.begin([slot, slot], [1, 1])

    @pytest.mark.parametrize("length", [-1, 6])
    def test_truncate_outside(self, length: int) -> None:
        cache = PackedCache([FULL])
        slot = cache.allocate()
        run(cache, [slot], [5], layers=1)
        with pytest.raises(InvalidInputError, match=f"`length` is {length}, but slot 0 holds 5"):
            cache.truncate(slot, length)

    def test_truncate_beyond_the_window(self) -> None:
        cache = PackedCache([FULL, SLIDING])
        slot = cache.allocate()
        for _ in range(5):
            run(cache, [slot], [30])
        assert cache.can_truncate(slot, 121) and not cache.can_truncate(slot, 20)
        cache.truncate(slot, 121)
        with pytest.raises(InvalidInputError, match="a window of 8 do not hold"):
            cache.truncate(slot, 20)

    def test_batch_operations(self) -> None:
        with pytest.raises(NotImplementedError, match="use its slots"):
            PackedCache([FULL]).crop(-1)


def test_what_models_ask() -> None:
    cache = PackedCache([FULL, SLIDING])
    assert (len(cache), cache.get_seq_length(), cache.get_query_offset(1)) == (2, 0, 0)
    assert cache.get_mask_sizes(5, 1) == (5, 0)
    assert cache.is_sliding == [False, True]
    assert not cache.is_compileable
