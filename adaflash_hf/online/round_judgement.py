"""Whether a round of training is published, and the figures that are kept of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from .online_arguments import OnlineTrainingArguments
from .replay_buffer import DomainAcceptance
from .round_training import RoundResult


__all__ = ["acceptance_lengths", "judge_round", "learning_rate_factor", "round_figures", "served_acceptance"]

# So many published rounds take back what one rejected round took from the learning rate.
_ROUNDS_TO_RECOVER = 5
# Below, a round changes next to nothing.
_LEAST_RATE_FACTOR = 1 / 64
_TAU = "eval_acceptance_length"
_HEAD_ERROR = "eval_length_head_error"


def judge_round(arguments: OnlineTrainingArguments, before: Mapping[str, float], after: Mapping[str, float]) -> str:
    """
    What becomes of a round.

    Args:
        arguments (`OnlineTrainingArguments`):
            Say whether rounds are judged, and how much they may lose.
        before (`Mapping[str, float]`), after (`Mapping[str, float]`):
            Metrics on the same held-out blocks, before and after training.

    Returns:
        `str`: `"published"`, `"rejected"`, or `"unjudged"` if no held-out response is as long as a block.
    """
    if not arguments.is_guarded:
        return "published"
    old, new = (acceptance_lengths(metrics, arguments.balanced).get("all") for metrics in (before, after))
    if old is None or new is None:
        return "unjudged"
    return "published" if new >= old - arguments.tolerance else "rejected"


def learning_rate_factor(arguments: OnlineTrainingArguments, history: Iterable[Mapping[str, Any]]) -> float:
    """
    What the next round's learning rates are multiplied with. A rate that adapts to new traffic in a few rounds is too
    high for a drafter that knows its traffic already: its rounds are rejected, until the rate fits.

    Args:
        arguments (`OnlineTrainingArguments`):
            Say how much a rejected round lowers the rates.
        history (`Iterable[Mapping[str, Any]]`):
            Entries of the rounds so far, oldest first.
    """
    factor, backoff = 1.0, arguments.learning_rate_backoff
    for entry in history:
        if entry["outcome"] in ("rejected", "diverged"):
            factor = max(factor * backoff, _LEAST_RATE_FACTOR)
        elif entry["outcome"] == "published":
            factor = min(factor * backoff ** (-1 / _ROUNDS_TO_RECOVER), 1.0)
    return factor


def acceptance_lengths(metrics: Mapping[str, float], balanced: bool) -> dict[str, float]:
    """
    Acceptance length of each domain, and of `"all"`: what a round is judged by.

    Args:
        metrics (`Mapping[str, float]`):
            From [`RoundTrainer.evaluate`].
        balanced (`bool`):
            Whether domains count alike, however much there is of each.
    """
    by_domain = {
        name.removeprefix(f"{_TAU}_"): value
        for name, value in metrics.items()
        if name.startswith(f"{_TAU}_") and name != f"{_TAU}_spread"
    }
    if not by_domain:
        return {}
    return {**by_domain, "all": sum(by_domain.values()) / len(by_domain) if balanced else metrics[_TAU]}


def round_figures(
    arguments: OnlineTrainingArguments, before: Mapping[str, float], after: Mapping[str, float], result: RoundResult
) -> dict[str, Any]:
    """
    What the history keeps of a round.

    Args:
        arguments (`OnlineTrainingArguments`):
            Say how domains count.
        before (`Mapping[str, float]`), after (`Mapping[str, float]`):
            Metrics on held-out blocks.
        result (`RoundResult`):
            What training did.
    """
    return {
        "held_out_before": acceptance_lengths(before, arguments.balanced),
        "held_out_after": acceptance_lengths(after, arguments.balanced),
        "length_head_error_before": before.get(_HEAD_ERROR),
        "length_head_error_after": after.get(_HEAD_ERROR),
        "updates": result.updates,
        "tokens": result.tokens,
        "train_s": result.train_s,
        "loss": result.metrics.get("train_loss"),
    }


def served_acceptance(acceptances: Iterable[DomainAcceptance]) -> dict[str, float]:
    """
    Acceptance length of served traffic by domain, whatever versions drafted.

    Args:
        acceptances (`Iterable[DomainAcceptance]`):
            From [`ReplayBuffer.acceptance`].
    """
    rounds: Counter[str] = Counter()
    accepted: Counter[str] = Counter()
    for one in acceptances:
        rounds[one.domain] += one.rounds
        accepted[one.domain] += one.accepted
    return {domain: 1 + accepted[domain] / count for domain, count in sorted(rounds.items()) if count}
