"""Where a block of accepted tokens is cut, case by case."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria

from adaflash_hf.generation.stopping import StopRules


class SumReaches(StoppingCriteria):
    """Stops row i once the sum of its ids reaches `limits[i]`; keeps what it was shown."""

    def __init__(self, *limits: int) -> None:
        self.limits = torch.tensor(limits)
        self.shown: list[list[list[int]]] = []
        self.scores: list[Any] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.shown.append(input_ids.tolist())
        self.scores.append(scores)
        return input_ids.sum(dim=1) >= self.limits


def prefixes_of(length: int, pending: dict[int, list[int]]) -> torch.Tensor:
    """Two rows: one of the ids 1, 1 and one of the ids 2, 2, each followed by what is pending."""
    rows = [[1, 1], [2, 2]]
    return torch.tensor([(row + pending.get(index, []) + [0] * length)[:length] for index, row in enumerate(rows)])


def cut(*criteria: StoppingCriteria, tokens: list[int], length: int = 2, row: int = 0, **kwargs: Any) -> Any:
    return StopRules(StoppingCriteriaList(criteria)).cut(tokens, length, row, prefixes_of, **kwargs)


EOS = EosTokenCriteria(eos_token_id=torch.tensor([8, 9]))


@pytest.mark.parametrize(
    ("tokens", "max_length", "expected"),
    [
        ([5, 6, 7], 100, (3, False)),
        ([5, 6, 7], 6, (3, False)),
        ([5, 6, 7], 5, (3, True)),
        ([5, 6, 7], 4, (2, True)),
        ([5, 6, 7], 3, (1, True)),
        ([8, 6, 7], 100, (1, True)),
        ([5, 9, 7], 100, (2, True)),
        ([5, 6, 9], 100, (3, True)),
        ([5, 6, 9], 4, (2, True)),
        ([9, 9, 9], 100, (1, True)),
    ],
)
def test_end_of_sequence_and_length(tokens: list[int], max_length: int, expected: tuple[int, bool]) -> None:
    assert cut(MaxLengthCriteria(max_length), EOS, tokens=tokens) == expected


def test_remaining() -> None:
    rules = StopRules(StoppingCriteriaList([MaxLengthCriteria(12), MaxLengthCriteria(10)]))
    assert rules.remaining(4) == 6
    assert StopRules(StoppingCriteriaList()).remaining(4) > 1_000_000


def test_criterion_is_asked_after_every_token_with_the_whole_batch() -> None:
    criterion = SumReaches(13, 0)
    assert cut(criterion, tokens=[5, 6, 7], row=0) == (2, True)
    assert criterion.shown == [[[1, 1, 5], [2, 2, 0]], [[1, 1, 5, 6], [2, 2, 0, 0]]]
    # The other row has its own limit, reached at once.
    assert cut(SumReaches(13, 0), tokens=[5, 6, 7], row=1) == (1, True)


def test_criterion_sees_the_token_that_ends_the_sequence() -> None:
    criterion = SumReaches(1000, 1000)
    assert cut(criterion, EOS, tokens=[5, 9, 7]) == (2, True)
    assert [rows[0] for rows in criterion.shown] == [[1, 1, 5], [1, 1, 5, 9]]


def test_scores_reach_the_criterion() -> None:
    criterion = SumReaches(1000, 1000)
    cut(criterion, tokens=[5, 6], scores_of=lambda count: tuple(range(count)))
    assert criterion.scores == [(0,), (0, 1)]
    cut(criterion, tokens=[5])
    assert criterion.scores[-1] is None


def test_row_independent_criteria_see_their_row_only(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []

    def record(self: Any, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        shapes.append(tuple(input_ids.shape))
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    monkeypatch.setattr(MaxTimeCriteria, "__call__", record)
    assert cut(MaxTimeCriteria(60.0), tokens=[5, 6], row=1) == (2, False)
    assert shapes == [(1, 3), (1, 4)]


def test_a_length_limit_that_is_no_whole_number() -> None:
    assert cut(MaxLengthCriteria(4.5), tokens=[5, 6, 7, 8]) == (3, True)  # type: ignore[arg-type]
    assert cut(MaxLengthCriteria(1e2), tokens=[5, 6, 7, 8]) == (4, False)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("longest", "max_length", "is_told"),
    [(5, 100, True), (6, 100, False), (5, 6, False), (4, 6, True), (1, 100, True)],
)
def test_a_sequence_that_outgrows_the_model_is_told_once(
    longest: int, max_length: int, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The criterion itself warns, and no more than plain decoding, which asks it after each token."""
    texts: list[str] = []
    monkeypatch.setattr("transformers.generation.stopping_criteria.logger.warning_once", texts.append)
    rules = StopRules(StoppingCriteriaList([MaxLengthCriteria(max_length, max_position_embeddings=longest)]))
    for length in (2, 3):
        rules.cut([5, 6, 7, 8][: 6 - length], length, 0, prefixes_of)
    assert len(texts) == is_told
