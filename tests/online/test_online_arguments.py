from __future__ import annotations

import pytest
import torch

from adaflash_hf.errors import InvalidInputError
from adaflash_hf.online import online_arguments
from adaflash_hf.online.online_arguments import OnlineTrainingArguments


def test_defaults_are_the_papers():
    arguments = OnlineTrainingArguments()
    assert (arguments.round_size, arguments.epochs, arguments.batch_size) == (128, 2, 1)
    assert (arguments.gradient_accumulation_steps, arguments.max_tokens) == (2, 2048)
    assert (arguments.learning_rate, arguments.length_head_learning_rate) == (3e-4, 2e-4)
    assert arguments.draft_objective.hard_label_weight == 0.8
    assert arguments.draft_objective.divergence == "reverse_kl"


def test_osd_is_an_unclipped_forward_kl():
    objective = OnlineTrainingArguments(objective="forward_kl").draft_objective
    assert (objective.hard_label_weight, objective.divergence, objective.clip) == (0.0, "forward_kl", "none")


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"round_size": 0}, "round_size"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"tolerance": -0.1}, "tolerance"),
        ({"objective": "best"}, "objective"),
        ({"trained_parts": "head"}, "trained_parts"),
        ({"length_labels": "guess"}, "length_labels"),
        ({"precision": "int8"}, "precision"),
        ({"clip": "row"}, "clip"),
        ({"held_out": 4, "min_held_out": 8}, "min_held_out"),
        ({"lora_rank": 4, "trained_parts": "length_head"}, "lora_rank"),
    ],
)
def test_wrong_settings_are_refused(fields, name):
    with pytest.raises(InvalidInputError, match=f"`{name}`"):
        OnlineTrainingArguments(**fields)


def test_bfloat16_is_for_what_multiplies_it_unless_asked_for(monkeypatch):
    monkeypatch.setattr(online_arguments, "multiplies_natively", lambda dtype: False)
    arguments = OnlineTrainingArguments()
    assert arguments.autocast_dtype(torch.device("cuda")) == torch.bfloat16
    assert arguments.autocast_dtype(torch.device("cpu")) is None
    monkeypatch.setattr(online_arguments, "multiplies_natively", lambda dtype: dtype == torch.bfloat16)
    assert arguments.autocast_dtype(torch.device("cpu")) == torch.bfloat16
    assert OnlineTrainingArguments(precision="bfloat16").autocast_dtype(torch.device("cpu")) == torch.bfloat16
    assert OnlineTrainingArguments(precision="float32").autocast_dtype(torch.device("cuda")) is None
