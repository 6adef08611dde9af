from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from online_traffic import served
from published_drafters import adapted_drafter
from tiny_models import tiny_drafter, tiny_target

from adaflash_hf.errors import DrafterCompatibilityError, InvalidInputError, TrainingDivergedError
from adaflash_hf.online.online_arguments import OnlineTrainingArguments
from adaflash_hf.online.round_training import InterruptedRoundError, RoundTrainer


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama")


@pytest.fixture(scope="module")
def traffic(target):
    return [replace(one, id=number) for number, one in enumerate(served(target, 8), start=1)]


def make(target, drafter=None, **fields):
    arguments = OnlineTrainingArguments(**{"learning_rate": 1e-2, "epochs": 1, "precision": "float32", **fields})
    return RoundTrainer(adapted_drafter() if drafter is None else drafter, target, arguments)


def weights(trainer):
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


def changed(before, after):
    return {name for name in before if not before[name].equal(after[name])}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"objective": "forward_kl"},
        {"objective": "cross_entropy", "use_muon": True},
        {"lora_rank": 8, "learning_rate": 5e-2},
        {"precision": "bfloat16"},
    ],
)
def test_rounds_raise_acceptance_on_what_they_train_on(target, traffic, fields):
    fast = {"epochs": 8, "batch_size": 4, "gradient_accumulation_steps": 1, "learning_rate": 2e-2}
    trainer = make(target, **{**fast, **fields})
    before = trainer.evaluate(traffic)
    results = [trainer.train(traffic, round_id) for round_id in (1, 2)]
    after = trainer.evaluate(traffic)
    assert after["eval_acceptance_length"] > before["eval_acceptance_length"] + 0.3
    assert results[1].metrics["train_loss"] < results[0].metrics["train_loss"]
    assert results[0].tokens == 8 * 8 * 16


def test_updates_are_counted_and_shown(target, traffic):
    shown = []
    trainer = make(target, epochs=2, batch_size=3, gradient_accumulation_steps=2)
    result = trainer.train(traffic, 1, on_update=lambda done, total: shown.append((done, total)))
    # Eight trajectories in three batches, twice: three groups of two.
    assert shown == [(1, 3), (2, 3), (3, 3)]
    assert result.updates == 3


def test_a_round_depends_on_weights_trajectories_and_its_number_alone(target, traffic):
    runs = []
    for round_id, order in ((4, traffic), (4, traffic[:]), (5, traffic)):
        torch.manual_seed(round_id + len(runs))
        trainer = make(target, anchors_per_trajectory=4)
        trainer.train(order, round_id)
        runs.append(weights(trainer))
    assert not changed(runs[0], runs[1])
    assert changed(runs[0], runs[2])


@pytest.mark.parametrize("part", ["drafter", "length_head"])
def test_only_the_part_asked_for_is_trained(target, traffic, part):
    trainer = make(target, trained_parts=part)
    before = weights(trainer)
    trainer.train(traffic, 1)
    heads = {name for name in before if "length_head" in name}
    assert changed(before, weights(trainer)) == (heads if part == "length_head" else set(before) - heads)


def test_the_target_is_never_touched(target, traffic):
    before = copy.deepcopy(target.state_dict())
    make(target).train(traffic, 1)
    assert all(before[name].equal(tensor) for name, tensor in target.state_dict().items())


def test_accumulation_over_two_batches_is_one_batch_of_two(target, traffic):
    """Equal trajectories in length and anchors, so that means of means are the mean."""
    fields = {"objective": "cross_entropy", "max_grad_norm": 0.0, "trained_parts": "drafter"}
    runs = []
    for batch_size, steps in ((1, 2), (2, 1)):
        trainer = make(target, batch_size=batch_size, gradient_accumulation_steps=steps, **fields)
        trainer.train(traffic[:2], 1)
        runs.append(weights(trainer))
    for name, tensor in runs[0].items():
        torch.testing.assert_close(tensor, runs[1][name], atol=2e-5, rtol=1e-3)


def test_an_interrupted_round_says_so(target, traffic):
    calls = iter([False, False, True])
    with pytest.raises(InterruptedRoundError):
        make(target).train(traffic, 1, should_stop=lambda: next(calls))
    with pytest.raises(InterruptedRoundError):
        make(target).evaluate(traffic, should_stop=lambda: True)


@pytest.mark.parametrize("use_muon", [False, True])
def test_a_factor_on_the_rates_is_as_good_as_other_rates(target, traffic, use_muon):
    rates = {"learning_rate": 2e-2, "length_head_learning_rate": 4e-2, "use_muon": use_muon}
    half, whole = (
        make(target, **{**rates, "learning_rate": 1e-2, "length_head_learning_rate": 2e-2}),
        make(target, **rates),
    )
    before = weights(whole)
    half.train(traffic, 1)
    whole.train(traffic, 1, rate_factor=0.5)
    assert changed(before, weights(whole)) and not changed(weights(half), weights(whole))
    # The next round is at the whole rate again.
    half.train(traffic, 2, rate_factor=2.0)
    whole.train(traffic, 2)
    assert not changed(weights(half), weights(whole))


def test_a_loss_that_is_not_finite_ends_the_round(target, traffic):
    trainer = make(target)
    with torch.no_grad():
        trainer.model.norm.weight[0] = float("nan")
    with pytest.raises(TrainingDivergedError, match="round 3 is nan"):
        trainer.train(traffic, 3)


def test_a_forgotten_optimizer_starts_anew(target, traffic):
    trainer = make(target)
    trainer.train(traffic, 1)
    assert trainer.optimizer.state
    trainer.reset_optimizer()
    assert not trainer.optimizer.state


def test_what_does_not_fit_is_refused(target):
    with pytest.raises(DrafterCompatibilityError):
        make(target, adapted_drafter(num_target_layers=9))
    with pytest.raises(InvalidInputError, match="length_head"):
        make(target, tiny_drafter(target), trained_parts="length_head")
