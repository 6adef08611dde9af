from __future__ import annotations

import pytest

from adaflash_hf.errors import InvalidInputError
from adaflash_hf.training.presets import find_preset
from adaflash_hf.training.recipes import ShapeDefaults, Situation, decide, decide_shape, schedule_arguments


def decisions(start="scratch", on_cpu=True, has_stored_teacher=True, block_size=8, **given):
    made = decide(Situation(start, on_cpu, has_stored_teacher, block_size), given)
    assert all(decision.reason for decision in made)
    return {decision.name: decision.value for decision in made}


def test_a_new_drafter_on_a_cpu():
    values = decisions()
    assert values["objective"] == "mixture" and values["divergence"] == "forward_kl" and values["clip"] == "none"
    assert values["optimizer"] == "adamw" and values["learning_rate"] == 1e-3 and values["batch_size"] == 2
    assert values["anchors"] == 64 and values["vocabulary_size"] == 8192 and values["position_decay"] == 4


def test_a_new_drafter_on_a_gpu_without_soft_targets():
    values = decisions(on_cpu=False, has_stored_teacher=False, block_size=16)
    assert values["objective"] == "cross_entropy" and "divergence" not in values and "clip" not in values
    assert values["optimizer"] == "muon" and values["learning_rate"] == 2e-3 and values["vector_learning_rate"] == 1e-3
    assert values["anchors"] == 512 and values["vocabulary_size"] == 0 and values["position_decay"] == 7


@pytest.mark.parametrize(
    ("hidden_size", "given", "batch_size", "accumulation"),
    [
        (1024, {}, 8, 1),
        (2048, {}, 4, 2),
        (4096, {}, 2, 4),
        (4096, {"anchors": 128}, 8, 1),
        (4096, {"batch_size": 1}, 1, 8),
        (4096, {"batch_size": 16}, 16, 1),
        (65536, {}, 1, 8),
    ],
)
def test_a_gpu_takes_eight_trajectories_a_step_in_pieces_that_fit(hidden_size, given, batch_size, accumulation):
    made = decide(Situation("scratch", False, True, 16, hidden_size=hidden_size), given)
    values = {decision.name: decision.value for decision in made}
    assert (values["batch_size"], values["gradient_accumulation"]) == (batch_size, accumulation)


def test_an_existing_drafter_goes_on_with_the_papers_settings():
    values = decisions("init")
    assert values["objective"] == "mixture" and values["hard_label_weight"] == 0.8
    assert values["divergence"] == "reverse_kl" and values["clip"] == "entry" and values["clip_threshold"] == 0.01
    assert values["optimizer"] == "adamw" and values["learning_rate"] == 3e-4 and values["epochs"] == 2


def test_a_drafter_with_a_draft_vocabulary_is_trained_on_it():
    values = {d.name: d.value for d in decide(Situation("init", True, True, 8, has_draft_vocabulary=True), {})}
    assert values["vocabulary_size"] == 0 and values["draft_vocabulary"] is False


def test_a_length_head_alone():
    values = decisions("length_head")
    assert values["length_head_learning_rate"] == 2e-4 and "objective" not in values and "optimizer" not in values


def test_the_schedule_fits_any_run():
    whole = schedule_arguments(100, 20, 0.5)
    assert whole["warmup_steps"] == 20 and whole["lr_scheduler_kwargs"]["num_decay_steps"] == 50
    short = schedule_arguments(10, 20, 1.0)
    assert short["warmup_steps"] == 5 and short["lr_scheduler_kwargs"]["num_decay_steps"] == 5


def test_a_confidence_head_alone():
    values = decisions("confidence_head")
    assert values["length_head_learning_rate"] == 1e-3 and "objective" not in values and "length_labels" not in values
    assert decisions("length_head")["length_labels"] == "hindsight"


def test_acceptance_needs_no_decay_and_no_clipping():
    values = decisions(objective="acceptance")
    assert values["position_decay"] is None and "clip" not in values and "hard_label_weight" not in values
    assert decisions(objective="acceptance", position_decay=3.0)["position_decay"] == 3.0
    mixed = decisions(objective="mixture", divergence="acceptance")
    assert mixed["position_decay"] == 4 and "clip" not in mixed


def test_what_the_user_says_counts_and_is_marked():
    made = decide(Situation("scratch", True, True, 8), {"optimizer": "adamw", "epochs": None, "anchors": 9})
    by_name = {decision.name: decision for decision in made}
    assert by_name["optimizer"][1:] == ("adamw", "given") and by_name["anchors"][1:] == (9, "given")
    assert by_name["learning_rate"].value == 1e-3 and by_name["epochs"].reason != "given"
    assert decisions(objective="mixture", divergence="reverse_kl")["clip"] == "entry"
    assert decisions(objective="reverse_kl")["clip_threshold"] == 0.01


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"start": "length_head", "objective": "mixture"}, "objective"),
        ({"start": "confidence_head", "length_labels": "truncated"}, "length_labels"),
        ({"objective": "cross_entropy", "hard_label_weight": 0.5}, "hard_label_weight"),
        ({"optimizer": "adamw", "vector_learning_rate": 1.0}, "vector_learning_rate"),
        ({"objective": "forward_kl", "clip": "sum"}, "clip"),
    ],
)
def test_settings_without_effect_are_refused(given, name):
    with pytest.raises(InvalidInputError, match=name):
        decisions(**given)


def test_what_a_file_for_another_run_says_may_be_left_out():
    situation = Situation("scratch", True, True, 8)
    given = {"objective": "cross_entropy", "clip": "sum", "anchors": 9}
    values = {name: value for name, value, _ in decide(situation, given, droppable=("clip", "anchors"))}
    assert "clip" not in values and values["anchors"] == 9
    with pytest.raises(InvalidInputError, match="clip"):
        decide(situation, given, droppable=("anchors",))


def shape(given=None, preset=None, on_cpu=False, depth=32, mask=lambda: 7):
    made = decide_shape(ShapeDefaults(on_cpu, depth, [1, 8, 15], mask), given or {}, preset)
    assert [decision.name for decision in made] == ["layers", "block_size", "target_layer_ids", "mask_token_id"]
    return {name: (value, reason) for name, value, reason in made}


def test_the_shape_of_a_new_drafter_comes_with_reasons():
    family = "what the DFlash family uses"
    values = shape()
    assert values["layers"] == (5, family) and values["block_size"] == (16, family)
    assert values["target_layer_ids"][0] == [1, 8, 15] and values["mask_token_id"][0] == 7
    values = shape(on_cpu=True, depth=3)
    assert values["layers"] == (3, "as many as the target has") and values["block_size"][0] == 8


def test_a_preset_stands_in_and_what_is_given_wins():
    def fail():
        raise AssertionError("nobody asked")

    values = shape({"block_size": 4}, find_preset("qwen3-8b"), on_cpu=True, mask=fail)
    assert values["block_size"] == (4, "given") and values["layers"] == (5, "preset qwen3-8b")
    assert values["mask_token_id"] == (151669, "preset qwen3-8b")
    assert values["target_layer_ids"] == ([1, 9, 17, 25, 33], "preset qwen3-8b")
