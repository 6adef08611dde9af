"""Packed attention by flash-attn's variable-length kernel with paged keys, on CUDA where it is installed.

An arena's rows are runs of pages, so that the kernel reads every request where it lies: one call per arena, without
padding and masks.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from itertools import accumulate
from typing import Any

import torch

from .packed_plan import GroupPlan, OnDevice


__all__ = ["FlashCall", "can_use_flash", "flash_attention", "has_varlen_kernel", "plan_flash"]

# flash-attn reads keys in pages of a multiple of this many tokens.
PAGE_TOKENS = 256
WIDEST_HEAD = 256


@cache
def _varlen_kernel() -> Callable[..., Any] | None:
    try:
        return importlib.import_module("flash_attn").flash_attn_varlen_func
    except ImportError:
        return None


def has_varlen_kernel() -> bool:
    """Whether flash-attn is installed."""
    return _varlen_kernel() is not None


def can_use_flash(rows: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether the kernel takes these queries and values.

    Args:
        rows (`torch.Tensor` of shape `(num_rows, num_heads, head_dim)`): Queries.
        values (`torch.Tensor`): Their last dimension counts.
    """
    return (
        rows.is_cuda
        and rows.dtype in (torch.float16, torch.bfloat16)
        and rows.shape[-1] == values.shape[-1] <= WIDEST_HEAD
        and has_varlen_kernel()
    )


class FlashCall:
    """One call of the kernel: all requests of one arena.

    Attributes:
        room (`int`): Which arena.
        queries (`OnDevice`): Packed queries in the order of the call.
        query_ends, key_ends (`OnDevice`): Running totals from zero on.
        most_queries, most_keys (`int`): Of any request.
        pages (`OnDevice`): For each request the pages of its row, one after the other.
        num_requests (`int`): Requests of the call.
    """

    def __init__(self, room: int, queries: list[int], counts: list[int], keys: list[int], rows: list[int]):
        pages_per_row = room // PAGE_TOKENS
        self.room = room
        self.num_requests = len(counts)
        self.queries = OnDevice(queries)
        self.query_ends = OnDevice(list(accumulate(counts, initial=0)))
        self.key_ends = OnDevice(list(accumulate(keys, initial=0)))
        self.most_queries, self.most_keys = max(counts), max(keys)
        self.pages = OnDevice([row * pages_per_row + page for row in rows for page in range(pages_per_row)])


def plan_flash(plan: GroupPlan) -> list[FlashCall]:
    """The calls that answer all queries of a plan, one per arena."""
    offsets = list(accumulate((segment.rows for segment in plan.segments), initial=0))
    by_arena: dict[int, list[int]] = {}
    for index, place in enumerate(plan.places):
        if plan.segments[index].rows:
            by_arena.setdefault(place.arena.room, []).append(index)
    return [
        FlashCall(
            room,
            queries=[row for index in members for row in range(offsets[index], offsets[index + 1])],
            counts=[plan.segments[index].rows for index in members],
            keys=[plan.segments[index].end - plan.places[index].start for index in members],
            rows=[plan.places[index].row for index in members],
        )
        for room, members in by_arena.items()
    ]


def flash_attention(
    plan: GroupPlan,
    layer: int,
    rows: torch.Tensor,
    scaling: float | None,
    softcap: float | None,
    kernel: Callable[..., Any] | None = None,
) -> torch.Tensor:
    """
    Args:
        plan (`GroupPlan`): What the forward pass brings.
        layer (`int`): The layer.
        rows (`torch.Tensor` of shape `(num_rows, num_heads, head_dim)`): Queries.
        scaling (`float`, *optional*): Factor on the scores.
        softcap (`float`, *optional*): c in `c * tanh(scores / c)`.
        kernel (`Callable`, *optional*): Another `flash_attn_varlen_func`.

    Returns:
        `torch.Tensor` of shape `(num_rows, num_heads, head_dim)`: The attention's output.
    """
    kernel = kernel or _varlen_kernel()
    assert kernel is not None
    visibility = plan.group.visibility
    window = (-1, -1) if visibility.window is None else (visibility.window - 1, 0 if visibility.is_causal else -1)
    if plan.flash_calls is None:
        plan.flash_calls = plan_flash(plan)
    device = rows.device
    output = torch.empty_like(rows, memory_format=torch.contiguous_format)
    for call in plan.flash_calls:
        buffer = plan.group.arenas[call.room].layers[layer]
        queries = call.queries.on(device)
        answer = kernel(
            rows.index_select(0, queries),
            buffer.keys.view(-1, PAGE_TOKENS, *buffer.keys.shape[2:]),
            buffer.values.view(-1, PAGE_TOKENS, *buffer.values.shape[2:]),
            cu_seqlens_q=call.query_ends.on(device, torch.int32),
            cu_seqlens_k=call.key_ends.on(device, torch.int32),
            max_seqlen_q=call.most_queries,
            max_seqlen_k=call.most_keys,
            softmax_scale=scaling,
            causal=visibility.is_causal,
            window_size=window,
            softcap=softcap or 0.0,
            block_table=call.pages.on(device, torch.int32).view(call.num_requests, -1),
        )
        output.index_copy_(0, queries, answer)
    return output
