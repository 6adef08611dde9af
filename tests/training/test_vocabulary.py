from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_models import VOCAB_SIZE, tiny_target
from tiny_trajectories import make_trajectories
from torch import nn

from adaflash_hf.errors import InvalidInputError
from adaflash_hf.training.objectives import IGNORED_LABEL
from adaflash_hf.training.trajectory_dataset import TrajectoryDataset
from adaflash_hf.training.vocabulary import RestrictedVocabulary, build_restricted_vocabulary, count_tokens


def test_the_most_counted_tokens_are_kept_in_order():
    counts = np.array([0, 5.0, 0, 1, 9, 5])
    assert build_restricted_vocabulary(counts, 3).token_ids.tolist() == [1, 4, 5]
    # Ties go to the lower id; what never occurred is not filled in.
    assert build_restricted_vocabulary(counts, 2).token_ids.tolist() == [1, 4]
    assert build_restricted_vocabulary(counts, 100).token_ids.tolist() == [1, 3, 4, 5]
    with pytest.raises(InvalidInputError, match="vocabulary_size"):
        build_restricted_vocabulary(counts, 1)


def test_labels_and_places_outside_are_marked():
    vocabulary = RestrictedVocabulary(torch.tensor([2, 5]), 7)
    assert len(vocabulary) == 2
    tokens = torch.tensor([[5, 0], [2, IGNORED_LABEL]])
    assert vocabulary.labels(tokens).tolist() == [[1, IGNORED_LABEL], [0, IGNORED_LABEL]]
    assert vocabulary.places(tokens).tolist() == [[1, -1], [0, -1]]


@pytest.mark.parametrize("bias", [True, False])
def test_head_gives_the_full_heads_logits_of_its_tokens(bias):
    full = nn.Linear(4, 7, bias=bias)
    vocabulary = RestrictedVocabulary(torch.tensor([0, 3, 6]), 7)
    rows = torch.randn(5, 4)
    torch.testing.assert_close(vocabulary.head(full)(rows), full(rows)[:, [0, 3, 6]])
    with pytest.raises(InvalidInputError, match="LM head"):
        vocabulary.head(nn.Identity())


def test_counts_weigh_what_was_said_above_what_was_likely(tmp_path):
    dataset = TrajectoryDataset(make_trajectories(tmp_path, tiny_target("llama"), teacher_top_k=3))
    counts = count_tokens(dataset, range(len(dataset)), VOCAB_SIZE)
    said = np.bincount(np.concatenate([dataset.response_ids(i) for i in range(len(dataset))]), minlength=VOCAB_SIZE)
    likely = counts - 10 * said
    # A distribution's three likeliest tokens have at most probability one, at 120 places.
    assert likely.min() >= -1e-9 and 20 < likely.sum() <= 120.5
    assert count_tokens(dataset, [0], VOCAB_SIZE).sum() < counts.sum()
