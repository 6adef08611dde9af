"""Which prompts a domain shift serves when: every method the same ones, none twice, none that it is judged on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from domain_responses import domain_responses
from tiny_models import tiny_target
from tiny_trajectories import make_trajectories

from adaflash_hf.errors import InvalidInputError
from adaflash_hf.evaluation.domain_traffic import DomainResponses, TrafficShape, plan_traffic
from adaflash_hf.online.recorded_trajectory import RecordedTrajectory


SHAPE = TrafficShape("math", ("code", "math"), 2, 3, home_trajectories=2, held_out=2)


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama", eos_token_id=7)


@pytest.fixture(scope="module")
def directory(target, tmp_path_factory):
    path = tmp_path_factory.mktemp("responses")
    domain_responses(path, target, 40, layer_ids=[0, 2])
    return path


@pytest.fixture(scope="module")
def responses(directory):
    return DomainResponses([directory], 16, [0, 2])


def test_a_shorter_limit_gives_what_the_target_would_have_said(target, directory):
    cut = DomainResponses([directory], 5, [0, 2])
    for index in cut.of_domain("math")[:6]:
        prompt = torch.tensor([cut.prompt_ids(index)])
        mask = torch.ones_like(prompt)
        said = target.generate(prompt, attention_mask=mask, max_new_tokens=5, do_sample=False)[0].tolist()
        assert cut[index]["input_ids"].tolist() == said
        assert cut.prompt_ids(index) + cut.response_ids(index) == said
        assert cut[index]["finished"] == cut.is_finished(index) == (said[-1] == 7)
        assert cut[index]["context_hidden_states"].shape == (len(said) - 1, 64)
        recorded = cut.recorded(index)
        assert (recorded.token_ids.tolist(), recorded.domain, recorded.finished) == (said, "math", said[-1] == 7)


def test_what_is_stored_of_the_target_comes_with_a_served_response(target, tmp_path):
    responses = domain_responses(tmp_path, target, 4, layer_ids=[0, 2], max_new_tokens=9, teacher_top_k=3)
    served = responses.recorded(1)
    outputs = responses.target_outputs(served)
    logits = target(torch.from_numpy(served.token_ids).long()[None]).logits[0, served.prompt_length - 1 : -1]
    log_probs, ids = logits.log_softmax(-1).topk(3)
    assert outputs["teacher_ids"].tolist() == ids.tolist()
    torch.testing.assert_close(outputs["teacher_log_probs"].float(), log_probs, atol=0.01, rtol=0)  # kept in float16
    assert outputs["context_hidden_states"].equal(responses[1]["context_hidden_states"])
    cut = responses.target_outputs(served.cut(len(served.token_ids) - 4))
    for name, values in cut.items():
        assert values.equal(outputs[name][:-4])
    other = RecordedTrajectory.from_lists(responses.prompt_ids(1), responses.response_ids(2))
    with pytest.raises(InvalidInputError, match="not one of the stored responses"):
        responses.target_outputs(other)
    with pytest.raises(InvalidInputError, match="not one of the stored responses"):
        responses.target_outputs(RecordedTrajectory.from_lists([5], responses.response_ids(2)))


def test_equal_prompts_are_one(directory, responses):
    both = DomainResponses([directory, directory], 16)
    assert len(both) == len(responses)
    assert both.of_domain("math") == responses.of_domain("math")
    assert "context_hidden_states" in responses[0] and "context_hidden_states" not in both[0]
    assert "context_hidden_states" not in DomainResponses([directory], 16, [1, 2])[0]  # stored of 0 and 2


def test_what_does_not_fit_is_refused(target, directory, responses, tmp_path):
    with pytest.raises(InvalidInputError, match="cut after 16"):
        DomainResponses([directory], 17)
    make_trajectories(tmp_path, target, 4, max_new_tokens=16, temperature=1.0)
    with pytest.raises(InvalidInputError, match="temperature 1.0"):
        DomainResponses([tmp_path], 16)
    with pytest.raises(InvalidInputError, match="'chat', but the responses are of 'code', 'math'"):
        plan_traffic(responses, replace(SHAPE, phases=("chat",)), 0)
    with pytest.raises(InvalidInputError, match=r"18 different prompts of 'code' are there, 23 are needed"):
        plan_traffic(responses, replace(SHAPE, phases=("code", "math"), rounds_per_phase=7), 0)
    with pytest.raises(InvalidInputError, match="neighbours must differ"):
        replace(SHAPE, phases=("math", "code"))
    with pytest.raises(InvalidInputError, match="`held_out` is 0"):
        replace(SHAPE, held_out=0)


def test_every_prompt_is_served_once_and_held_out_ones_never(responses):
    plans = [plan_traffic(responses, SHAPE, seed) for seed in (0, 0, 1)]
    assert plans[0] == plans[1]
    assert plans[0].held_out == plans[2].held_out
    assert plans[0].rounds != plans[2].rounds
    plan = plans[0]
    shown = [(one.number, one.phase, one.domain, len(one.indices)) for one in plan.rounds]
    assert shown == [(0, -1, "math", 2), (1, 0, "code", 3), (2, 0, "code", 3), (3, 1, "math", 3), (4, 1, "math", 3)]
    served = [index for one in plan.rounds for index in one.indices]
    assert len(set(served)) == len(served) == plan.num_requests == 14
    assert not set(served) & {index for indices in plan.held_out.values() for index in indices}
    assert all(index in responses.of_domain(one.domain) for one in plan.rounds for index in one.indices)
    assert plan.served("code") == [*plan.rounds[1].indices, *plan.rounds[2].indices]
    assert len(plan.served("math")) == 6


def test_what_rounds_are_judged_by_comes_on_top(responses):
    plan = plan_traffic(responses, replace(SHAPE, held_out_share=0.3), 0)
    for one in plan.rounds:
        trainable = [i for i in one.indices if responses.recorded(i).prompt_hash >= 0.3]
        assert len(trainable) == (2 if one.number == 0 else 3)
    assert plan.num_requests > 14
