"""Both ways of attending, against attention in float64."""

from __future__ import annotations

import pytest
import torch

from adaflash_hf.generation import attention_kernels
from adaflash_hf.generation.attention_kernels import FEWEST_ROWS, Scoring, attend


REQUESTS, KEY_HEADS, GROUP_SIZE, NUM_KEYS, HEAD_DIM, VALUE_DIM = 8, 2, 3, 21, 16, 12
ROWS = 2 * GROUP_SIZE


def states(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values; the last two as views into buffers with room for more, as those of requests are."""
    torch.manual_seed(0)
    queries = torch.randn(REQUESTS, KEY_HEADS, ROWS, HEAD_DIM).to(dtype)
    keys = torch.randn(REQUESTS, NUM_KEYS + 11, KEY_HEADS, HEAD_DIM).to(dtype)
    values = torch.randn(REQUESTS, NUM_KEYS + 11, KEY_HEADS, VALUE_DIM).to(dtype)
    return queries, keys[:, :NUM_KEYS].transpose(1, 2), values[:, :NUM_KEYS].transpose(1, 2)


def padding_mask(dtype: torch.dtype) -> torch.Tensor:
    """Each request sees some keys fewer than the one before."""
    seen = torch.arange(NUM_KEYS) < NUM_KEYS - torch.arange(REQUESTS)[:, None]
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)[:, None, None]


def reference(queries, keys, values, mask, scoring: Scoring) -> torch.Tensor:
    scores = queries.double() @ keys.double().transpose(2, 3) * (scoring.scaling or HEAD_DIM**-0.5)
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    if mask is not None:
        scores = scores + mask.double()
    if scoring.sinks is not None:
        # Rows of the query heads of a key head, one behind the other.
        sinks = scoring.sinks.double().view(1, KEY_HEADS, 1, GROUP_SIZE).expand(REQUESTS, -1, ROWS // GROUP_SIZE, -1)
        scores = torch.cat([scores, sinks.reshape(REQUESTS, KEY_HEADS, ROWS, 1)], dim=-1)
    return scores.softmax(dim=-1)[..., :NUM_KEYS] @ values.double()


@pytest.mark.parametrize("has_fast_products", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "scoring",
    [Scoring(), Scoring(scaling=0.3), Scoring(softcap=1.5), Scoring(sinks=torch.arange(6.0))],
    ids=["plain", "scaled", "softcap", "sinks"],
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_attention(dtype, tolerance, scoring, masked, has_fast_products, monkeypatch) -> None:
    monkeypatch.setattr(attention_kernels, "_has_fast_products", lambda queries: has_fast_products)
    queries, keys, values = states(dtype)
    mask = padding_mask(dtype) if masked else None
    output = attend(queries, keys, values, mask, scoring)
    assert output.dtype == dtype and output.shape == (REQUESTS, KEY_HEADS, ROWS, VALUE_DIM)
    expected = reference(queries, keys, values, mask, scoring)
    torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance)


def test_products_are_for_many_rows_of_bfloat16_on_processors_that_multiply_it(monkeypatch) -> None:
    monkeypatch.setattr(attention_kernels, "_multiplies_bfloat16", lambda: True)
    used: list[int] = []
    monkeypatch.setattr(
        attention_kernels, "_by_products", lambda queries, *rest: used.append(queries.shape[0]) or queries
    )
    for requests, dtype in ((8, torch.bfloat16), (8, torch.float32), (FEWEST_ROWS // ROWS - 1, torch.bfloat16)):
        queries = torch.randn(requests, KEY_HEADS, ROWS, HEAD_DIM).to(dtype)
        attend(queries, queries, queries, None, Scoring())
    assert used == [8]
