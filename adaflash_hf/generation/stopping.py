"""Cuts committed tokens exactly where plain decoding would have stopped."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList


__all__ = ["StopRules"]


class StopRules:
    """End-of-sequence ids, the length limit, and all other criteria, each applied token by token.

    Args:
        criteria (`StoppingCriteriaList`): As prepared by `generate()`.
    """

    def __init__(self, criteria: StoppingCriteriaList):
        self.eos_token_ids: set[int] = set()
        self.max_length: int | None = None
        self._custom = StoppingCriteriaList()
        for criterion in criteria:
            if type(criterion) is EosTokenCriteria:
                self.eos_token_ids.update(criterion.eos_token_id.tolist())
            elif type(criterion) is MaxLengthCriteria:
                limit = criterion.max_length
                self.max_length = limit if self.max_length is None else min(limit, self.max_length)
            else:
                self._custom.append(criterion)

    @property
    def is_custom(self) -> bool:
        """Whether any criterion has to be called on the ids themselves."""
        return len(self._custom) > 0

    def remaining(self, length: int) -> int:
        """Tokens that a sequence of `length` tokens may still grow by."""
        return self.max_length - length if self.max_length is not None else 1 << 30

    def cut(self, tokens: list[int], length: int, prefix_of: Callable[[list[int]], torch.Tensor]) -> tuple[int, bool]:
        """How many of `tokens` are committed, and whether the sequence ends there.

        Args:
            tokens (`list[int]`): Accepted drafts and the token after them.
            length (`int`): Length of the sequence before them.
            prefix_of (`Callable`): Gives the row's ids, shape `(1, length + n)`, with n of the tokens appended.

        Returns:
            `tuple[int, bool]`: Number of tokens to keep, at least one, and whether to stop.
        """
        limit = min(len(tokens), self.remaining(length))
        for count in range(1, limit + 1):
            if tokens[count - 1] in self.eos_token_ids:
                return count, True
            if self._custom and bool(self._custom(prefix_of(tokens[:count]), None).all()):
                return count, True
        return limit, self.remaining(length) <= limit
