"""Replayed rounds against those of the engine: the same numbers, without the target."""

from __future__ import annotations

import pytest
import torch
from domain_responses import domain_responses, trained_drafter
from tiny_models import tiny_target

from adaflash_hf.errors import InvalidInputError
from adaflash_hf.evaluation import trajectory_replay
from adaflash_hf.evaluation.trajectory_replay import ReplayEngine
from adaflash_hf.generation.confidence_policy import ConfidencePolicy
from adaflash_hf.generation.engine import AdaFlashEngine
from adaflash_hf.generation.length_policies import FixedLengthPolicy, LengthHeadPolicy


POLICIES = [FixedLengthPolicy(), FixedLengthPolicy(3), LengthHeadPolicy(1.0)]


@pytest.fixture(scope="module")
def target():
    # Token 7 ends a response, so that some end by themselves within a block and some at the limit.
    return tiny_target("llama", eos_token_id=7)


@pytest.fixture(scope="module")
def made(target, tmp_path_factory):
    responses = domain_responses(tmp_path_factory.mktemp("responses"), target, layer_ids=None)
    return responses, trained_drafter(target, responses)


def live_rounds(target, drafter, responses, indices, policy):
    engine = AdaFlashEngine(target, drafter, length_policy=policy)
    handles = [engine.submit(responses.prompt_ids(i), max_new_tokens=responses.max_new_tokens) for i in indices]
    results = [handle.result() for handle in handles]
    for index, result in zip(indices, results, strict=True):
        assert result.token_ids == responses.response_ids(index)
    return [result.rounds for result in results]


@pytest.mark.parametrize("policy", POLICIES, ids=["block", "three", "head"])
@pytest.mark.parametrize("blocks_at_once", [48, 3])
def test_rounds_are_those_of_the_engine(target, made, policy, blocks_at_once, monkeypatch):
    monkeypatch.setattr(trajectory_replay, "_BLOCKS_AT_ONCE", blocks_at_once)
    responses, drafter = made
    indices = [i for domain in responses.domains for i in responses.of_domain(domain)]
    replayed = ReplayEngine(target, drafter, responses, policy).serve(indices, "any")
    rounds = [result.rounds for result in replayed]
    assert rounds == live_rounds(target, drafter, responses, indices, policy)
    accepted = [count for one in rounds for _, count in one]
    assert 0 in accepted and max(accepted) >= 2  # a drafter that never, or always, gets it right would show little
    assert {result.finish_reason for result in replayed} == {"stop", "length"}
    reasons = [result.finish_reason for result in replayed]
    assert reasons == ["stop" if result.token_ids[-1] == 7 else "length" for result in replayed]
    assert [r.stats.committed_tokens + 1 for r in replayed] == [len(r.token_ids) for r in replayed]


def test_a_draft_vocabulary_is_honoured(target, made):
    responses, drafter = made
    drafter.set_draft_vocabulary(torch.arange(0, 96, 2))
    indices = responses.of_domain("math")
    try:
        replayed = ReplayEngine(target, drafter, responses).serve(indices, "math")
        assert [r.rounds for r in replayed] == live_rounds(target, drafter, responses, indices, None)
    finally:
        drafter.set_draft_vocabulary(None)


def test_stored_features_give_the_same_rounds(target, made, tmp_path):
    responses, drafter = made
    stored = domain_responses(tmp_path, target, layer_ids=drafter.config.target_layer_ids)
    assert "context_hidden_states" in stored[0] and "context_hidden_states" not in responses[0]
    indices = responses.of_domain("math")
    one, other = (ReplayEngine(target, drafter, each).serve(indices, "math") for each in (responses, stored))
    assert [result.rounds for result in one] == [result.rounds for result in other]


def test_recorders_and_reloaders_are_told(target, made):
    responses, drafter = made
    engine, told, asked = ReplayEngine(target, drafter, responses), [], []
    engine.on_finished(told.append)
    forget = engine.between_rounds(lambda: asked.append(True))
    engine.drafter_version = 5
    results = engine.serve(responses.of_domain("math")[:2], "math")
    assert told == results and len(asked) == 2
    assert [(r.request_id, r.drafter_version, r.domain) for r in told] == [(0, 5, "math"), (1, 5, "math")]
    forget()
    engine.serve(responses.of_domain("math")[:1], "math")
    assert len(asked) == 2


def test_policies_that_look_at_more_than_the_drafter_are_refused(target, made):
    responses, drafter = made
    with pytest.raises(InvalidInputError, match="ConfidencePolicy"):
        ReplayEngine(target, drafter, responses, ConfidencePolicy())
