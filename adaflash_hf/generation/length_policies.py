"""How many rows of a drafted block the target verifies: what a policy is told, and the two basic ones.

Further policies: `confidence_policy.py`, `cost_aware_policy.py`, and `oracle_policy.py` for analysis.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..errors import InvalidInputError


if TYPE_CHECKING:
    from ..configuration_dflash_drafter import DFlashDrafterConfig
    from ..modeling_dflash_drafter import DFlashDrafterModel
    from ..modeling_length_head import LengthHeadModel
    from .cost_calibration import RoundBench
    from .draft_head import LikeliestTokens


__all__ = [
    "ENGINE_ACTIVATION_CONCURRENCY",
    "LENGTH_POLICIES",
    "FixedLengthPolicy",
    "LengthHeadPolicy",
    "LengthPolicy",
    "RoundContext",
    "RoundOutcome",
    "build_length_policy",
    "check_length_policy",
    "scaled_verify_lengths",
]

LENGTH_POLICIES = ("fixed", "length_head", "confidence", "cost_aware")
# The paper's: with fewer requests than this, the rows a head would save cost next to nothing.
ENGINE_ACTIVATION_CONCURRENCY = 16


@dataclass
class RoundContext:
    """
    What a policy may know of one round besides hidden states. Nothing here comes from drafted ids.

    Args:
        longest (`Sequence[int]`):
            Per drafted request, the largest verify length its remaining budget allows, the anchor included.
        num_active (`int`):
            Requests that share the target's forward, those that do not draft included; in the engine also those
            whose prompt is still being read, which will be decoding soon.
        is_packed (`bool`, defaults to `True`):
            Whether the target sees the sum of the verify lengths (the engine); otherwise a rectangle as wide as the
            longest of them (`generate()`).
        request_ids (`Sequence[Hashable]`, *optional*):
            A name of each drafted request that stays the same over its rounds.
        num_generated (`Sequence[int]`, *optional*):
            Tokens each drafted request has committed after its prompt; the last of them is the anchor.
        likeliest (`LikeliestTokens` of shape `(num_drafted, slots)`, *optional*):
            The drafter's likeliest token in every drafted slot, before any sampling, and its probability; given to
            policies that say `needs_likeliest`.
        memo (`Any`, *optional*):
            For the policy itself: what it keeps between choosing and observing, so that several threads may share it.
    """

    longest: Sequence[int]
    num_active: int
    is_packed: bool = True
    request_ids: Sequence[Hashable] = ()
    num_generated: Sequence[int] = ()
    likeliest: LikeliestTokens | None = None
    memo: Any = None


@dataclass
class RoundOutcome:
    """
    How a round went, in the order of the context's requests.

    Args:
        verify_lengths (`Sequence[int]`):
            Rows verified per request, the anchor included; in a padded batch the same for all. 0 for one that was
            still in the batch but had ended before.
        accepted (`Sequence[int]`):
            Drafts committed per request.
        ended (`Sequence[bool]`):
            Which requests ended in this round: a stop may have cut what was accepted, so `accepted` is then only a
            lower bound.
        drafted (`bool`):
            Whether the drafter ran. Without it all verify lengths are 1.
        committed (`int`):
            Tokens that all active requests together committed, bonus tokens included.
        round_s (`float`, *optional*):
            Seconds from the end of the round before to the end of this one. None if the round also did what others
            do not (a prefill, an admission), so that its time says nothing about drafting.
        draft_s (`float`, *optional*):
            Seconds of drafting and choosing lengths, where the loop takes them.
    """

    verify_lengths: Sequence[int]
    accepted: Sequence[int]
    ended: Sequence[bool] = field(default=())
    drafted: bool = True
    committed: int = 0
    round_s: float | None = None
    draft_s: float | None = None


class LengthPolicy(ABC):
    """
    Chooses the verify length of every sequence in a round.

    A policy may read the drafter's hidden states, or whole distributions made of them, but never the drafted token
    ids or their probabilities: a choice that depends on sampled ids would bias the output distribution.

    A round goes like this:

        policy.begin_round(num_prefilled)                 # in an engine, where prompts are read beside decoding
        if policy.wants_draft(num_active):
            longest_wanted = policy.longest_wanted(num_active)
            hidden_states = ...                           # the drafter's forward, of these rows if it can be cut
            context = RoundContext(longest, num_active, ...)
            if policy.needs_likeliest(drafter):
                context.likeliest = ...                   # of all slots, which the drafts are then taken from
            lengths = policy.choose(drafter, hidden_states, context)
        ...                                               # verify, accept, commit
        policy.observe_round(context, RoundOutcome(...))  # also after a round without drafts

    Only `verify_lengths` must be written by a subclass; one that needs the whole context overrides `choose_lengths`.
    """

    @abstractmethod
    def verify_lengths(self, drafter: DFlashDrafterModel, hidden_states: torch.Tensor, longest: int) -> list[int]:
        """
        Returns the verify length of each row, when nothing but one bound is known.

        Args:
            drafter (`DFlashDrafterModel`): The unwrapped drafter, for its length head.
            hidden_states (`torch.Tensor` of shape `(batch_size, block_size, hidden_size)`):
                The drafter's final hidden states of the block.
            longest (`int`): Largest verify length allowed this round, the anchor row included.

        Returns:
            `list[int]`: One length per row, each in `1..longest`.
        """

    def choose_lengths(
        self, drafter: DFlashDrafterModel, hidden_states: torch.Tensor, context: RoundContext
    ) -> list[int]:
        """As `verify_lengths`, with all that is known of the round. By default calls that and keeps to each bound."""
        lengths = self.verify_lengths(drafter, hidden_states, max(context.longest))
        _check_lengths(type(self).__name__, lengths, [max(context.longest)] * len(context.longest))
        return [min(length, bound) for length, bound in zip(lengths, context.longest, strict=True)]

    def choose(self, drafter: DFlashDrafterModel, hidden_states: torch.Tensor, context: RoundContext) -> list[int]:
        """
        What a decoding loop calls: `choose_lengths`, checked.

        Args:
            drafter (`DFlashDrafterModel`): The unwrapped drafter.
            hidden_states (`torch.Tensor` of shape `(num_drafted, rows, hidden_size)`):
                The drafter's final hidden states, of whole blocks unless `longest_wanted` had them cut.
            context (`RoundContext`): The round.

        Returns:
            `list[int]`: The verify length of each drafted request.

        Raises:
            InvalidInputError: If the policy chose a length outside of 1 to the request's `longest`.
        """
        lengths = self.choose_lengths(drafter, hidden_states, context)
        _check_lengths(type(self).__name__, lengths, context.longest)
        return lengths

    def begin_round(self, num_prefilled: int) -> None:  # noqa: B027 - most policies need not know
        """
        Told by an engine before anything is asked about a round.

        Args:
            num_prefilled (`int`): Prompt tokens that share the target's forward.
        """

    def wants_draft(self, num_active: int) -> bool:
        """
        Whether the drafter shall run this round; asked before it does.

        Args:
            num_active (`int`): As in [`RoundContext`].
        """
        return True

    def most_drafted(self, num_active: int) -> int:
        """
        How many requests the drafter shall run for at most when it runs, in an engine; all of them by default.

        Args:
            num_active (`int`): As in [`RoundContext`].
        """
        return num_active

    def most_read(self, num_active: int) -> float:
        """
        How many tokens of a request the drafter may have to read before it drafts, for each token that the request may
        still say, in an engine; any number by default. Requests with more are left out, and all of them where at most
        half would be left.

        Args:
            num_active (`int`): As in [`RoundContext`].
        """
        return math.inf

    def longest_wanted(self, num_active: int) -> int | None:
        """
        The largest verify length that the policy could choose in the coming round, so that a drafter whose blocks can
        be cut (`config.is_block_causal`) does not draft what nobody verifies; asked before it drafts, in an engine.

        Args:
            num_active (`int`): As in [`RoundContext`].

        Returns:
            `int` or `None`: Rows, the anchor included; None, the default, for the whole block.
        """
        return None

    def keeps_context(self, num_active: int) -> bool:
        """
        Whether an engine shall keep the drafter's context up to date, so that it can draft in any round.

        While this is false no features are collected, and only requests that happen to lack none are drafted for. When
        it is true again and all are to be drafted for, the engine runs the target once more over the tokens that the
        others lack.

        Args:
            num_active (`int`): As in [`RoundContext`].
        """
        return True

    def needs_likeliest(self, drafter: DFlashDrafterModel) -> bool:
        """Whether `choose` wants `context.likeliest`, which makes every drafted slot pay for the projection."""
        return False

    def prepare(self, bench: RoundBench) -> None:  # noqa: B027 - a hook, most policies measure nothing
        """
        Called once before the first round; a policy that weighs costs measures them here.

        Args:
            bench (`RoundBench`): Runs single target steps and drafts of any size, outside of all requests.
        """

    def drafter_changed(self) -> None:  # noqa: B027 - a hook, most policies do not learn
        """Told when the drafter's weights were exchanged: what was seen of the old ones may not hold any more."""

    def observe(self, verify_length: int, accepted: int) -> None:  # noqa: B027 - a hook, most policies do not learn
        """Told after each row-round how many of the `verify_length - 1` drafts were accepted."""

    def observe_round(self, context: RoundContext, outcome: RoundOutcome) -> None:
        """
        Told after every round how it went. By default passes each request's count on to `observe`.

        Args:
            context (`RoundContext`): The object that `choose` was given, or a fresh one after a round without drafts.
            outcome (`RoundOutcome`): What happened.
        """
        for length, accepted in zip(outcome.verify_lengths, outcome.accepted, strict=True):
            if length > 0:
                self.observe(length, accepted)


