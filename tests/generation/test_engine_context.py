"""The drafter's context while nobody drafts, and when somebody does again: tokens and context are as if never off."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from engine_traffic import (
    assert_nothing_left,
    assert_plain,
    engine_oracle,
    engine_target,
    plain_answer,
    prompt_ids,
    random_arrivals,
    run_traffic,
)
from plain_comparison import generate
from tiny_models import tiny_drafter

from adaflash_hf import AdaFlashEngine, RequestHandle
from adaflash_hf.generation.engine_requests import GenerationRequest, RequestState
from adaflash_hf.generation.length_policies import FixedLengthPolicy, LengthPolicy
from adaflash_hf.generation.prepacking import restore_linear_layers


class Switched(LengthPolicy):
    """Drafts while it is on; `limit` is how many rows are verified."""

    def __init__(self, limit: int = 99) -> None:
        self.is_on = True
        self.is_trying = False
        self.limit = limit
        self.trial_requests: int | None = None

    def verify_lengths(self, drafter: Any, hidden_states: torch.Tensor, longest: int) -> list[int]:
        return [min(longest, self.limit)] * hidden_states.shape[0]

    def wants_draft(self, num_active: int) -> bool:
        return self.is_on or self.is_trying

    def keeps_context(self, num_active: int) -> bool:
        return self.is_on

    def most_drafted(self, num_active: int) -> int:
        return self.trial_requests or num_active


def requests_of(engine: AdaFlashEngine) -> list[GenerationRequest]:
    return engine._scheduler.running


def drafted_states(engine: AdaFlashEngine) -> torch.Tensor:
    """What the drafter would draft from now, by all that it knows of the only request."""
    (request,) = requests_of(engine)
    drafter = engine._rounds.drafter
    assert drafter is not None
    return drafter.draft([request.drafter_slot], [request.anchor_id])


def lag(engine: AdaFlashEngine, index: int = 0) -> int:
    request, rounds = requests_of(engine)[index], engine._rounds
    assert rounds.drafter is not None
    return rounds.target.length(request.target_slot) - rounds.drafter.length(request.drafter_slot)


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
@pytest.mark.parametrize("rounds_off", [3, 46])
def test_a_gap_is_filled_as_if_it_had_never_been(
    architecture: str, rounds_off: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of layers with a window of 8 the cache has dropped what filled the longer gap, so all is run again."""
    target = engine_target(architecture)
    engines, handles = [], []
    for _ in range(2):
        drafter = tiny_drafter(target, target_layer_ids=[0, 1], num_hidden_layers=1)
        restore_linear_layers(drafter)  # prepacked within rounds alone, its weights would be rounded there alone
        engines.append(AdaFlashEngine(target, drafter, length_policy=Switched(limit=1), prefill_chunk_tokens=16))
        handles.append(engines[-1].submit(prompt_ids(6), max_new_tokens=100, do_sample=False))
    always, switched = engines
    collected: list[bool] = []
    forward = switched._rounds.target.forward

    def spy(*args: Any, **kwargs: Any) -> Any:
        collected.append(bool(kwargs["layer_ids"]))
        return forward(*args, **kwargs)

    monkeypatch.setattr(switched._rounds.target, "forward", spy)
    for _ in range(6):
        switched.step()
    policy = switched.policy
    assert isinstance(policy, Switched)
    policy.is_on = False
    collected.clear()
    for _ in range(rounds_off):
        switched.step()
    assert not any(collected) and lag(switched) == rounds_off
    policy.is_on = True
    while lag(switched) or requests_of(switched)[0].state is not RequestState.DECODING:
        switched.step()
    again = switched.statistics().prefilled_tokens - len(prompt_ids(6))
    is_everything = architecture == "gemma3_text" and rounds_off == 46
    assert again == (len(handles[1].token_ids) + len(prompt_ids(6)) - 1 if is_everything else rounds_off)
    while len(handles[0].token_ids) < len(handles[1].token_ids):
        always.step()
    torch.testing.assert_close(drafted_states(switched), drafted_states(always), atol=1e-5, rtol=1e-5)
    expected = generate(target, torch.tensor([prompt_ids(6)]), max_new_tokens=100)[0].tolist()
    for handle in handles:
        assert handle.result().sequence_ids == expected


class Keeping(Switched):
    """Has features collected while it does not draft."""

    def keeps_context(self, num_active: int) -> bool:
        return True


