"""Attention of many blocks that share a forward pass, without the scores that no row may see.

A dense mask over [context | rows of all blocks] hides nearly all of the second part: a row sees its own block's rows
and no others. Here each row is compared with the context and with its own block alone, so that work and memory grow
with rows x (context + block) in place of rows x (context + rows). Registered with transformers under `ATTENTION_NAME`.

Its mask is `[batch, 1, rows, context + block]`: true where a row sees a position of the context, or a row of its own
block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface


__all__ = ["ATTENTION_NAME", "block_attention_forward"]

# transformers takes any name with "flash" in it for flash attention.
ATTENTION_NAME = "drafter_blocks"
# Scores of one layer, in float32; more are computed some blocks at a time, and again for their gradient.
_SCORE_BYTES = 256 * 2**20


def block_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """
    Attends with the signature of transformers' attention interface.

    Args:
        module (`torch.nn.Module`):
            The attention layer; says whether it is training.
        query (`torch.Tensor` of shape `[batch, heads, rows, head_dim]`):
            Queries of the block rows.
        key (`torch.Tensor` of shape `[batch, kv_heads, context + rows, head_dim]`), value (likewise):
            Of the context and then of the block rows.
        attention_mask (`torch.Tensor` of shape `[batch, 1, rows, context + block_size]`):
            True where a row sees a position of the context, or a row of its block.
        scaling (`float`):
            Of the scores.
        dropout (`float`, *optional*, defaults to 0.0):
            Of the weights.

    Returns:
        `tuple[torch.Tensor, None]`: `[batch, rows, heads, head_dim]`, and no weights.
    """
    batch, heads, rows, head_dim = query.shape
    kv_heads, context = key.shape[1], key.shape[2] - rows
    block = attention_mask.shape[-1] - context
    blocks, groups = rows // block, heads // kv_heads
    # The heads that share keys become rows of one product: [batch, kv_heads, blocks, groups x block, head_dim].
    query = query.view(batch, kv_heads, groups, blocks, block, head_dim).transpose(2, 3).flatten(3, 4)
    seen = attention_mask.view(batch, 1, blocks, 1, block, -1)
    past = key[:, :, :context], value[:, :, :context]
    own = tuple(states[:, :, context:].unflatten(2, (blocks, block)) for states in (key, value))

    def attend(part: slice) -> torch.Tensor:
        return _attend(
            query[:, :, part] * scaling,
            *past,
            own[0][:, :, part],
            own[1][:, :, part],
            seen[:, :, part],
            dropout if module.training else 0.0,
        )

    at_once = max(1, _SCORE_BYTES // (4 * batch * heads * block * attention_mask.shape[-1]))
    parts = [slice(begin, begin + at_once) for begin in range(0, blocks, at_once)]
    if len(parts) == 1:
        output = attend(parts[0])
    else:
        output = torch.cat([checkpoint(attend, part, use_reentrant=False) for part in parts], dim=2)
    # [batch, kv_heads, blocks, groups, block, head_dim]: rows to the front, heads together.
    output = output.unflatten(3, (groups, block)).permute(0, 2, 4, 1, 3, 5)
    return output.reshape(batch, rows, heads, head_dim), None


def _attend(
    query: torch.Tensor,
    past_key: torch.Tensor,
    past_value: torch.Tensor,
    own_key: torch.Tensor,
    own_value: torch.Tensor,
    seen: torch.Tensor,
    dropout: float,
) -> torch.Tensor:
    """One softmax over context and own block; `query` is `[batch, kv_heads, blocks, groups x block, head_dim]`."""
    context, block = past_key.shape[2], own_key.shape[3]
    past_scores = query.flatten(2, 3) @ past_key.transpose(2, 3)
    scores = torch.cat([past_scores.view(*query.shape[:-1], context), query @ own_key.transpose(3, 4)], dim=-1)
    visible = seen.expand(-1, -1, -1, query.shape[3] // block, -1, -1).flatten(3, 4)
    weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1, dtype=torch.float32).to(own_value.dtype)
    weights = torch.nn.functional.dropout(weights, dropout)
    past_weights, own_weights = weights.split([context, block], dim=-1)
    past_output = past_weights.flatten(2, 3) @ past_value
    return past_output.view(*query.shape) + own_weights @ own_value


AttentionInterface.register(ATTENTION_NAME, block_attention_forward)