def _check_lengths(policy: str, lengths: Sequence[int], longest: Sequence[int]) -> None:
    if len(lengths) != len(longest) or any(
        not 1 <= length <= bound for length, bound in zip(lengths, longest, strict=True)
    ):
        bounds = f"`longest` = {longest[0]}" if len(set(longest)) == 1 else f"its request's `longest`, {list(longest)}"
        raise InvalidInputError(
            f"{policy}.verify_lengths returned {lengths}; it must return {len(longest)} lengths, and every length "
            f"must be from 1 to {bounds}. Clamp them in the policy."
        )


class FixedLengthPolicy(LengthPolicy):
    """Verifies the same number of rows every round (plain DFlash).

    Args:
        verify_length (`int`, *optional*): Rows to verify, the anchor included. The whole block when not given.
    """

    def __init__(self, verify_length: int | None = None):
        if verify_length is not None and verify_length < 1:
            raise InvalidInputError(
                f"`verify_length` is {verify_length}, but the anchor row is always verified: pass 1 or more, or None "
                "for the whole block."
            )
        self.verify_length = verify_length

    def longest_wanted(self, num_active: int) -> int | None:
        return self.verify_length

    def verify_lengths(self, drafter: DFlashDrafterModel, hidden_states: torch.Tensor, longest: int) -> list[int]:
        length = longest if self.verify_length is None else min(self.verify_length, longest)
        return [length] * hidden_states.shape[0]