@pytest.mark.parametrize("most_pending_tokens", [512, 8])
def test_features_are_only_held_while_nobody_drafts(most_pending_tokens: int) -> None:
    """A request that ends without a draft never runs the drafter; drafts for another one are as if never off."""
    target = engine_target()
    engines: list[AdaFlashEngine] = []
    blocks: list[list[int]] = []
    for _ in range(2):
        drafter = tiny_drafter(target, target_layer_ids=[0, 1], num_hidden_layers=1)
        restore_linear_layers(drafter)  # prepacked within rounds alone, its weights would be rounded there alone
        engines.append(AdaFlashEngine(target, drafter, length_policy=Keeping(limit=1), prefill_chunk_tokens=16))
        blocks.append([])
        drafter.register_forward_hook(lambda *args, runs=blocks[-1]: runs.append(1))
    always, switched = engines
    assert isinstance(switched.policy, Keeping) and switched._rounds.drafter is not None
    switched.policy.is_on = False
    switched._rounds.drafter.most_pending_tokens = most_pending_tokens
    answers = []
    for engine in engines:
        for _ in range(2):
            engine.submit(prompt_ids(6), max_new_tokens=20, do_sample=False).result()
        handle = engine.submit(prompt_ids(6), max_new_tokens=60, do_sample=False)
        while len(handle.token_ids) < 30:
            engine.step()
        answers.append(handle)
    assert blocks[0] and bool(blocks[1]) == (most_pending_tokens == 8)
    torch.testing.assert_close(drafted_states(switched), drafted_states(always), atol=1e-5, rtol=1e-5)
    switched.policy.is_on = True
    before = len(blocks[1])
    assert answers[0].result().token_ids == answers[1].result().token_ids
    assert len(blocks[1]) > before


def test_features_are_held_for_a_shorter_while_where_memory_is_limited() -> None:
    engines = [
        AdaFlashEngine(engine_target(), engine_oracle(), memory_limit_bytes=limit) for limit in (None, 10_000_000)
    ]
    bounds = [engine._rounds.drafter.most_pending_tokens for engine in engines if engine._rounds.drafter]
    assert bounds == [512, 128]
    assert engines[0].memory_bytes_for(600) > engines[1].memory_bytes_for(600)
    assert engines[0].memory_bytes_for(128) == engines[1].memory_bytes_for(128)


def test_a_trial_stays_with_whose_features_are_projected() -> None:
    """Every other request would pay for all of its context."""
    policy = Keeping(limit=2)
    engine = AdaFlashEngine(engine_target(), engine_oracle(), length_policy=policy, max_concurrency=4)
    policy.is_on, policy.is_trying, policy.trial_requests = False, True, 2
    submit(engine, 4)
    while any(request.state is not RequestState.DECODING for request in requests_of(engine)) or not requests_of(
        engine
    ):
        engine.step()
    drafter = engine._rounds.drafter
    assert drafter is not None
    pending = [[drafter.num_pending(request.drafter_slot) for request in requests_of(engine)]]
    for _ in range(5):
        engine.step()
        pending.append([drafter.num_pending(request.drafter_slot) for request in requests_of(engine)])
    followed = [index for index in range(4) if pending[-1][index] <= 2]
    assert len(followed) == 2
    for before, after in zip(pending[1:], pending[2:], strict=False):
        assert all(after[index] > before[index] for index in range(4) if index not in followed)


def test_a_trial_is_one_for_neighbours() -> None:
    """The two shortest contexts lie apart; of those side by side the cheapest are drafted for, which cost one call."""
    policy = Keeping(limit=3)
    engine = AdaFlashEngine(engine_target(), engine_oracle(), length_policy=policy, max_concurrency=5)
    policy.is_on, policy.is_trying, policy.trial_requests = False, False, 2
    for length in (4, 12, 6, 7, 12):
        engine.submit(prompt_ids(length), max_new_tokens=40, do_sample=False)
    while any(request.state is not RequestState.DECODING for request in requests_of(engine)) or not requests_of(
        engine
    ):
        engine.step()
    before = [len(request.rounds) for request in requests_of(engine)]
    policy.is_trying = True
    engine.step()
    drafted = [
        index
        for index, request in enumerate(requests_of(engine))
        if any(length > 1 for length, _ in request.rounds[before[index] :])
    ]
    assert drafted == [2, 3]


def test_nobody_catches_up_for_a_trial() -> None:
    policy = Keeping(limit=1)
    engine = AdaFlashEngine(engine_target(), engine_oracle(), length_policy=policy, max_concurrency=4)
    policy.is_on = False
    submit(engine, 3)
    engine.step()
    rounds = engine._rounds
    assert rounds.drafter is not None
    rounds.drafter.extend = lambda *given: None  # type: ignore[method-assign]
    for _ in range(4):
        engine.step()
    del rounds.drafter.extend
    lags = [lag(engine, index) for index in range(3)]
    assert min(lags) > 0
    policy.is_trying, policy.trial_requests = True, 1
    engine.step()
    assert [lag(engine, index) for index in range(3)] == [count + 1 for count in lags]
    policy.trial_requests = None
    engine.step()
    assert [lag(engine, index) for index in range(3)] == [0, 0, 0]


class Reading(FixedLengthPolicy):
    """Lets the drafter read three tokens for each that a request may still say."""

    def most_read(self, num_active: int) -> float:
        return 3.0


