"""Verify lengths computed by hand, and what the arguments refuse."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plain_comparison import exact_target, generate, oracle_for, prompt, ragged_batch, rows_per_forward, shared_target
from tiny_models import tiny_drafter

from adaflash_hf import FixedLengthPolicy, InvalidInputError, LengthHeadPolicy, LengthPolicy
from adaflash_hf.generation.length_policies import LENGTH_POLICIES, build_length_policy


def drafter_that_expects(*ratios: float, block_size: int = 16) -> Any:
    """Stands in for a drafter whose length head says these ratios."""
    output = SimpleNamespace(ratio=torch.tensor(ratios))
    return SimpleNamespace(length_head=lambda states: output, config=SimpleNamespace(block_size=block_size))


def states(batch_size: int) -> torch.Tensor:
    return torch.zeros(batch_size, 16, 4)


@pytest.mark.parametrize(
    ("verify_length", "longest", "expected"), [(None, 16, 16), (None, 3, 3), (5, 16, 5), (5, 3, 3), (1, 9, 1)]
)
def test_fixed(verify_length: int | None, longest: int, expected: int) -> None:
    policy = FixedLengthPolicy(verify_length)
    assert policy.verify_lengths(drafter_that_expects(), states(2), longest) == [expected, expected]


@pytest.mark.parametrize(
    ("length_scale", "longest", "expected"),
    [
        (1.0, 16, [2, 4, 8, 16]),  # 0.8 -> 1 -> minimum; 4; 8; 15.2 -> 15 is below
        (1.3, 16, [2, 5, 10, 16]),
        (1.3, 7, [2, 5, 7, 7]),
        (0.5, 16, [2, 2, 4, 8]),
        (1.3, 1, [1, 1, 1, 1]),
    ],
)
def test_length_head(length_scale: float, longest: int, expected: list[int]) -> None:
    drafter = drafter_that_expects(0.05, 0.25, 0.5, 1.0)
    assert LengthHeadPolicy(length_scale).verify_lengths(drafter, states(4), longest) == expected


def test_length_head_minimum() -> None:
    drafter = drafter_that_expects(0.01, 0.99)
    assert LengthHeadPolicy(1.0, min_verify_length=1).verify_lengths(drafter, states(2), 16) == [1, 16]
    assert LengthHeadPolicy(1.0, min_verify_length=6).verify_lengths(drafter, states(2), 16) == [6, 16]


def test_length_head_sleeps_below_its_concurrency() -> None:
    drafter = drafter_that_expects(0.1, 0.1, 0.1)
    policy = LengthHeadPolicy(1.0, activation_concurrency=3)
    assert policy.verify_lengths(drafter, states(2), 16) == [16, 16]
    assert policy.verify_lengths(drafter, states(3), 16) == [2, 2, 2]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FixedLengthPolicy(0), "`verify_length` is 0"),
        (lambda: LengthHeadPolicy(length_scale=0.0), "`length_scale` is 0.0"),
        (lambda: LengthHeadPolicy(min_verify_length=0), "`min_verify_length` is 0"),
    ],
)
def test_arguments_out_of_range(make: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        make()


def test_names() -> None:
    plain, headed = tiny_drafter(), tiny_drafter(length_head_config={"bottleneck_size": 4})
    policy = FixedLengthPolicy(3)
    assert build_length_policy(policy, plain) is policy
    assert type(build_length_policy(None, headed)) is FixedLengthPolicy
    assert type(build_length_policy("fixed", plain)) is FixedLengthPolicy
    assert type(build_length_policy("length_head", headed)) is LengthHeadPolicy
    with pytest.raises(InvalidInputError, match="`length_policy` is 'longest'"):
        build_length_policy("longest", plain)
    for needs_head in ("length_head", LengthHeadPolicy()):
        with pytest.raises(InvalidInputError, match="length head"):
            build_length_policy(needs_head, plain)
    with pytest.raises(InvalidInputError, match="no length head"):
        LengthHeadPolicy().verify_lengths(plain, states(1), 4)


class Scripted(LengthPolicy):
    """Says given lengths in turn and remembers what was accepted."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.longest: list[int] = []
        self.observed: list[tuple[int, int]] = []

    def verify_lengths(self, drafter: Any, hidden_states: torch.Tensor, longest: int) -> list[int]:
        self.longest.append(longest)
        length = self.lengths[len(self.longest) % len(self.lengths)]
        return [min(length + row, longest) for row in range(len(hidden_states))]

    def observe(self, verify_length: int, accepted: int) -> None:
        self.observed.append((verify_length, accepted))


@pytest.mark.parametrize("ragged", [False, True], ids=["one", "ragged"])
def test_any_schedule_is_exact(ragged: bool) -> None:
    target, inputs = shared_target(), ragged_batch() if ragged else prompt()
    expected = generate(target, inputs, max_new_tokens=20)
    drafter = oracle_for(target, inputs, expected, block_size=6)
    policy = Scripted([1, 2, 5, 3])
    actual = generate(target, inputs, max_new_tokens=20, assistant_model=drafter, length_policy=policy)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert max(policy.longest) == 6
    assert len(policy.observed) == drafter.last_generation_stats.rounds
    assert sum(accepted for _, accepted in policy.observed) == drafter.last_generation_stats.accepted_tokens
    assert all(0 <= accepted < length for length, accepted in policy.observed)


def test_verified_rows_follow_the_policy() -> None:
    target = exact_target()
    expected = generate(target, prompt(), max_new_tokens=12)
    drafter = oracle_for(target, prompt(), expected, wrong_every=None, block_size=8)
    rows = rows_per_forward(target)
    generate(target, prompt(), max_new_tokens=12, assistant_model=drafter, length_policy=FixedLengthPolicy(4))
    assert rows == [9, 4, 4, 3]


@pytest.mark.parametrize("length", [0, 9])
def test_lengths_out_of_range_are_refused(length: int) -> None:
    class Wrong(Scripted):
        def verify_lengths(self, drafter: Any, hidden_states: torch.Tensor, longest: int) -> list[int]:
            return [length]

    with pytest.raises(InvalidInputError, match=rf"Wrong.verify_lengths returned \[{length}\]"):
        generate(shared_target(), prompt(), max_new_tokens=9, assistant_model=tiny_drafter(), length_policy=Wrong([1]))


@pytest.mark.parametrize("draft_proposal", ["argmax", "sample"])
@pytest.mark.parametrize("policy", LENGTH_POLICIES)
def test_a_drafter_that_overflows_costs_no_answer(policy: str, draft_proposal: str) -> None:
    """As one may do in float16: nothing it drafts is accepted, and plain tokens come all the same."""
    target = shared_target()
    drafter = tiny_drafter(target, length_head_config={})
    for parameter in drafter.parameters():
        parameter.data.fill_(float("nan"))
    expected = generate(target, prompt(), max_new_tokens=8)
    options = {"max_new_tokens": 8, "length_policy": policy, "draft_proposal": draft_proposal}
    assert torch.equal(generate(target, prompt(), assistant_model=drafter, **options), expected)
    sampled = generate(target, prompt(), assistant_model=drafter, do_sample=True, top_k=1, **options)
    assert torch.equal(sampled, expected)