class LengthHeadPolicy(LengthPolicy):
    """Verifies what the drafter's length head expects to be accepted (AdaFlash, arXiv 2607.19223).

    The verify length is `round(ratio * block_size * length_scale)`, with the head's ratio in (0, 1).

    Args:
        length_scale (`float`, defaults to 1.3): The paper's gamma. Above 1 verifies more rows than predicted.
        min_verify_length (`int`, defaults to 2): Least rows to verify, the anchor included.
        activation_concurrency (`int`, defaults to 1):
            Below this number of active requests the whole block is verified, because unused rows cost little there.
            `length_policy="length_head"` means 1 in `generate()`, where asking for the head is asking for it at any
            batch size, and 16 in the engine, as in the paper, because there the concurrency changes by itself.
    """

    def __init__(self, length_scale: float = 1.3, min_verify_length: int = 2, activation_concurrency: int = 1):
        if not 0 < length_scale < math.inf:
            raise InvalidInputError(f"`length_scale` is {length_scale}, expected a positive number (1.3 is usual).")
        if min_verify_length < 1:
            raise InvalidInputError(f"`min_verify_length` is {min_verify_length}, expected 1 or more.")
        if activation_concurrency < 1:
            raise InvalidInputError(f"`activation_concurrency` is {activation_concurrency}, expected 1 or more.")
        self.length_scale = length_scale
        self.min_verify_length = min_verify_length
        self.activation_concurrency = activation_concurrency

    def choose_lengths(
        self, drafter: DFlashDrafterModel, hidden_states: torch.Tensor, context: RoundContext
    ) -> list[int]:
        if context.num_active < self.activation_concurrency:
            return list(context.longest)
        lengths = self._predict(drafter, hidden_states, max(context.longest))
        return [min(length, bound) for length, bound in zip(lengths, context.longest, strict=True)]

    def verify_lengths(self, drafter: DFlashDrafterModel, hidden_states: torch.Tensor, longest: int) -> list[int]:
        batch_size = hidden_states.shape[0]
        return self.choose_lengths(drafter, hidden_states, RoundContext([longest] * batch_size, batch_size))

    def _predict(self, drafter: DFlashDrafterModel, hidden_states: torch.Tensor, longest: int) -> list[int]:
        lengths = scaled_verify_lengths(
            _length_head_of(drafter)(hidden_states).ratio,
            drafter.config.block_size,
            self.length_scale,
            min_verify_length=self.min_verify_length,
            longest=longest,
        )
        return [int(length) for length in lengths.tolist()]


