"""A target whose sampled text is a Markov chain of known transitions, and the chi-square test against them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from tiny_models import tiny_target
from transformers import PreTrainedModel


VOCAB_SIZE = 8


@cache
def chain_target() -> PreTrainedModel:
    """Without attention, the next token depends on the last one only."""
    chain = tiny_target(
        "llama", vocab_size=VOCAB_SIZE, num_hidden_layers=2, hidden_size=16, max_position_embeddings=4096
    )
    with torch.no_grad():
        for layer in chain.model.layers:
            layer.self_attn.o_proj.weight.zero_()
        chain.lm_head.weight.mul_(0.7)
    return chain


@torch.no_grad()
def transition_p_value(chain: PreTrainedModel, sequences: list[list[int]], warping: dict[str, Any]) -> float:
    """Of Pearson's test on all pairs of neighbours: given the first of a pair, the second is an independent draw."""
    output = chain.generate(
        torch.arange(VOCAB_SIZE)[:, None],
        attention_mask=torch.ones(VOCAB_SIZE, 1, dtype=torch.long),  # token 0 would be taken for padding
        max_new_tokens=1,
        do_sample=True,
        return_dict_in_generate=True,
        output_scores=True,
        **warping,
    )
    transitions = output.scores[0].double().softmax(dim=-1)
    pairs = torch.zeros(VOCAB_SIZE, VOCAB_SIZE, dtype=torch.float64)
    for ids in map(torch.tensor, sequences):
        pairs += torch.bincount(ids[:-1] * VOCAB_SIZE + ids[1:], minlength=VOCAB_SIZE**2).view_as(pairs)
    assert not pairs[transitions == 0].any(), "an impossible pair was drawn"
    expected = transitions * pairs.sum(dim=1, keepdim=True)
    is_counted = expected >= 5
    statistic = ((pairs - expected) ** 2 / expected)[is_counted].sum()
    # One constraint per row of which anything is counted; rows with rare cells left out have one more, which is safe.
    degrees = int(is_counted.sum()) - int(is_counted.any(dim=1).sum())
    return chi_square_tail(statistic, degrees)


def chi_square_tail(statistic: torch.Tensor, degrees: int) -> float:
    """Probability of a statistic at least this large under the chi-square distribution."""
    return float(torch.special.gammaincc(torch.tensor(degrees / 2, dtype=torch.float64), statistic.double() / 2))
