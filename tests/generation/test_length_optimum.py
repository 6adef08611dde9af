"""The chosen lengths against all possible ones."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from adaflash_hf.generation.length_optimum import best_lengths, mean_of_best


def random_survival(rng: np.random.Generator, requests: int, slots: int) -> np.ndarray:
    return np.cumprod(rng.uniform(0.1, 1.0, (requests, slots)), axis=1)


def expected_tokens(survival: np.ndarray, lengths: tuple[int, ...], num_active: int) -> float:
    return num_active + sum(row[: length - 1].sum() for row, length in zip(survival, lengths, strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_packed_equals_brute_force(seed: int) -> None:
    rng = np.random.default_rng(seed)
    survival = random_survival(rng, 3, 4)
    longest = rng.integers(1, 6, 3).tolist()
    num_active = 3 + int(rng.integers(0, 3))
    # Any rising cost, with flat parts and jumps.
    seconds = 0.5 + np.cumsum(rng.choice([0.0, 0.05, 0.4], 3 * 4 + 1))
    choice = best_lengths(survival, longest, num_active, seconds, is_packed=True)
    rates = {
        lengths: expected_tokens(survival, lengths, num_active) / seconds[sum(lengths) - 3]
        for lengths in itertools.product(*(range(1, bound + 1) for bound in longest))
    }
    assert choice.tok_per_s == pytest.approx(max(rates.values()))
    assert rates[tuple(choice.lengths)] == pytest.approx(max(rates.values()))


@pytest.mark.parametrize("seed", range(20))
def test_padded_equals_brute_force(seed: int) -> None:
    rng = np.random.default_rng(seed)
    survival = random_survival(rng, 4, 5)
    longest = rng.integers(1, 7, 4).tolist()
    seconds = 0.5 + np.cumsum(rng.choice([0.0, 0.05, 0.4], 6))
    choice = best_lengths(survival, longest, 4, seconds, is_packed=False)
    rates = []
    for width in range(1, 7):
        lengths = tuple(min(width, bound) for bound in longest)
        rates.append(expected_tokens(survival, lengths, 4) / seconds[width - 1])
    assert choice.tok_per_s == pytest.approx(max(rates))
    assert rates[max(choice.lengths) - 1] == pytest.approx(max(rates))


@pytest.mark.parametrize("seed", range(20))
def test_uneven_lengths_are_weighed(seed: int) -> None:
    """Against all lengths there are, where rows up to the longest of them cost something too."""
    rng = np.random.default_rng(seed)
    survival = random_survival(rng, 3, 3)
    seconds, padding_s = 1.0 + 0.2 * np.arange(10), rng.choice([0.01, 0.05, 0.15])
    rates = {
        lengths: expected_tokens(survival, lengths, 3)
        / (seconds[sum(lengths) - 3] + padding_s * (3 * max(lengths) - sum(lengths)))
        for lengths in itertools.product(range(1, 5), repeat=3)
    }
    choice = best_lengths(survival, [4, 4, 4], 3, seconds, True, padding_s)
    assert rates[tuple(choice.lengths)] == pytest.approx(max(rates.values()))
    assert choice.tok_per_s == pytest.approx(max(rates.values()))


@pytest.mark.parametrize("longest", [1, 3, 5])
def test_mean_over_rounds_of_one_request(longest: int) -> None:
    rng = np.random.default_rng(0)
    survival, seconds = random_survival(rng, 9, 4), 1.0 + 0.2 * np.arange(5)
    choices = [best_lengths(row[None], [longest], 1, seconds, is_packed=True) for row in survival]
    expected = np.mean([choice.tokens for choice in choices]), np.mean([choice.seconds for choice in choices])
    assert mean_of_best(survival, longest, seconds) == pytest.approx(expected)


def test_padding_makes_lengths_even() -> None:
    survival = np.array([[0.8, 0.6], [0.8, 0.1]])
    seconds = 1.0 + 0.2 * np.arange(5)
    assert best_lengths(survival, [3, 3], 2, seconds, True).lengths == [3, 2]
    # 3.6 / 1.4 beats 4.2 / (1.6 + 0.15), which 4.2 / 1.6 would have beaten
    assert best_lengths(survival, [3, 3], 2, seconds, True, padding_s=0.15).lengths == [2, 2]


def test_rows_for_nothing_are_taken_and_dear_ones_left() -> None:
    survival = np.array([[0.9, 0.8, 0.1], [0.3, 0.2, 0.1]])
    free = best_lengths(survival, [4, 4], 2, np.full(7, 1.0), is_packed=True)
    assert free.lengths == [4, 4]
    assert free.tokens == pytest.approx(2 + 0.9 + 0.8 + 0.1 + 0.3 + 0.2 + 0.1)
    dear = best_lengths(survival, [4, 4], 2, 1.0 + 10.0 * np.arange(7), is_packed=True)
    assert dear.lengths == [1, 1]
    # 0.25 s a row against one token a second: 0.9 and 0.8 pay, 0.3 does not
    some = best_lengths(survival, [4, 4], 2, 2.0 + 0.25 * np.arange(7), is_packed=True)
    assert some.lengths == [3, 1]


def test_others_that_do_not_draft_count_as_tokens() -> None:
    survival = np.array([[0.5]])
    seconds = np.array([1.0, 1.2])
    assert best_lengths(survival, [2], 1, seconds, is_packed=True).lengths == [2]  # 1.5 / 1.2 > 1 / 1
    assert best_lengths(survival, [2], 4, seconds, is_packed=True).lengths == [1]  # 4.5 / 1.2 < 4 / 1
