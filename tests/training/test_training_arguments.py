from __future__ import annotations

import pytest

from adaflash_hf.errors import InvalidInputError
from adaflash_hf.training.objectives import DraftObjective
from adaflash_hf.training.training_arguments import DrafterTrainingArguments


def arguments(tmp_path, **fields):
    return DrafterTrainingArguments(output_dir=str(tmp_path), use_cpu=True, **fields)


def test_defaults_are_the_papers(tmp_path):
    args = arguments(tmp_path)
    assert args.draft_objective == DraftObjective(0.8, "reverse_kl", "entry", 0.01, "teacher")
    assert args.learning_rate == 3e-4 and args.length_head_learning_rate == 2e-4
    assert args.anchors_per_trajectory == 512 and args.position_decay is None
    assert args.remove_unused_columns is False and args.label_names == ["labels"]


def test_they_survive_their_json(tmp_path):
    args = arguments(tmp_path, objective="forward_kl", vocabulary_size=50, train_only="drafter")
    fields = {key: value for key, value in args.to_dict().items() if key in ("objective", "vocabulary_size")}
    assert arguments(tmp_path, **fields).draft_objective == args.draft_objective


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"train_only": "head"}, "train_only"),
        ({"teacher": "big"}, "teacher"),
        ({"teacher": "none"}, "teacher"),
        ({"anchors_per_trajectory": 0}, "anchors_per_trajectory"),
        ({"learning_rate": -1.0}, "`learning_rate` is -1.0; it must be above 0"),
        ({"vector_learning_rate": 0.0}, "vector_learning_rate"),
        ({"num_train_epochs": 0}, "num_train_epochs"),
        ({"position_decay": 0.0}, "position_decay"),
    ],
)
def test_values_out_of_range_are_refused(tmp_path, fields, name):
    with pytest.raises(InvalidInputError, match=name):
        arguments(tmp_path, **fields)
