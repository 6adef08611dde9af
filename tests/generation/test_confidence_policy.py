"""Lengths from probabilities that are known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plain_comparison import assert_same_as_plain, prompt, ragged_batch, shared_target
from tiny_models import tiny_drafter

from adaflash_hf import ConfidencePolicy, InvalidInputError, RoundContext
from adaflash_hf.generation.draft_head import LikeliestTokens


# Products: 0.99, 0.9801, 0.9311 | 0.9, … | 1, 1, 1
PROBABILITIES = [[0.99, 0.99, 0.95], [0.9, 1.0, 1.0], [1.0, 1.0, 1.0]]


def with_head() -> Any:
    head = lambda states: SimpleNamespace(probabilities=torch.tensor(PROBABILITIES))  # noqa: E731
    return SimpleNamespace(confidence_head=head)


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ({}, [3, 2, 4]),
        ({"min_verify_length": 1}, [3, 1, 4]),
        ({"threshold": 0.9}, [4, 4, 4]),
        ({"threshold": 0.995}, [2, 2, 4]),
    ],
)
@pytest.mark.parametrize("source", ["head", "drafter"])
def test_products_against_the_threshold(kwargs: dict, expected: list[int], source: str) -> None:
    policy, context = ConfidencePolicy(**kwargs), RoundContext([9, 9, 9], 3)
    drafter = with_head() if source == "head" else SimpleNamespace(length_head=None)
    assert policy.needs_likeliest(drafter) == (source == "drafter")
    if source == "drafter":
        context.likeliest = LikeliestTokens(torch.zeros(3, 3, dtype=torch.long), torch.tensor(PROBABILITIES))
    assert policy.choose(drafter, torch.zeros(3, 4, 2), context) == expected


def test_budget_bounds_the_length() -> None:
    assert ConfidencePolicy().choose(with_head(), torch.zeros(3, 4, 2), RoundContext([2, 1, 3], 3)) == [2, 1, 3]


def test_a_given_head_is_used() -> None:
    policy = ConfidencePolicy(confidence_head=with_head().confidence_head)
    assert not policy.needs_likeliest(tiny_drafter())
    assert policy.verify_lengths(tiny_drafter(), torch.zeros(3, 4, 2), 4) == [3, 2, 4]


def test_arguments_out_of_range() -> None:
    with pytest.raises(InvalidInputError, match="`threshold` is 0"):
        ConfidencePolicy(threshold=0.0)
    with pytest.raises(InvalidInputError, match="`min_verify_length` is 0"):
        ConfidencePolicy(min_verify_length=0)
    with pytest.raises(InvalidInputError, match="needs_likeliest"):
        ConfidencePolicy().choose(tiny_drafter(), torch.zeros(1, 4, 2), RoundContext([4], 1))


@pytest.mark.parametrize("ragged", [False, True], ids=["one", "ragged"])
def test_generate_is_exact(ragged: bool) -> None:
    drafter = assert_same_as_plain(
        shared_target(),
        ragged_batch() if ragged else prompt(),
        drafting={"length_policy": "confidence"},
        max_new_tokens=20,
    )
    # The oracle's tokens have a probability of nearly one, wrong ones too.
    assert max(drafter.last_generation_stats.verify_lengths) > 2
