"""Calls of flash-attn's paged kernel against the padded attention, by a kernel that does what its manual says."""

from __future__ import annotations

import pytest
import torch

from adaflash_hf.generation import attention_kernels, packed_attention
from adaflash_hf.generation.packed_cache import PackedCache
from adaflash_hf.generation.packed_flash import PAGE_TOKENS, can_use_flash, flash_attention, plan_flash
from adaflash_hf.generation.visibility import Visibility


HEADS, KEY_HEADS, HEAD_DIM = 4, 2, 8


def reference_kernel(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    block_table: torch.Tensor,
) -> torch.Tensor:
    """`flash_attn_varlen_func` with paged keys: `k` is `(num_pages, page_tokens, key_heads, head_dim)`, masks are
    aligned to the lower right corner, and a window of -1 has no limit."""
    assert {cu_seqlens_q.dtype, cu_seqlens_k.dtype, block_table.dtype} == {torch.int32}
    assert k.shape[1] == PAGE_TOKENS
    left, right = window_size
    outputs = []
    query_counts, key_counts = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
    assert (max(query_counts), max(key_counts)) == (max_seqlen_q, max_seqlen_k)
    for index, (queries, keys, values) in enumerate(
        zip(
            q.split(query_counts),
            k[block_table.long()].flatten(1, 2),
            v[block_table.long()].flatten(1, 2),
            strict=True,
        )
    ):
        rows, total = query_counts[index], key_counts[index]
        keys, values = (x[:total].repeat_interleave(HEADS // KEY_HEADS, dim=1).transpose(0, 1) for x in (keys, values))
        scores = queries.transpose(0, 1) @ keys.transpose(1, 2) * (softmax_scale or HEAD_DIM**-0.5)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        distance = torch.arange(total - rows, total)[:, None] - torch.arange(total)[None]
        hidden = distance < 0 if causal else torch.zeros_like(distance, dtype=torch.bool)
        if left >= 0:
            hidden = hidden | (distance > left)
        if right >= 0:
            hidden = hidden | (-distance > right)
        outputs.append((scores.masked_fill(hidden, float("-inf")).softmax(dim=-1) @ values).transpose(0, 1))
    return torch.cat(outputs)


def filled_cache(visibility: Visibility, lengths: list[int]) -> tuple[PackedCache, list[int]]:
    cache = PackedCache([visibility], device_type="cuda")  # arenas in whole pages, though on the CPU
    slots = [cache.allocate() for _ in lengths]
    for slot, length in zip(slots, lengths, strict=True):
        for begin in range(0, length, 300):
            write(cache, [slot], [min(300, length - begin)])
            cache.finish()
    return cache, slots


def write(cache: PackedCache, slots: list[int], counts: list[int], contexts: list[int] | None = None) -> None:
    cache.begin(slots, counts, contexts)
    states = [torch.randn(1, KEY_HEADS, sum(counts) + sum(contexts or []), HEAD_DIM) for _ in range(2)]
    cache.update(*states, 0)


@pytest.mark.parametrize(
    "visibility", [Visibility(), Visibility(True, 40), Visibility(False), Visibility(False, 40)], ids=str
)
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_same_as_padded_attention(visibility: Visibility, softcap: float | None) -> None:
    torch.manual_seed(0)
    cache, slots = filled_cache(visibility, [5, 700, 260, 30])
    order = [slots[index] for index in (2, 0, 3, 1)]
    write(cache, order, [3, 1, 5, 2], [2, 0, 1, 0])
    plan = cache.step.plan(0)  # type: ignore[union-attr]
    rows = torch.randn(11, HEADS, HEAD_DIM)
    actual = flash_attention(plan, 0, rows, 0.4, softcap, kernel=reference_kernel)
    scoring = attention_kernels.Scoring(0.4, softcap, None)
    torch.testing.assert_close(actual, packed_attention._attend(plan, 0, rows, scoring), rtol=1e-5, atol=1e-5)


def test_plan_by_hand() -> None:
    """Rooms of 256 and 512: one page per row, and two."""
    cache, slots = filled_cache(Visibility(), [5, 300, 30, 400])
    write(cache, [slots[3], slots[0], slots[2], slots[1]], [2, 1, 3, 1])
    calls = {call.room: call for call in plan_flash(cache.step.plan(0))}  # type: ignore[union-attr]
    assert {room: call.queries.values for room, call in calls.items()} == {512: [0, 1, 6], 256: [2, 3, 4, 5]}
    assert calls[512].query_ends.values == [0, 2, 3]
    assert calls[512].key_ends.values == [0, 402, 402 + 301]
    rows = {slot: cache.groups[0].places[slot].row for slot in slots}
    assert calls[512].pages.values == [page for slot in (3, 1) for page in (2 * rows[slot], 2 * rows[slot] + 1)]
    assert calls[256].pages.values == [rows[0], rows[2]]


def test_not_on_the_cpu() -> None:
    rows = torch.randn(3, HEADS, HEAD_DIM, dtype=torch.bfloat16)
    assert not can_use_flash(rows, rows)
