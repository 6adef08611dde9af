"""The verify lengths with the most expected tokens per second, for given acceptance and costs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


__all__ = ["LengthChoice", "best_lengths", "mean_of_best"]


# On CPUs matrix products are prepared anew for every number of rows, which takes a tenth of a round and more; numbers
# in steps are soon met again. Few rows are never left out for it.
_FEW_ROWS, _MANY_ROWS = 8, 32
_STEP, _STEP_OF_MANY = 4, 8


class LengthChoice:
    """
    Verify lengths and what is expected of them.

    Args:
        lengths (`list[int]`): Rows per drafted request, the anchor included.
        tokens (`float`): Tokens that all active requests are expected to commit.
        seconds (`float`): Expected length of the round.
    """

    __slots__ = ("lengths", "seconds", "tokens")

    def __init__(self, lengths: list[int], tokens: float, seconds: float):
        self.lengths, self.tokens, self.seconds = lengths, tokens, seconds

    @property
    def tok_per_s(self) -> float:
        """Expected tokens per second."""
        return self.tokens / self.seconds


def best_lengths(
    survival: np.ndarray,
    longest: Sequence[int],
    num_active: int,
    seconds_of_rows: np.ndarray,
    is_packed: bool,
    padding_s: float = 0.0,
) -> LengthChoice:
    """
    Chooses verify lengths, all ones included.

    Rows that the target gets for nothing are taken; in a packed batch those most likely to be accepted come first,
    whichever request they belong to. As acceptance never rises along a block, the best rows of any number are always
    the first drafts of each request, so the greedy order is optimal for every total, and all totals are compared, and
    where uneven lengths cost more than even ones, under every bound on the longest.

    Args:
        survival (`np.ndarray` of shape `(num_drafted, draft_length)`): Probability that a slot is accepted.
        longest (`Sequence[int]`): Per drafted request, the largest verify length allowed.
        num_active (`int`): Requests of the target's forward; those that did not draft bring one row.
        seconds_of_rows (`np.ndarray`):
            Packed: entry i is the cost of a round with i drafts in all. Padded: with i drafts for each request.
        is_packed (`bool`): Whether rows cost one by one.
        padding_s (`float`, *optional*):
            Packed: seconds that the attention spends on each row that a request has fewer than the longest of them.

    Returns:
        `LengthChoice`: The best lengths.
    """
    draft_length = survival.shape[1]
    bounds = np.asarray(longest)
    allowed = np.arange(draft_length) < bounds[:, None] - 1
    gains = np.where(allowed, survival, 0.0)
    if not is_packed:
        tokens = num_active + np.concatenate([[0.0], gains.sum(axis=0).cumsum()])
        drafts = int(np.argmax(tokens / seconds_of_rows[: draft_length + 1]))
        return LengthChoice(
            np.minimum(bounds, drafts + 1).tolist(), float(tokens[drafts]), float(seconds_of_rows[drafts])
        )
    most = min(max(int(bounds.max(initial=1)) - 1, 1), draft_length)
    bounds_on_drafts = range(1, most + 1) if padding_s else [most]
    choices = [_best_packed(gains[:, :most], num_active, seconds_of_rows, padding_s) for most in bounds_on_drafts]
    return max(choices, key=lambda choice: choice.tok_per_s)


def mean_of_best(survival: np.ndarray, longest: int, seconds_of_rows: np.ndarray) -> tuple[float, float]:
    """
    What rounds of one request each bring on average, with the best length for each.

    Args:
        survival (`np.ndarray` of shape `(num_rounds, draft_length)`): Probability that a slot is accepted.
        longest (`int`): The largest verify length allowed.
        seconds_of_rows (`np.ndarray` of shape `(draft_length + 1,)`): Entry i is the cost of a round with i drafts.

    Returns:
        `tuple[float, float]`: Expected tokens and seconds of a round.
    """
    tokens = 1 + np.cumsum(survival[:, : longest - 1], axis=1)
    tokens = np.concatenate([np.ones((len(survival), 1)), tokens], axis=1)
    seconds = seconds_of_rows[:longest]
    best = np.argmax(tokens / seconds, axis=1)
    return float(tokens[np.arange(len(survival)), best].mean()), float(seconds[best].mean())


def _best_packed(gains: np.ndarray, num_active: int, seconds_of_rows: np.ndarray, padding_s: float) -> LengthChoice:
    """The best lengths where each request has `gains.shape[1]` drafts at most, and is padded to as many."""
    num_drafted, most = gains.shape
    # Ties keep their order, so a slot never comes before an earlier one of its own block.
    order = np.argsort(-gains, axis=None, kind="stable")
    order = order[: int(np.count_nonzero(gains))]
    tokens = num_active + np.concatenate([[0.0], gains.ravel()[order].cumsum()])
    seconds = seconds_of_rows[: len(tokens)] + padding_s * (num_drafted * most - np.arange(len(tokens)))
    seconds[0] = seconds_of_rows[0]
    drafts = int(np.argmax(tokens / seconds))
    drafts = max(_step_below(num_active + drafts) - num_active, 0)
    counts = np.bincount(order[:drafts] // most, minlength=num_drafted)
    return LengthChoice((counts + 1).tolist(), float(tokens[drafts]), float(seconds[drafts]))


def _step_below(rows: int) -> int:
    """The largest number of rows, at most so many, that is a whole number of steps."""
    if rows <= _FEW_ROWS:
        return rows
    return rows - rows % (_STEP if rows <= _MANY_ROWS else _STEP_OF_MANY)
