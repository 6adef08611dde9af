"""Acceptance rules on hand-made distributions."""

from __future__ import annotations

import pytest
import torch

from adaflash_hf.generation.acceptance import (
    ARGMAX_PIECE,
    count_leading_matches,
    greedy_tokens,
    rejection_sample,
    sample_tokens,
)


def one_hot(*tokens: int, vocab_size: int = 4) -> torch.Tensor:
    """A chain of certain distributions, shape `(1, len(tokens), vocab_size)`."""
    return torch.nn.functional.one_hot(torch.tensor([tokens]), vocab_size).float()


@pytest.mark.parametrize(
    ("drafts", "matches"),
    [([1, 2, 3], 3), ([1, 2, 0], 2), ([1, 0, 3], 1), ([0, 2, 3], 0), ([0, 0, 3], 0), ([], 0)],
)
def test_leading_matches(drafts: list[int], matches: int) -> None:
    assert count_leading_matches(drafts, [1, 2, 3, 1]) == matches


def test_sample_tokens_keeps_the_shape() -> None:
    assert sample_tokens(one_hot(2, 0, 3).expand(5, -1, -1)).tolist() == [[2, 0, 3]] * 5


def test_certain_drafts_are_all_accepted_and_followed_by_the_bonus() -> None:
    accepted, following = rejection_sample(torch.tensor([[1, 2]]), one_hot(1, 2), one_hot(1, 2, 3))
    assert (accepted.tolist(), following.tolist()) == ([2], [3])


def test_first_impossible_draft_is_replaced_by_the_target() -> None:
    accepted, following = rejection_sample(torch.tensor([[1, 2]]), one_hot(1, 2), one_hot(1, 0, 3))
    assert (accepted.tolist(), following.tolist()) == ([1], [0])
    accepted, following = rejection_sample(torch.tensor([[1, 2]]), one_hot(1, 2), one_hot(3, 2, 3))
    assert (accepted.tolist(), following.tolist()) == ([0], [3])


def test_equal_distributions_accept_everything() -> None:
    p = torch.tensor([0.1, 0.2, 0.3, 0.4]).expand(1000, 3, 4)
    drafts = sample_tokens(p[:, :2])
    accepted, _ = rejection_sample(drafts, p[:, :2], p)
    assert (accepted == 2).all()


def test_rates_and_result_by_hand() -> None:
    """q draws token 0 too seldom and 1 too often: 1 stands with probability 0.3 / 0.6, and only 0 replaces it."""
    torch.manual_seed(0)
    draws = 40_000
    p = torch.tensor([0.5, 0.3, 0.2, 0.0])
    q = torch.tensor([0.2, 0.6, 0.2, 0.0])
    drafts = sample_tokens(q.expand(draws, 1, 4))
    accepted, following = rejection_sample(drafts, q.expand(draws, 1, 4), p.expand(draws, 2, 4))
    accepted = accepted.bool()
    assert accepted[drafts[:, 0] != 1].all()
    assert accepted[drafts[:, 0] == 1].float().mean().item() == pytest.approx(0.5, abs=0.02)
    assert (following[~accepted] == 0).all()
    tokens = torch.where(accepted, drafts[:, 0], following)
    assert (tokens.bincount(minlength=4) / draws).tolist() == pytest.approx(p.tolist(), abs=0.01)
    # The bonus after an accepted draft has the distribution of its own position.
    assert (following[accepted].bincount(minlength=4) / accepted.sum()).tolist() == pytest.approx(
        p.tolist(), abs=0.015
    )


def test_no_draft_gives_the_bonus_alone() -> None:
    accepted, following = rejection_sample(torch.zeros(1, 0, dtype=torch.long), torch.zeros(1, 0, 4), one_hot(2))
    assert (accepted.tolist(), following.tolist()) == ([0], [2])


def test_underflowed_draft_probability_is_not_divided_by() -> None:
    q, p = torch.tensor([[[0.0, 1.0]]]), torch.tensor([[[0.5, 0.5], [0.0, 1.0]]])
    accepted, following = rejection_sample(torch.tensor([[0]]), q, p)
    assert (accepted.tolist(), following.tolist()) == ([1], [1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_greedy_token_is_the_first_of_equal_logits(dtype):
    logits = torch.tensor([[[1.0, 3.0, 3.0, 2.0], [float("-inf"), -5.0, -5.0, -6.0]]], dtype=dtype)
    assert greedy_tokens(logits).tolist() == [[1, 1]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("vocab_size", [4 * ARGMAX_PIECE, 4 * ARGMAX_PIECE + 1, 5 * ARGMAX_PIECE + 77])
def test_greedy_tokens_of_large_vocabularies_are_those_of_argmax(vocab_size: int, dtype: torch.dtype) -> None:
    """Wherever the largest is, and if there are several: at both ends, in two pieces, in the part that two share."""
    torch.manual_seed(0)
    logits = torch.randn(9, vocab_size).to(dtype)  # sixteen bits repeat often
    for row, places in enumerate(
        [[0], [vocab_size - 1], [ARGMAX_PIECE - 1, ARGMAX_PIECE], [vocab_size - 2, vocab_size - 1]]
    ):
        logits[row, places] = 9.0
    logits[4, vocab_size - ARGMAX_PIECE] = 9.0
    logits[5] = float("-inf")
    logits[6, [700, vocab_size - 5]] = float("nan")
    strided = torch.cat([logits, logits], dim=-1)[:, :vocab_size]
    for rows in (logits, strided, logits.view(3, 3, vocab_size)):
        assert torch.equal(greedy_tokens(rows), rows.argmax(dim=-1))
    assert greedy_tokens(logits[:0]).shape == (0,)
