"""How likely each drafted slot is to be accepted: what the drafter says, corrected by what the target then does.

The drafter says it by the probabilities that it gives its own drafts, or by a head. Both were trained once and their
errors are systematic: too sure, too shy, or blind to a new domain. Here such forecasts are corrected twice. How much
too sure they are of a slot on the whole shows after a few blocks already. Beyond that, forecasts are sorted into
buckets, and in each bucket the share of drafts that were really accepted takes over as observations come in. Only
slots whose turn came count: a slot behind a rejected one, or beyond the verify length, says nothing. Slots are chosen
by forecasts alone, so within a bucket the share is unbiased however few were verified.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from ..errors import InvalidInputError


if TYPE_CHECKING:
    from ..modeling_confidence_head import ConfidenceHeadModel
    from ..modeling_dflash_drafter import DFlashDrafterModel
    from .draft_head import LikeliestTokens


__all__ = ["AcceptanceForecaster", "Forecast", "confidence_head_of", "geometric_rates"]

ForecastSource = Literal["confidence_head", "probabilities", "length_head", "history"]

_RATIO_BUCKETS = 16
_PROBABILITY_BUCKETS = 20
# Observations a head's word is worth, in a bucket and for a slot as a whole, and how many the memory of each holds.
_HEAD_WEIGHT = 6.0
_SLOT_WEIGHT = 3.0
# What a head says of some blocks is not given up for what happened to others.
_SLOT_BOUNDS = (0.4, 2.0)
_MEMORY_WEIGHT = 400.0
# What remains of that memory when the drafter is another one.
_KEPT_SHARE = 0.02
# With no head and no history, neither optimism nor pessimism.
_UNKNOWN_RATE = 0.5


@dataclass
class Forecast:
    """
    Forecasts for the blocks of one round.

    Attributes:
        rates (`np.ndarray` of shape `(num_requests, draft_length)`):
            The drafter's word for how likely a slot is to be accepted, given that all before it are.
        buckets (`np.ndarray` of shape `(num_requests, draft_length)`): Where each belongs in the memory.

    Slots that a cut block does not draft have forecasts too, as if it were whole.
    """

    rates: np.ndarray
    buckets: np.ndarray

    def followed_by(self, newer: Forecast, most: int) -> Forecast:
        """The newest blocks of both, at most so many."""
        return Forecast(
            np.concatenate([self.rates, newer.rates])[-most:], np.concatenate([self.buckets, newer.buckets])[-most:]
        )


def confidence_head_of(drafter: Any, given: ConfidenceHeadModel | None = None) -> ConfidenceHeadModel | None:
    """The confidence head that was given in place of the drafter's own, or that, if there is any."""
    return given or getattr(drafter, "confidence_head", None)


def geometric_rates(expected: np.ndarray, draft_length: int) -> np.ndarray:
    """
    The constant acceptance rate q of a slot with which `q + q² + … + q^draft_length` drafts are accepted on average.

    Args:
        expected (`np.ndarray`): Expected accepted drafts.
        draft_length (`int`): Slots of a block.

    Returns:
        `np.ndarray`: A rate for each, between 0 and 1.
    """
    return np.interp(expected, *_expected_counts(draft_length))


def _buckets(shares: np.ndarray, count: int) -> np.ndarray:
    """Which of so many equal parts of 0 to 1 each share lies in."""
    return np.minimum((shares * count).astype(int), count - 1)