@pytest.mark.parametrize(
    ("new_tokens", "is_drafted"),
    [([4], False), ([16], True), ([4, 4, 16], False), ([4, 16, 16], True)],
)
def test_nothing_is_read_for_requests_that_are_about_to_end(new_tokens: list[int], is_drafted: bool) -> None:
    """Prompts have 25 to 37 tokens; and for a few of many the drafter does not run."""
    engine = AdaFlashEngine(engine_target(), engine_oracle(), length_policy=Reading(), max_concurrency=4)
    handles = [
        engine.submit(prompt_ids(6 + number), max_new_tokens=count, do_sample=False)
        for number, count in enumerate(new_tokens)
    ]
    engine.step()  # reads the prompts
    engine.step()
    assert (engine.statistics().drafted_tokens > 0) is is_drafted
    while engine.has_requests:
        engine.step()
    for number, (handle, count) in enumerate(zip(handles, new_tokens, strict=True)):
        assert tuple(handle.token_ids) == plain_answer("llama", 6 + number)[:count]


def test_the_policy_is_told_of_another_drafter() -> None:
    class Told(Switched):
        changes = 0

        def drafter_changed(self) -> None:
            self.changes += 1

    policy = Told()
    engine = AdaFlashEngine(engine_target(), engine_oracle(), length_policy=policy)
    for version in (0, 3, 3, 4):
        engine.drafter_version = version
    assert policy.changes == 2


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_traffic_under_a_policy_that_changes_its_mind(architecture: str, seed: int) -> None:
    policy, chance = Switched(), random.Random(seed)
    engine = AdaFlashEngine(
        engine_target(architecture),
        engine_oracle(architecture),
        length_policy=policy,
        max_concurrency=8,
        prefill_chunk_tokens=16,
        memory_limit_bytes=None,
    )

    def change_mind() -> None:
        if chance.random() < 0.2:
            policy.is_on = not policy.is_on
            policy.is_trying = chance.random() < 0.5

    engine.between_rounds(change_mind)
    arrivals = random_arrivals(seed, count=20, over_rounds=30)
    assert_plain(run_traffic(engine, arrivals), arrivals, architecture)
    assert_nothing_left(engine)
    assert engine.statistics().accepted_tokens > 0


def submit(engine: AdaFlashEngine, count: int, **kwargs: Any) -> list[RequestHandle]:
    settings = {"max_new_tokens": 30, "do_sample": False, **kwargs}
    return [engine.submit(prompt_ids(1 + index), **settings) for index in range(count)]


def test_a_trial_drafts_for_newcomers_alone() -> None:
    policy = Switched()
    engine = AdaFlashEngine(engine_target(), engine_oracle(), length_policy=policy, max_concurrency=8)
    policy.is_on = False
    (old,) = submit(engine, 1)
    for _ in range(4):
        engine.step()
    policy.is_trying, policy.trial_requests = True, 1
    new = submit(engine, 2)
    for _ in range(3):
        engine.step()
    # Of the newcomers, whose prompts were followed, one is drafted for in each round.
    by_id = {request.arrival: request for request in requests_of(engine)}
    drafted = [
        sum(length > 1 for length, _ in by_id[handle.request_id].rounds)
        for handle in [old, *new]
        if not handle.is_done
    ]
    assert drafted[0] == 0 and sum(drafted) >= 2
    results = [handle.result() for handle in (old, *new)]
    assert [result.token_ids for result in results] == [list(plain_answer("llama", index)[:30]) for index in (1, 1, 2)]


def test_requests_catch_up_in_portions_while_others_go_on() -> None:
    policy = Switched(limit=1)
    engine = AdaFlashEngine(
        engine_target(), engine_oracle(), length_policy=policy, max_concurrency=4, prefill_chunk_tokens=16
    )
    submit(engine, 4)
    while any(request.state is not RequestState.DECODING for request in requests_of(engine)) or not requests_of(
        engine
    ):
        engine.step()
    policy.is_on = False
    for _ in range(7):
        engine.step()
    assert [lag(engine, index) for index in range(4)] == [7] * 4
    policy.is_on = True
    before = [len(request.tokens) for request in requests_of(engine)]
    engine.step()  # two of them lack 14 tokens together
    after = [len(request.tokens) for request in requests_of(engine)]
    assert [new - old for old, new in zip(before, after, strict=True)] == [0, 0, 1, 1]
    assert [lag(engine, index) for index in range(4)] == [0, 0, 8, 8]


def test_a_request_about_to_end_does_not_catch_up() -> None:
    policy = Switched(limit=1)
    engine = AdaFlashEngine(engine_target(), engine_oracle(), length_policy=policy)
    policy.is_on = False
    (handle,) = submit(engine, 1, max_new_tokens=10)
    while len(handle.token_ids) < 8:
        engine.step()
    policy.is_on = True
    engine.step()
    assert len(handle.token_ids) == 9 and lag(engine) > 0
    assert handle.result().token_ids == list(plain_answer("llama", 1)[:10])