def scaled_verify_lengths(
    ratio: torch.Tensor,
    block_size: int,
    length_scale: float,
    *,
    min_verify_length: int = 2,
    longest: int | None = None,
) -> torch.Tensor:
    """
    Rows to verify for a length head's estimates.

    Args:
        ratio (`torch.Tensor` of any shape): The head's estimates.
        block_size (`int`): Rows of a block, the anchor included.
        length_scale (`float`): The paper's gamma.
        min_verify_length (`int`, defaults to 2): Least rows, the anchor included.
        longest (`int`, *optional*): Most rows; those of the block when not given.

    Returns:
        `torch.Tensor` of that shape: Whole numbers.
    """
    longest = block_size if longest is None else longest
    # No number: the drafter overflowed, in float16 for instance, and nothing will be accepted.
    lengths = torch.round(ratio.float().nan_to_num(nan=0.0) * block_size * length_scale)
    return lengths.clamp(min(min_verify_length, longest), longest)


def _length_head_of(drafter: DFlashDrafterModel) -> LengthHeadModel:
    if drafter.length_head is None:
        raise _no_length_head()
    return drafter.length_head


def check_length_policy(policy: str | None, config: DFlashDrafterConfig) -> None:
    """Refuses the name of a policy that needs a head which a drafter of this configuration does not have.

    Args:
        policy (`str`, *optional*): One of `LENGTH_POLICIES`.
        config (`DFlashDrafterConfig`): Of the drafter, which need not be loaded yet.
    """
    if policy == "length_head" and config.length_head_config is None:
        raise _no_length_head()


def _no_length_head() -> InvalidInputError:
    return InvalidInputError(
        "`length_policy` asks for a length head, but this drafter has none: no length head is configured "
        "(`config.length_head_config` is None). Use `length_policy='fixed'`, or train a head with "
        "`adaflash train --only length-head`."
    )


def build_length_policy(
    policy: str | LengthPolicy | None, drafter: DFlashDrafterModel, *, is_engine: bool = False
) -> LengthPolicy:
    """Resolves the `length_policy` argument of `generate()` and of the engine.

    Args:
        policy (`str` or `LengthPolicy`, *optional*):
            One of `LENGTH_POLICIES`, a policy object, or None for `"fixed"`. In `generate()`, `"cost_aware"` is one
            policy per drafter, which goes on learning from call to call.
        drafter (`DFlashDrafterModel`): The unwrapped drafter, to check that it has the head the policy needs.
        is_engine (`bool`, defaults to `False`):
            Whether the policy will serve an engine, where the length head waits for 16 requests.

    Returns:
        `LengthPolicy`: The policy to use.

    Raises:
        InvalidInputError: If the name is unknown, or the drafter has no length head.
    """
    resolved: LengthPolicy
    if isinstance(policy, LengthPolicy):
        resolved = policy
    elif policy is None or policy == "fixed":
        resolved = FixedLengthPolicy()
    elif policy == "length_head":
        resolved = LengthHeadPolicy(activation_concurrency=ENGINE_ACTIVATION_CONCURRENCY if is_engine else 1)
    elif policy in LENGTH_POLICIES:
        resolved = _build_forecasting_policy(policy, drafter, is_engine)
    else:
        names = ", ".join(repr(name) for name in LENGTH_POLICIES)
        raise InvalidInputError(f"`length_policy` is {policy!r}, expected {names} or a `LengthPolicy` object.")
    if isinstance(resolved, LengthHeadPolicy):
        _length_head_of(drafter)
    return resolved


def _build_forecasting_policy(name: str, drafter: DFlashDrafterModel, is_engine: bool) -> LengthPolicy:
    # Both are built on this module.
    from .confidence_policy import ConfidencePolicy
    from .cost_aware_policy import CostAwarePolicy, shared_cost_aware_policy

    if name == "confidence":
        return ConfidencePolicy()
    return CostAwarePolicy() if is_engine else shared_cost_aware_policy(drafter)
