"""Verifies a draft as far as it is confident of itself: the baseline to the length head."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..errors import InvalidInputError
from .acceptance_forecast import confidence_head_of
from .length_policies import LengthPolicy, RoundContext


if TYPE_CHECKING:
    from ..modeling_confidence_head import ConfidenceHeadModel
    from ..modeling_dflash_drafter import DFlashDrafterModel


__all__ = ["ConfidencePolicy"]


class ConfidencePolicy(LengthPolicy):
    """
    Keeps slots as long as the product of their probabilities stays at or above a threshold (after DSpark,
    arXiv 2607.05147).

    The probabilities come from a confidence head, which reads hidden states before the vocabulary projection. A
    drafter without one is taken at its own word: the probability of its likeliest token in each slot. That one needs
    the projection of the whole block first, whatever is kept of it. Either way the choice depends on distributions
    and not on drawn tokens, so sampled output stays exact.

    Args:
        threshold (`float`, defaults to 0.94): Least probability that all kept slots are accepted.
        min_verify_length (`int`, defaults to 2):
            Least rows to verify, the anchor included: that of [`LengthHeadPolicy`], so that the two differ in what
            they forecast alone.
        confidence_head (`ConfidenceHeadModel`, *optional*): Used in place of the drafter's own.
    """

    def __init__(
        self,
        threshold: float = 0.94,
        min_verify_length: int = 2,
        confidence_head: ConfidenceHeadModel | None = None,
    ):
        if not 0 < threshold <= 1:
            raise InvalidInputError(
                f"`threshold` is {threshold}, expected a probability above 0 and up to 1 (0.94 is usual)."
            )
        if min_verify_length < 1:
            raise InvalidInputError(f"`min_verify_length` is {min_verify_length}, expected 1 or more.")
        self.threshold = threshold
        self.min_verify_length = min_verify_length
        self._confidence_head = confidence_head

    def needs_likeliest(self, drafter: DFlashDrafterModel) -> bool:
        return self._head_of(drafter) is None

    def _head_of(self, drafter: DFlashDrafterModel) -> ConfidenceHeadModel | None:
        return confidence_head_of(drafter, self._confidence_head)

    @torch.no_grad()
    def choose_lengths(
        self, drafter: DFlashDrafterModel, hidden_states: torch.Tensor, context: RoundContext
    ) -> list[int]:
        head = self._head_of(drafter)
        if head is not None:
            probabilities = head(hidden_states).probabilities
        elif context.likeliest is not None:
            probabilities = context.likeliest.probabilities
        else:
            raise InvalidInputError(
                "`ConfidencePolicy` has neither a confidence head nor `context.likeliest`. A decoding loop must ask "
                "`needs_likeliest` and pass the likeliest tokens of all draft slots."
            )
        kept = (probabilities.cumprod(dim=-1) >= self.threshold).sum(dim=-1) + 1  # [num_drafted]
        lengths = kept.clamp(min=self.min_verify_length).tolist()
        return [min(length, bound) for length, bound in zip(lengths, context.longest, strict=True)]

    def verify_lengths(self, drafter: DFlashDrafterModel, hidden_states: torch.Tensor, longest: int) -> list[int]:
        batch_size = hidden_states.shape[0]
        return self.choose_lengths(drafter, hidden_states, RoundContext([longest] * batch_size, batch_size))
