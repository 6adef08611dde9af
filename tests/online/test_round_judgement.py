from __future__ import annotations

import pytest

from adaflash_hf.online.online_arguments import OnlineTrainingArguments
from adaflash_hf.online.replay_buffer import DomainAcceptance
from adaflash_hf.online.round_judgement import acceptance_lengths, judge_round, learning_rate_factor, served_acceptance


def metrics(overall, **domains):
    values = {f"eval_acceptance_length_{name}": value for name, value in domains.items()}
    return {"eval_acceptance_length": overall, "eval_acceptance_length_spread": 0.3, "eval_blocks": 9.0, **values}


@pytest.mark.parametrize(
    ("before", "after", "fields", "expected"),
    [
        (metrics(2.0, math=2.0), metrics(2.0, math=2.0), {}, "published"),
        (metrics(2.0, math=2.0), metrics(1.99, math=1.99), {}, "rejected"),
        (metrics(2.0, math=2.0), metrics(1.99, math=1.99), {"tolerance": 0.02}, "published"),
        (metrics(2.0, math=2.0), metrics(1.0, math=1.0), {"held_out": 0, "min_held_out": 0}, "published"),
        ({"eval_blocks": 0.0}, {"eval_blocks": 0.0}, {}, "unjudged"),
        # Better for the traffic as a whole, worse for its quiet domain.
        (metrics(2.0, code=3.0, math=1.9), metrics(2.05, code=2.0, math=2.2), {}, "published"),
        (metrics(2.0, code=3.0, math=1.9), metrics(2.05, code=2.0, math=2.2), {"balanced": True}, "rejected"),
    ],
)
def test_only_what_does_not_lose_is_published(before, after, fields, expected):
    assert judge_round(OnlineTrainingArguments(**fields), before, after) == expected


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ([], 1.0),
        (["published"] * 3, 1.0),
        (["rejected"], 0.5),
        (["rejected", "diverged"], 0.25),
        (["rejected", "unjudged", "withdrawn", "unusable", "refused"], 0.5),
        (["rejected", *["published"] * 5], 1.0),
        (["rejected", "rejected", *["published"] * 5], 0.5),
        (["rejected"] * 99, 1 / 64),
    ],
)
def test_rates_fall_with_rejected_rounds_and_come_back_with_published_ones(outcomes, expected):
    history = [{"outcome": outcome} for outcome in outcomes]
    assert learning_rate_factor(OnlineTrainingArguments(), history) == pytest.approx(expected)
    assert learning_rate_factor(OnlineTrainingArguments(learning_rate_backoff=1.0), history) == 1.0


def test_acceptance_lengths_by_domain_and_in_all():
    assert acceptance_lengths(metrics(2.4, code=3.0, math=2.0), balanced=False) == {
        "code": 3.0,
        "math": 2.0,
        "all": 2.4,
    }
    assert acceptance_lengths(metrics(2.4, code=3.0, math=2.0), balanced=True)["all"] == 2.5
    assert acceptance_lengths({"eval_blocks": 0.0}, balanced=True) == {}


def test_served_acceptance_adds_versions_up():
    found = served_acceptance(
        [DomainAcceptance("math", 0, 10, 10), DomainAcceptance("math", 1, 30, 90), DomainAcceptance("code", 1, 0, 0)]
    )
    assert found == {"math": 3.5}