@cache
def _expected_counts(draft_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Expected accepted drafts for a grid of rates, and the grid."""
    rates = np.linspace(0.0, 1.0, 257)
    return (rates[:, None] ** np.arange(1, draft_length + 1)).sum(axis=1), rates


class AcceptanceForecaster:
    """
    Forecasts acceptance per slot and learns from every verified block.

    It asks the drafter's confidence head if there is one; else the probabilities of its likeliest tokens if they are
    given; else its length head (an expected count, read as a constant rate per slot); else nobody, and every block is
    forecast like those before it.

    Args:
        draft_length (`int`): Slots of a block that draft.
        block_size (`int`): Rows of a block; the length head's ratio is a share of these.
        confidence_head (`ConfidenceHeadModel`, *optional*): Takes the place of the drafter's own heads.
    """

    def __init__(self, draft_length: int, block_size: int, confidence_head: ConfidenceHeadModel | None = None):
        self.draft_length = draft_length
        self.block_size = block_size
        self._confidence_head = confidence_head
        # What a length head says of a cut block is not what it would say of the whole one, so each number of drafts
        # has a part of the memory of its own; the last one is that of whole blocks.
        self._part_size = max(_RATIO_BUCKETS, _PROBABILITY_BUCKETS) * draft_length
        self._seen = np.zeros(draft_length * self._part_size)
        self._accepted = np.zeros(draft_length * self._part_size)
        # By part and slot, of those whose turn came: how many, how many the head expected to be accepted, how many
        # were.
        self._by_slot = np.zeros((3, draft_length, draft_length))
        # Mean probabilities in whole blocks, and how many blocks: for slots that a cut block does not draft.
        self._usual, self._num_whole = np.full(draft_length, _UNKNOWN_RATE), 0
        self._source: ForecastSource | None = None

    @torch.no_grad()
    def forecast(
        self, drafter: DFlashDrafterModel, hidden_states: torch.Tensor, likeliest: LikeliestTokens | None = None
    ) -> Forecast:
        """
        Args:
            drafter (`DFlashDrafterModel`): The unwrapped drafter, for its heads.
            hidden_states (`torch.Tensor` of shape `(num_requests, rows, hidden_size)`):
                Of whole blocks, or of their first rows if it [`can_forecast_cut`].
            likeliest (`LikeliestTokens` of shape `(num_requests, slots)`, *optional*): Projected from these rows.

        Returns:
            `Forecast`: One row per request; costs one transfer from the device.
        """
        num_drafts = self.num_drafts_in(hidden_states)
        slots, whole = np.arange(self.draft_length), (self.draft_length - 1) * self._part_size
        head = confidence_head_of(drafter, self._confidence_head)
        if head is not None:
            self._use("confidence_head")
            probabilities = np.nan_to_num(head(hidden_states).probabilities.float().cpu().numpy())
            if probabilities.shape[1] != self.draft_length:
                raise InvalidInputError(
                    f"The confidence head forecasts {probabilities.shape[1]} slots, but the drafter drafts "
                    f"{self.draft_length}. Use the head that was trained for this drafter."
                )
            return Forecast(probabilities.astype(float), whole + _buckets(probabilities, _PROBABILITY_BUCKETS))
        if likeliest is not None:
            self._use("probabilities")
            probabilities = self._complete(likeliest.probabilities.float().cpu().numpy())
            buckets = _buckets(probabilities, _PROBABILITY_BUCKETS)
            # What comes after accepted drafts is likelier than the drafter, which sees none of them, takes it to be.
            return Forecast(probabilities, whole + slots * _PROBABILITY_BUCKETS + buckets)
        if drafter.length_head is None:
            self._use("history")
            shape = (hidden_states.shape[0], self.draft_length)
            return Forecast(np.full(shape, _UNKNOWN_RATE), np.broadcast_to(whole + slots, shape))
        self._use("length_head")
        # A drafter that overflowed expects nothing to be accepted.
        ratio = np.nan_to_num(drafter.length_head(hidden_states).ratio.float().cpu().numpy().astype(float))
        rates = geometric_rates(ratio * self.block_size - 1, self.draft_length)
        bucket = _buckets(ratio, _RATIO_BUCKETS)
        # Slots that a cut block does not draft are only ever seen in whole ones.
        parts = np.where(slots < num_drafts, (num_drafts - 1) * self._part_size, whole)
        return Forecast(
            np.repeat(rates[:, None], self.draft_length, axis=1), parts + bucket[:, None] * self.draft_length + slots
        )

    def _complete(self, probabilities: np.ndarray) -> np.ndarray:
        """Probabilities of the first slots of some blocks; the others are given those that they have on average."""
        num_blocks, num_slots = probabilities.shape
        if num_slots == self.draft_length:
            self._num_whole += num_blocks
            share = num_blocks / min(self._num_whole, max(_MEMORY_WEIGHT, num_blocks))
            self._usual = self._usual + share * (probabilities.mean(axis=0) - self._usual)
        complete = np.repeat(self._usual[None], num_blocks, axis=0)
        complete[:, :num_slots] = probabilities
        return complete

    def num_drafts_in(self, hidden_states: torch.Tensor) -> int:
        """Drafts that blocks of `(num_requests, rows, hidden_size)` have rows for; fewer than a block's if cut."""
        return self.draft_length - (self.block_size - hidden_states.shape[1])

    @property
    def can_forecast_cut(self) -> bool:
        """Whether it can forecast blocks of which only the first rows were drafted; a confidence head reads all."""
        return self._source in ("probabilities", "length_head", "history")

    def _use(self, source: ForecastSource) -> None:
        """Buckets mean something else for another head."""
        if self._source != source:
            self._source = source
            self._fade(0.0)

    def _fade(self, share: float) -> None:
        """Keeps this share of what was observed."""
        for observed in (self._seen, self._accepted, self._by_slot):
            observed *= share

    def drafter_changed(self) -> None:
        """The drafter's weights are others now: what was observed is a hint, for a few observations to overrule."""
        self._fade(_KEPT_SHARE)

    def survival(self, forecast: Forecast) -> np.ndarray:
        """
        Returns:
            `np.ndarray` of shape `(num_requests, draft_length)`: Probability that a slot is accepted at all, which
            takes all slots before it too. Never rises along a row.
        """
        seen, accepted = self._seen[forecast.buckets], self._accepted[forecast.buckets]
        _, expected_by_slot, accepted_by_slot = self._by_slot
        as_expected = (accepted_by_slot + _SLOT_WEIGHT) / (expected_by_slot + _SLOT_WEIGHT)
        as_expected = as_expected[forecast.buckets // self._part_size, np.arange(self.draft_length)]
        head_rates = np.minimum(forecast.rates * np.clip(as_expected, *_SLOT_BOUNDS), 1.0)
        rates = (accepted + _HEAD_WEIGHT * head_rates) / (seen + _HEAD_WEIGHT)
        return np.cumprod(rates, axis=1)

    def learn(
        self, forecast: Forecast, verify_lengths: Sequence[int], accepted: Sequence[int], ended: Sequence[bool] = ()
    ) -> None:
        """
        Takes in what the target made of the blocks.

        Args:
            forecast (`Forecast`): What was forecast for them.
            verify_lengths (`Sequence[int]`): Rows verified, the anchor included.
            accepted (`Sequence[int]`): Drafts accepted of each.
            ended (`Sequence[bool]`, *optional*): Where `accepted` was cut by a stop, so that nothing was rejected.
        """
        drafts = np.asarray(verify_lengths)[:, None] - 1
        count = np.asarray(accepted)[:, None]
        slots = np.arange(self.draft_length)
        is_accepted = (slots < count) & (slots < drafts)
        is_rejected = (slots == count) & (slots < drafts)
        if len(ended):
            is_rejected &= ~np.asarray(ended, dtype=bool)[:, None]
        is_seen = is_accepted | is_rejected
        np.add.at(self._accepted, forecast.buckets[is_accepted], 1.0)
        np.add.at(self._seen, forecast.buckets[is_seen], 1.0)
        parts = forecast.buckets // self._part_size
        for total, values in zip(self._by_slot, (is_seen, forecast.rates * is_seen, is_accepted), strict=True):
            np.add.at(total, (parts, np.broadcast_to(slots, parts.shape)), values)
        # An exponential moving average by weight: what is full forgets as much as it takes in.
        excess = np.maximum(self._seen / _MEMORY_WEIGHT, 1.0)
        self._seen /= excess
        self._accepted /= excess
        self._by_slot /= np.maximum(self._by_slot[0] / _MEMORY_WEIGHT, 1.0)
