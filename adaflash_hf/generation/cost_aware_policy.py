"""Verify lengths that maximise expected tokens per second, down to not drafting at all."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn

from ..errors import InvalidInputError
from .acceptance_forecast import AcceptanceForecaster, Forecast, confidence_head_of
from .cost_calibration import RoundBench, calibrated_table
from .cost_table import CostTable
from .length_optimum import best_lengths, mean_of_best
from .length_policies import LengthPolicy, RoundContext, RoundOutcome
from .round_costs import RoundCosts, magnitude, num_padded_rows
from .trial_budget import TrialBudget


if TYPE_CHECKING:
    from ..modeling_confidence_head import ConfidenceHeadModel
    from ..modeling_dflash_drafter import DFlashDrafterModel


__all__ = ["CostAwarePolicy", "shared_cost_aware_policy"]

# Blocks whose forecasts stand for the next ones when nothing is drafted yet.
_REMEMBERED_BLOCKS = 256
# Rounds that the outlook deals them out to at most, twice as many where few requests make them cheap, and blocks of
# all of those.
_OUTLOOK_SAMPLES, _OUTLOOK_BLOCKS = 8, 128
# Fewer blocks than this say nothing yet; they are drafted whatever it costs, once, for a few requests at a time.
_LEAST_BLOCKS = 8
# What drafting must promise beyond plain decoding before it is taken to be better: so much where all is known well,
# and more while that rests on few blocks or few drafted rounds whose time was taken. A block's tokens vary by half
# their mean or so; chance that looked like a gain would be paid for by all requests. Until then rounds with drafts are
# trials, which stop when they have cost more than trials may.
_LEAST_GAIN = 0.02
_UNSURE_GAIN = 0.35
_BLOCKS_PER_ROUND = 8  # a timed draft for all says as much about costs as so many blocks about drafts
# Share of their time that rounds with drafts for many cost elsewhere: features are kept and handed on, requests catch
# up, and products are prepared for numbers of rows that are new.
_UPKEEP = 0.02
# Rounds for which corrected costs and the outlook of drafting are good enough, or for a share of the rounds so far if
# they are few; more often is not worth its time.
_KEPT_ROUNDS = 8
_KEPT_SHARE = 8
# Beside prompts nobody sees what drafts cost, so that trials there say less: share of the time that they may cost.
_UNSEEN_SHARE = 0.5
# Share of what a token costs in a plain round of many requests that it costs the drafter to read it later.
_CATCHING_UP = 0.02
# Times what was expected, beyond which a round is not long for what was done in it.
_LONGEST_ROUND = 2.0
# Requests that a trial of drafting drafts for where drafting for all would cost more, and rows it verifies of each at
# least: enough to see how drafts fare, and a fraction of the cost of all.
_TRIAL_REQUESTS = 4
_TRIAL_LENGTH = 4
# Rounds after which drafting that does not pay is given up until it does: features are not collected any more. Until
# then they are held and nothing is made of them, which costs little but memory.
_PATIENCE_ROUNDS = 128
# A quarter of them is enough where it promises less than this, times what plain decoding does.
_HOPELESS = 0.9

# Where blocks are cut, one in so many rounds drafts whole ones, and more rarely where that shows many blocks at once:
# what the later slots are worth may change.
_WHOLE_EVERY = 32
_WHOLE_BLOCKS = 16

# What belongs to the models and the loop that a policy was last prepared for.
_LEARNED = (
    "_costs",
    "_forecaster",
    "_recent",
    "_budget",
    "_rounds_unpaid",
    "_rounds_plain",
    "_rounds_kept",
    "_kept",
    "_num_rounds",
    "_timed_drafts",
)

_SHARED: weakref.WeakKeyDictionary[nn.Module, CostAwarePolicy] = weakref.WeakKeyDictionary()


def shared_cost_aware_policy(drafter: DFlashDrafterModel) -> CostAwarePolicy:
    """The policy of all `generate()` calls that ask for `"cost_aware"` with this drafter."""
    if drafter not in _SHARED:
        _SHARED[drafter] = CostAwarePolicy()
    return _SHARED[drafter]


@dataclass
class _Choice:
    """What `choose_lengths` leaves for `observe_round`."""

    forecast: Forecast
    seconds: float  # expected of the round
    longest: int | None  # verify length that blocks were cut to


@dataclass(frozen=True)
class _Outlook:
    """What rounds with drafts would bring on average: tokens of all requests, seconds, and the cut of the blocks."""

    tokens: float
    seconds: float
    longest: int | None

    @property
    def tok_per_s(self) -> float:
        return self.tokens / self.seconds


class _Trial(NamedTuple):
    """A round with drafts that is done to see how they fare: for how many requests, and what it loses in seconds."""

    num_drafted: int
    lost_s: float


class CostAwarePolicy(LengthPolicy):
    """
    Chooses every round what promises the most tokens per second, plain decoding included.

    What a round costs comes from a table that is measured once per target, drafter and device ([`calibrated_table`])
    and corrected by the rounds that follow; what it yields comes from the probabilities that the drafter gives its
    drafts, corrected by what the target accepts ([`AcceptanceForecaster`]). Before a draft, the forecasts of recent
    blocks say whether drafting pays at the present concurrency, and of a drafter whose blocks can be cut, how many
    rows; after it, the rows most likely to be accepted are verified as long as one more pays for itself
    ([`best_lengths`]).

    The promise is never to be slower than plain decoding. So that both sides stay known, the one that is thought to
    be slower is tried now and then, as often as keeps the time lost by trying below `exploration_share` of all time,
    and a quarter of that once trials keep finding what was expected. In an engine a trial of drafting is one for a few
    requests, the very first ones included, or for all where that is expected to lose less; and where drafting has
    promised nothing for some rounds nothing else is done for it.

    Choices follow from hidden states, costs, and earlier rounds alone, never from the ids drafted now, so that sampled
    output keeps the target's distribution.

    Args:
        exploration_share (`float`, defaults to 0.01): Share of time that trying the other side may cost.
        confidence_head (`ConfidenceHeadModel`, *optional*): Forecasts in place of the drafter.
        reads_probabilities (`bool`, defaults to `True`):
            Whether to forecast from the probabilities of the drafts unless there is a confidence head. They say more
            of a slot than the length head does, and cost the projection of all that is drafted rather than of what is
            verified; with `False` the length head forecasts.
        table (`CostTable`, *optional*): Costs, if they are known; then nothing is measured.
        cache_directory (`Path`, *optional*): Where measured costs are kept; see [`cost_table_directory`].
        refresh_costs (`bool`, defaults to `False`): Measure costs even if they are on disk.
    """

    def __init__(
        self,
        exploration_share: float = 0.01,
        confidence_head: ConfidenceHeadModel | None = None,
        reads_probabilities: bool = True,
        table: CostTable | None = None,
        cache_directory: Path | None = None,
        refresh_costs: bool = False,
    ):
        if not 0 < exploration_share < 1:
            raise InvalidInputError(
                f"`exploration_share` is {exploration_share}; it is a share of the time, 0.01 for one percent."
            )
        self.exploration_share = exploration_share
        self._confidence_head = confidence_head
        self._reads_probabilities = reads_probabilities
        self._given_table = table
        self._cache_directory = cache_directory
        self._refresh_costs = refresh_costs
        self._fingerprint: dict[str, str] | None = None
        self._others: dict[Hashable, dict[str, Any]] = {}
        self._is_packed = True
        self._is_prefilling = False
        self._wanted_draft = False
        self._forecaster: AcceptanceForecaster | None = None
        self._forget()

    def _forget(self) -> None:
        """Starts with nothing observed."""
        self._costs = None if self._given_table is None else RoundCosts(self._given_table)
        self._recent: Forecast | None = None
        self._budget = TrialBudget()
        self._rounds_unpaid = 0
        self._rounds_plain = 0
        self._rounds_kept = 0
        self._kept: dict[Hashable, tuple[int, Any]] = {}
        self._num_rounds = 0
        self._timed_drafts = 0.0

    def prepare(self, bench: RoundBench) -> None:
        """Looks up or measures costs, unless that is done already for these models and this many requests."""
        bench.reads_likeliest = self.needs_likeliest(bench.drafter)
        fingerprint = bench.fingerprint()
        if self._fingerprint != fingerprint:
            # One policy serves all calls of `generate()`, and those with one prompt and with several cost otherwise.
            self._others[_key_of(self._fingerprint)] = {name: getattr(self, name) for name in _LEARNED}
            self._forget()
            self._forecaster = None
            vars(self).update(self._others.pop(_key_of(fingerprint), {}))
        costs = self._costs
        if costs is None or (self._given_table is None and not costs.table.covers(bench.max_requests)):
            table = calibrated_table(bench, self._cache_directory, self._refresh_costs)
            self._refresh_costs = False
            if costs is None:
                self._costs = RoundCosts(table)
            else:
                costs.table = table
        self._fingerprint = fingerprint
        self._is_packed = bench.is_packed

    # Choosing

    def needs_likeliest(self, drafter: DFlashDrafterModel) -> bool:
        return self._reads_probabilities and confidence_head_of(drafter, self._confidence_head) is None

    def begin_round(self, num_prefilled: int) -> None:
        self._is_prefilling = num_prefilled > 0

    def wants_draft(self, num_active: int) -> bool:
        self._wanted_draft = self._is_draft_wanted(num_active)
        return self._wanted_draft

    def _is_draft_wanted(self, num_active: int) -> bool:
        outlook = self._outlook(num_active)
        if outlook is None:
            return True  # nothing is known of this drafter
        plain_s = self._plain_seconds(num_active)
        is_draft_better = self._pays(outlook, num_active)
        if is_draft_better:
            lost_s = plain_s - num_active / outlook.tok_per_s
        else:
            lost_s = self._trial(outlook, num_active).lost_s
        return is_draft_better != (self._budget.seconds >= lost_s)

    def most_drafted(self, num_active: int) -> int:
        outlook = self._outlook(num_active)
        if outlook is None:
            return min(num_active, _TRIAL_REQUESTS)
        return num_active if self._pays(outlook, num_active) else self._trial(outlook, num_active).num_drafted

    def most_read(self, num_active: int) -> float:
        outlook = self._outlook(num_active)
        if outlook is None or num_active <= _TRIAL_REQUESTS or not self._pays(outlook, num_active):
            return math.inf  # few, or a trial
        gained_s = self._plain_seconds(num_active) / num_active - 1 / outlook.tok_per_s
        return gained_s / self._reading_seconds(1)

    def _reading_seconds(self, num_tokens: int) -> float:
        """What the drafter takes to read tokens that it was not given at once: one costs least beside many."""
        most = self._known_costs.table.requests[-1]
        return _CATCHING_UP * num_tokens * self._plain_seconds(most) / most

    def longest_wanted(self, num_active: int) -> int | None:
        outlook = self._outlook(num_active)
        if outlook is None or self._num_rounds % (_WHOLE_EVERY * max(num_active // _WHOLE_BLOCKS, 1)) == 0:
            return None
        # A trial with a few requests drafts whole blocks: it is there to see.
        is_for_all = self._pays(outlook, num_active) or self._trial(outlook, num_active).num_drafted == num_active
        return outlook.longest if is_for_all else None

    def keeps_context(self, num_active: int) -> bool:
        outlook = self._outlook(num_active)
        return outlook is None or self._rounds_unpaid < _PATIENCE_ROUNDS or self._pays(outlook, num_active)

    def drafter_changed(self) -> None:
        for learned in (vars(self), *self._others.values()):
            learned.update(_recent=None, _rounds_unpaid=0, _kept={}, _num_rounds=0)
            learned["_budget"].forget_confirmations()
            if learned["_forecaster"] is not None:
                learned["_forecaster"].drafter_changed()

    def _pays(self, outlook: _Outlook, num_active: int) -> bool:
        """Whether drafting promises enough more than plain decoding."""
        recent = self._recent  # none if another thread's call has been told of a new drafter since
        evidence = min(1 if recent is None else len(recent.rates), 1 + _BLOCKS_PER_ROUND * self._timed_drafts)
        gain = _LEAST_GAIN + _UNSURE_GAIN / evidence**0.5
        return outlook.tok_per_s > (1 + gain) * num_active / self._plain_seconds(num_active)

    def _trial(self, outlook: _Outlook, num_active: int) -> _Trial:
        """
        The round with drafts that loses least against plain decoding: one for all requests or for a few.

        For all only where that costs no more than it says: not for those whose features have a gap, which the target
        would have to read again, and not beside a prompt, where nobody sees what it costs.
        """
        plain_s = self._plain_seconds(num_active)
        for_all = _Trial(num_active, outlook.seconds - outlook.tokens * plain_s / num_active)
        if not self._is_packed or num_active <= _TRIAL_REQUESTS:
            return for_all
        has_gaps = self._rounds_kept < min(self._num_rounds, _PATIENCE_ROUNDS)

        def small_loss() -> float:
            recent, forecaster = self._recent, self._forecaster
            if recent is None or forecaster is None:
                return 0.0  # as in `_pays`
            survival = forecaster.survival(recent)
            drafts, slots = min(_TRIAL_LENGTH - 1, survival.shape[1]), survival.shape[1]
            seconds = self._drafted_seconds(num_active, _TRIAL_REQUESTS, slots, True)[_TRIAL_REQUESTS * drafts]
            accepted = _TRIAL_REQUESTS * float(survival[:, :drafts].sum(axis=1).mean())
            return float(seconds) - plain_s * (1 + accepted / num_active)

        small = _Trial(_TRIAL_REQUESTS, self._keep(("trial", num_active), small_loss))
        for_all = for_all._replace(lost_s=for_all.lost_s + self._reading_seconds(self._rounds_plain * num_active))
        return small if has_gaps or self._is_prefilling or small.lost_s <= for_all.lost_s else for_all

    def choose_lengths(
        self, drafter: DFlashDrafterModel, hidden_states: torch.Tensor, context: RoundContext
    ) -> list[int]:
        draft_length, block_size = drafter.config.draft_length, drafter.config.block_size
        if self._forecaster is None or self._forecaster.draft_length != draft_length:
            self._forecaster = AcceptanceForecaster(draft_length, block_size, self._confidence_head)
        forecast = self._forecaster.forecast(drafter, hidden_states, context.likeliest)
        num_drafts = self._forecaster.num_drafts_in(hidden_states)
        longest = None if num_drafts == draft_length else num_drafts + 1
        key = (context.num_active, len(context.longest), draft_length, context.is_packed, longest)
        seconds = self._keep(key, lambda: self._drafted_seconds(*key))
        survival = self._forecaster.survival(forecast)
        padding_s = self._padding_seconds(len(context.longest))
        expected = best_lengths(survival, context.longest, context.num_active, seconds, context.is_packed, padding_s)
        lengths = expected.lengths
        if len(context.longest) <= self.most_drafted(context.num_active) < context.num_active:
            # A trial is there to see, also of slots that were rejected when they were last seen.
            least = [min(_TRIAL_LENGTH, bound) for bound in context.longest]
            lengths = [max(pair) for pair in zip(lengths, least, strict=True)]
        expected_s = float(seconds[_index_of(lengths, context.is_packed)]) + padding_s * num_padded_rows(lengths)
        context.memo = _Choice(forecast, expected_s, longest)
        return lengths

    def verify_lengths(self, drafter: DFlashDrafterModel, hidden_states: torch.Tensor, longest: int) -> list[int]:
        batch_size = hidden_states.shape[0]
        return self.choose_lengths(
            drafter, hidden_states, RoundContext([longest] * batch_size, batch_size, self._is_packed)
        )

    @property
    def _known_costs(self) -> RoundCosts:
        if self._costs is None:
            raise InvalidInputError(
                "`CostAwarePolicy` does not know any costs yet. `generate()` and the engine have them measured; in a "
                "loop of your own call `policy.prepare(bench)` first, or pass `table`."
            )
        return self._costs

    def _plain_seconds(self, num_active: int) -> float:
        return self._keep(("plain", num_active), lambda: self._known_costs.plain_seconds(num_active))

    def _padding_seconds(self, num_drafted: int) -> float:
        """Seconds of a row that attention pads. The few requests of a trial are padded among themselves, if at all."""
        return self._known_costs.table.padding_s if self._is_packed and num_drafted > _TRIAL_REQUESTS else 0.0

    def _drafted_seconds(
        self, num_active: int, num_drafted: int, draft_length: int, is_packed: bool, longest: int | None = None
    ) -> np.ndarray:
        """As [`RoundCosts.drafted_seconds`] of the coming round."""
        return self._known_costs.drafted_seconds(
            num_active, num_drafted, draft_length, is_packed, longest, self._is_prefilling
        )

    def _keep(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        """What `compute` returns, or returned a few rounds ago, for rounds that read prompts or do not."""
        key = (self._is_prefilling, key)
        computed_at, value = self._kept.get(key, (-_KEPT_ROUNDS, None))
        if self._num_rounds - computed_at >= min(_KEPT_ROUNDS, 1 + computed_at // _KEPT_SHARE):
            value = compute()
            self._kept[key] = (self._num_rounds, value)
        return value

    def _outlook(self, num_active: int) -> _Outlook | None:
        """What a round with drafts would bring on average, from forecasts of recent blocks; None with too few."""
        recent = self._recent
        if recent is None or len(recent.rates) < _LEAST_BLOCKS:
            return None
        return self._keep(("outlook", num_active), lambda: self._compute_outlook(recent, num_active))

    def _compute_outlook(self, recent: Forecast, num_active: int) -> _Outlook:
        assert self._forecaster is not None
        survival = self._forecaster.survival(recent)
        draft_length = survival.shape[1]
        most = _OUTLOOK_SAMPLES if num_active > _TRIAL_REQUESTS else 2 * _OUTLOOK_SAMPLES
        samples = min(most, max(min(len(survival), _OUTLOOK_BLOCKS) // num_active, 1))
        # The newest blocks, dealt out to rounds of this many requests, some more than once if there are too few.
        picks = (-1 - np.arange(samples * num_active) % len(survival)).reshape(samples, num_active)

        def outlook(longest: int | None) -> _Outlook:
            seconds = self._drafted_seconds(num_active, num_active, draft_length, self._is_packed, longest)
            if num_active == 1:
                return _Outlook(
                    *mean_of_best(survival[-_OUTLOOK_BLOCKS:], longest or draft_length + 1, seconds), longest
                )
            bounds = [longest or draft_length + 1] * num_active
            rounds = [(survival[rows], bounds, num_active, seconds, self._is_packed, padding_s) for rows in picks]
            choices = [best_lengths(*each) for each in rounds]
            tokens, spent_s = (sum(getattr(choice, name) for choice in choices) for name in ("tokens", "seconds"))
            upkeep = 1 + (_UPKEEP if num_active > _TRIAL_REQUESTS else 0.0)
            return _Outlook(tokens / samples, upkeep * spent_s / samples, longest)

        padding_s = self._padding_seconds(num_active)
        table = self._known_costs.table
        cuts = [length for length in table.lengths if 1 < length <= draft_length]
        if table.cut_draft_s is None or not self._forecaster.can_forecast_cut:
            cuts = []
        # Of equals the longest, which sees more.
        return max(map(outlook, [None, *reversed(cuts)]), key=lambda each: each.tok_per_s)

    # Learning

    def observe_round(self, context: RoundContext, outcome: RoundOutcome) -> None:
        super().observe_round(context, outcome)
        costs = self._costs
        if costs is None:
            return
        self._num_rounds += 1
        self._spend(costs, context, outcome)
        if outcome.round_s is not None and outcome.round_s > 0:
            self._learn_costs(costs, context, outcome, outcome.round_s)
        is_for_all = outcome.drafted and len(context.longest) > min(_TRIAL_REQUESTS, context.num_active - 1)
        self._rounds_plain = 0 if is_for_all else self._rounds_plain + 1
        self._rounds_kept = self._rounds_kept + 1 if self.keeps_context(context.num_active) else 0
        if isinstance(context.memo, _Choice):
            self._learn_acceptance(context.memo, outcome)

    def _spend(self, costs: RoundCosts, context: RoundContext, outcome: RoundOutcome) -> None:
        """Accounts for the time that a round of the slower side cost, by what it really took where that is known."""
        num_active = context.num_active
        outlook = self._outlook(num_active)
        if outlook is None:
            return
        plain_s = self._plain_seconds(num_active)
        is_draft_better = self._pays(outlook, num_active)
        promise = outlook.tok_per_s * plain_s / num_active
        self._rounds_unpaid = 0 if promise >= 1 else self._rounds_unpaid + (1 if promise > _HOPELESS else 4)
        tok_per_s = outlook.tok_per_s if is_draft_better else num_active / plain_s
        expected_s = context.memo.seconds if isinstance(context.memo, _Choice) else plain_s
        if outcome.round_s is None:
            # What else was done in it would have been done anyway: count as if it had been decoding alone. But a
            # request's first draft reads its prompt.
            drafted_s = costs.table.draft_seconds(len(context.longest), _cut_of(context)) if outcome.drafted else 0.0
            more_s = max((outcome.draft_s or 0.0) - drafted_s, 0.0)
            round_s = expected_s + min(more_s, _LONGEST_ROUND * expected_s)
            committed = num_active + sum(outcome.accepted)
        else:
            # A round that another process held up would otherwise forbid trials for a long time; what the drafter had
            # to make good for is no reason to stop once it is done; and as long as no plain round was seen, one that
            # took longer than the table says shows nothing about drafting.
            is_as_expected = self._is_catching_up(context, outcome) or not costs.has_timed_plain(num_active)
            longest_s = (1.0 if is_as_expected else _LONGEST_ROUND) * expected_s
            round_s, committed = min(outcome.round_s, longest_s), outcome.committed
        is_of_others = self._wanted_draft and not outcome.drafted  # who found that no request was worth it
        is_trial = outcome.drafted != is_draft_better and not is_of_others
        share = self.exploration_share * (_UNSEEN_SHARE if outcome.round_s is None else 1.0)
        trial_lost_s = round_s - committed / tok_per_s if is_trial else None
        self._budget.book((magnitude(num_active), is_draft_better), round_s, share, trial_lost_s)

    def _is_catching_up(self, context: RoundContext, outcome: RoundOutcome) -> bool:
        """Whether the drafter had what many requests said in several rounds to read, which costs more than drafting in
        every round does."""
        return outcome.drafted and self._rounds_plain > 0 and len(context.longest) > _TRIAL_REQUESTS

    def _learn_costs(self, costs: RoundCosts, context: RoundContext, outcome: RoundOutcome, round_s: float) -> None:
        num_active, num_drafted = context.num_active, len(context.longest)
        if not outcome.drafted:
            costs.observe_plain(num_active, round_s)
            return
        longest = _cut_of(context)
        outlook = self._outlook(num_active)
        is_cut = outlook is not None and outlook.longest is not None and num_drafted > _TRIAL_REQUESTS
        if self._is_catching_up(context, outcome) or (is_cut and longest is None):
            return  # such rounds are rare, and cost otherwise
        # A trial with a few requests says less about rounds that draft for all.
        self._timed_drafts += (num_drafted / num_active) ** 0.5
        padding_s = self._padding_seconds(num_drafted)
        costs.observe_drafted(num_active, outcome.verify_lengths, context.is_packed, longest, padding_s, round_s)

    def _learn_acceptance(self, choice: _Choice, outcome: RoundOutcome) -> None:
        assert self._forecaster is not None
        self._forecaster.learn(choice.forecast, outcome.verify_lengths, outcome.accepted, outcome.ended)
        recent = self._recent
        self._recent = choice.forecast if recent is None else recent.followed_by(choice.forecast, _REMEMBERED_BLOCKS)


def _index_of(lengths: Sequence[int], is_packed: bool) -> int:
    """Where the seconds of a round with these verify lengths are found, see [`best_lengths`]."""
    return sum(lengths) - len(lengths) if is_packed else max(lengths) - 1


def _cut_of(context: RoundContext) -> int | None:
    """Verify length that the blocks of a round were cut to, if they were."""
    return context.memo.longest if isinstance(context.memo, _Choice) else None


def _key_of(fingerprint: dict[str, str] | None) -> Hashable:
    return None if fingerprint is None else tuple(sorted(fingerprint.items()))
