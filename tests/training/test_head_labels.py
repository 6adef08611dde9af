"""Labels of length and confidence heads, by hand."""

from __future__ import annotations

import pytest
import torch

from adaflash_hf.generation.length_policies import scaled_verify_lengths
from adaflash_hf.training.head_labels import hindsight_length_labels, slot_verdicts, truncated_length_labels
from adaflash_hf.training.metrics import hindsight_acceptance
from adaflash_hf.training.objectives import IGNORED_LABEL as NONE


def test_hindsight_labels():
    assert hindsight_length_labels(torch.tensor([0, 3, 7]), 8).tolist() == [1 / 8, 4 / 8, 1.0]
    # As many drafts as rows: all of them and the bonus are one more than the block.
    assert hindsight_length_labels(torch.tensor([8]), 8).tolist() == [1.0]


def test_verify_lengths():
    # round(0.5 * 8 * 1.3) = 5, never fewer than two rows, never more than the block.
    assert scaled_verify_lengths(torch.tensor([0.5, 0.01, 0.99]), 8, 1.3).tolist() == [5, 2, 8]
    assert scaled_verify_lengths(torch.tensor([0.01]), 8, 1.3, min_verify_length=1).tolist() == [1]


def test_truncated_labels_never_exceed_what_the_head_asked_for():
    ratio = torch.tensor([0.5, 0.5, 0.01, 0.99])
    accepted = torch.tensor([7, 2, 7, 7])
    # Verified drafts: 4, 4, 1 and 7.
    assert truncated_length_labels(accepted, ratio, 8, 1.3).tolist() == [5 / 8, 3 / 8, 2 / 8, 1.0]


@pytest.mark.parametrize(
    ("predicted", "labels", "expected"),
    [
        ([7, 8, 9], [1, 8, 9], [0, -1, -1]),
        ([7, 8, 9], [7, 1, 9], [1, 0, -1]),
        ([7, 8, 9], [7, 8, 9], [1, 1, 1]),
        ([7, 8, 9], [7, 8, NONE], [1, 1, -1]),
        ([7, 8, 9], [7, 1, NONE], [1, 0, -1]),
        ([7, 8, 9], [NONE, NONE, NONE], [-1, -1, -1]),
    ],
)
def test_verdicts_on_slots(predicted, labels, expected):
    labels = torch.tensor([labels])
    acceptance = hindsight_acceptance(torch.tensor([predicted]), labels, torch.tensor([False]))
    assert slot_verdicts(acceptance.accepted, labels).tolist() == [expected]
