"""Queries and their keys: PyTorch's fused attention, or two matrix products where those are faster."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import nn

from ..cpu_arithmetic import multiplies_natively


__all__ = ["Scoring", "attend"]

# Rows of a call, those of all requests and of the query heads of a key head, from which on products are faster. In
# bfloat16 on a core with AVX512-BF16 they took 0.6 of the time of fused attention for 8 to 128 requests with one query
# each and SmolLM2-135M's heads (measured), and were no less exact: in both ways the model strays as far from float32.
FEWEST_ROWS = 24


class Scoring(NamedTuple):
    """What happens to the scores between queries and softmax.

    Attributes:
        scaling (`float`, *optional*): Factor; one over the root of `head_dim` by default.
        softcap (`float`, *optional*): c in `c * tanh(scores / c)`.
        sinks (`torch.Tensor` of shape `(num_heads,)`, *optional*): Attention sinks.
    """

    scaling: float | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


def attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scoring: Scoring
) -> torch.Tensor:
    """Attention with the rows of all query heads of a key head put one behind the other.

    Args:
        queries (`torch.Tensor` of shape `(num_requests, key_heads, rows * group_size, head_dim)`): Queries.
        keys, values (`torch.Tensor` of shape `(num_requests, key_heads, num_keys, head_dim)`): Keys and values.
        mask (`torch.Tensor`, *optional*): Added to the scores; broadcasts to them.
        scoring (`Scoring`): What else happens to the scores.

    Returns:
        `torch.Tensor` of the shape of `queries`, with the last dimension of `values`.
    """
    is_plain = scoring.softcap is None and scoring.sinks is None
    if is_plain and (queries.shape[0] * queries.shape[2] < FEWEST_ROWS or not _has_fast_products(queries)):
        return nn.functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scoring.scaling)
    return _by_products(queries, keys, values, mask, scoring)


def _has_fast_products(queries: torch.Tensor) -> bool:
    """Whether products of 16 bits beat fused attention, which repacks all keys for a handful of queries."""
    return queries.device.type == "cpu" and queries.dtype == torch.bfloat16 and _multiplies_bfloat16()


@cache
def _multiplies_bfloat16() -> bool:
    return torch.backends.mkldnn.is_available() and multiplies_natively(torch.bfloat16)


def _by_products(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scoring: Scoring
) -> torch.Tensor:
    """Two matrix products, with capped scores and attention sinks if need be."""
    scaling = queries.shape[-1] ** -0.5 if scoring.scaling is None else scoring.scaling
    # The longer operand first: the other one is the one that a product rearranges.
    scores = torch.matmul(keys, queries.transpose(2, 3)).transpose(2, 3)
    # Put in order while they are short: what follows walks along the keys, and does so slowly in the other order.
    scores = scores.contiguous().float() * scaling
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    if mask is not None:
        scores += mask
    if scoring.sinks is None:
        return torch.matmul(scores.softmax(dim=-1).to(values.dtype), values)
    requests, key_heads, rows, _ = scores.shape
    group_size = scoring.sinks.numel() // key_heads
    sinks = scoring.sinks.float().view(1, key_heads, 1, group_size)
    sinks = sinks.expand(requests, -1, rows // group_size, -1).reshape(requests, key_heads, rows, 1)
    weights = torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]
    return torch.matmul(weights.to(values.dtype), values)
