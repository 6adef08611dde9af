"""Cuts committed tokens exactly where plain decoding would have stopped."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)


__all__ = ["StopRules"]


# Look at the tokens of their own row only, so a row can be judged apart from its batch.
ROW_INDEPENDENT = (MaxTimeCriteria, StopStringCriteria)


class StopRules:
    """End-of-sequence ids, the length limit, and all other criteria, each applied token by token.

    Args:
        criteria (`StoppingCriteriaList`): As prepared by `generate()`.
    """

    def __init__(self, criteria: StoppingCriteriaList):
        self.eos_token_ids: set[int] = set()
        self.max_length: int | None = None
        self._limit: MaxLengthCriteria | None = None
        self._custom = StoppingCriteriaList()
        for criterion in criteria:
            if type(criterion) is EosTokenCriteria:
                self.eos_token_ids.update(criterion.eos_token_id.tolist())
            elif type(criterion) is MaxLengthCriteria:
                limit = math.ceil(criterion.max_length)  # `max_new_tokens=1e2` makes it a float
                self.max_length = limit if self.max_length is None else min(limit, self.max_length)
                self._limit = criterion
            else:
                self._custom.append(criterion)
        self._is_row_independent = all(type(criterion) in ROW_INDEPENDENT for criterion in self._custom)

    def remaining(self, length: int) -> int:
        """Tokens that a sequence of `length` tokens may still grow by."""
        return self.max_length - length if self.max_length is not None else 1 << 30

    def cut(
        self,
        tokens: list[int],
        length: int,
        row: int,
        prefixes_of: Callable[[int, dict[int, list[int]]], torch.Tensor],
        scores_of: Callable[[int], tuple[torch.Tensor, ...] | None] = lambda count: None,
    ) -> tuple[int, bool]:
        """How many of `tokens` are committed, and whether the sequence ends there.

        Args:
            tokens (`list[int]`): Accepted drafts and the token after them.
            length (`int`): Length of the sequence before them.
            row (`int`): Original batch index of the sequence.
            prefixes_of (`Callable`): `prefixes_of(length, pending)`, see [`SequenceBatch.prefixes`].
            scores_of (`Callable`): `scores_of(n)` gives the scores of the row up to the n-th of `tokens`, or None.

        Returns:
            `tuple[int, bool]`: Number of tokens to keep, at least one, and whether to stop.
        """
        limit = min(len(tokens), self.remaining(length))
        self._warn_of_length(length, length + limit)
        for count in range(1, limit + 1):
            # Criteria that remember something are asked about every token, the last one included.
            if self._custom and self._ask(row, prefixes_of(length + count, {row: tokens[:count]}), scores_of(count)):
                return count, True
            if tokens[count - 1] in self.eos_token_ids:
                return count, True
        return limit, self.remaining(length) <= limit

    def _warn_of_length(self, before: int, after: int) -> None:
        """Has transformers say once, as in plain decoding, that a sequence grows longer than the model is made for."""
        longest = None if self._limit is None else self._limit.max_position_embeddings
        if self._limit is not None and longest is not None and longest < after:
            self._limit(torch.empty(1, max(before, longest) + 1, device="cpu"), None)
            self._limit = None

    def _ask(self, row: int, prefixes: torch.Tensor, scores: tuple[torch.Tensor, ...] | None) -> bool:
        if self._is_row_independent:
            return bool(self._custom(prefixes[row : row + 1], scores)[0])
        # A criterion may look its row up by batch index, so it sees the whole batch.
        return bool(self._custom(prefixes, scores)[row])
