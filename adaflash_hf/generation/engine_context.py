"""Keeps the drafter's context in step with the target's cache, or lets it fall behind while nobody drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .engine_requests import GenerationRequest, RequestState
from .length_policies import LengthPolicy
from .packed_drafter import PackedDrafter
from .packed_target import PackedTarget


__all__ = ["DrafterContext"]


class DrafterContext:
    """Decides before each round whether the target's features are collected, and for whom they are complete.

    A request whose features have a gap is not drafted for. When the policy wants to draft again, the target runs once
    more over the tokens that are missing: the request goes back to prefill for them, as one does that was returned.

    Args:
        target (`PackedTarget`): The target and its cache.
        drafter (`PackedDrafter`): The drafter and its context.
        policy (`LengthPolicy`): Says whether the context is wanted.
        reopen (`Callable`): Gives a request new, empty places in both caches.
        tokens_per_round (`int`): Most tokens to run again in a round, unless one request alone lacks more.

    Attributes:
        is_wanted (`bool`): Whether features of this round have any use.
    """

    def __init__(
        self,
        target: PackedTarget,
        drafter: PackedDrafter,
        policy: LengthPolicy,
        reopen: Callable[[GenerationRequest], None],
        tokens_per_round: int,
    ):
        self._target, self._drafter, self._policy = target, drafter, policy
        self._reopen = reopen
        self._tokens_per_round = tokens_per_round
        self.is_wanted = True

    def follow(self, running: Sequence[GenerationRequest]) -> None:
        """Begins a round; requests that must catch up are set back to prefill.

        Args:
            running (`Sequence[GenerationRequest]`): All that have places in the caches.
        """
        num_active = len(running)
        keeps_all, wants_draft = self._policy.keeps_context(num_active), self._policy.wants_draft(num_active)
        self.is_wanted = keeps_all or wants_draft
        # A draft for some is a trial. Whoever has no gap yet may serve for it.
        if keeps_all and wants_draft and self._policy.most_drafted(num_active) >= num_active:
            self._catch_up(running, self._policy.most_read(num_active))

    def is_complete(self, request: GenerationRequest) -> bool:
        """Whether the drafter has the features of all tokens in the target's cache."""
        return self._lag(request) == 0

    def is_worth_reading(self, request: GenerationRequest, most_read: float) -> bool:
        """Whether a request may say enough more tokens for what the drafter has not read of it.

        Args:
            request (`GenerationRequest`): The request.
            most_read (`float`): See [`LengthPolicy.most_read`].
        """
        unread = self._drafter.num_pending(request.drafter_slot) + self._lag(request)
        return unread <= most_read * request.remaining

    def _lag(self, request: GenerationRequest) -> int:
        return self._target.length(request.target_slot) - self._drafter.length(request.drafter_slot)

    def _catch_up(self, running: Sequence[GenerationRequest], most_read: float) -> None:
        lags = [(self._lag(request), request) for request in running if request.state is RequestState.DECODING]
        behind = [(lag, request) for lag, request in lags if lag > 0]
        if not behind:
            return
        budget = self._tokens_per_round - sum(request.prefill_remaining for request in running)
        # The others go on meanwhile, without drafts. Those that lack least come first: they cost least.
        for lag, request in sorted(behind, key=lambda entry: (entry[0], entry[1].arrival)):
            if lag > request.remaining or not self.is_worth_reading(request, most_read):
                continue  # it ends before what it costs has paid
            if budget <= 0 or self._tokens_per_round > budget < lag:
                break
            self._set_back(request)
            budget -= lag

    def _set_back(self, request: GenerationRequest) -> None:
        known = self._drafter.length(request.drafter_slot)
        if self._target.can_truncate(request.target_slot, known):
            self._target.truncate(request.target_slot, known)
            request.prefilled = known
            request.state = RequestState.PREFILLING
        else:  # a layer with a window has dropped what the missing tokens see
            self._reopen(request)
