"""Teachers: the full distribution and the stored likeliest tokens, over the same events as the drafter's."""

from __future__ import annotations

import math

import pytest
import torch

from adaflash_hf.training.objectives import IGNORED_LABEL, DraftObjective, row_losses
from adaflash_hf.training.teachers import DenseTeacher, TeacherRows, TopKTeacher, event_log_q


# The worked example of the design: both distributions over a vocabulary of four.
Q = torch.tensor([[0.55, 0.30, 0.10, 0.05]], dtype=torch.float64)
P = torch.tensor([[0.80, 0.15, 0.04, 0.01]], dtype=torch.float64)


def test_dense_teacher_makes_only_the_rows_asked_for():
    head = torch.eye(4, dtype=torch.float64)
    teacher = DenseTeacher(torch.cat([Q.log(), P.log()]), lambda states: states @ head)
    rows = teacher.rows(slice(1, 2))
    torch.testing.assert_close(rows.log_p, P.log())
    assert rows.best_ids.tolist() == [0] and rows.ids is None


def test_events_of_the_drafter():
    log_q = Q.log()
    assert torch.equal(event_log_q(log_q, None), log_q)
    events = event_log_q(log_q, torch.tensor([[2, -1]])).exp()
    assert events[0].tolist() == pytest.approx([0.10, 0.0, 0.90])


def test_top_k_teacher_with_all_tokens_equals_the_dense_one():
    ids = torch.tensor([[0, 1, 2, 3]])
    sparse = TopKTeacher(ids, P.log()).rows(slice(0, 1))
    for divergence in ("reverse_kl", "forward_kl"):
        objective = DraftObjective(0.5, divergence, "none")
        dense = row_losses(Q.log(), ids[:, 0], objective, TeacherRows(P.log(), P.argmax(-1)))
        # The rest is nothing, but counts as 1e-6 to stay finite.
        assert row_losses(Q.log(), ids[:, 0], objective, sparse).loss.item() == pytest.approx(
            dense.loss.item(), abs=1e-5
        )


def test_top_k_teacher_counts_all_other_tokens_as_one_event():
    sparse = TopKTeacher(torch.tensor([[0, 1]]), P[:, :2].log()).rows(slice(0, 1))
    losses = row_losses(Q.log(), torch.tensor([0]), DraftObjective(0.0, "forward_kl", "none"), sparse)
    expected = 0.8 * math.log(0.8 / 0.55) + 0.15 * math.log(0.15 / 0.30) + 0.05 * math.log(0.05 / 0.15)
    assert losses.divergence.item() == pytest.approx(expected)


def test_top_k_teacher_counts_tokens_outside_the_vocabulary_with_the_rest():
    sparse = TopKTeacher(torch.tensor([[0, -1]]), P[:, :2].log()).rows(slice(0, 1))
    logits = Q.log().requires_grad_()
    losses = row_losses(logits, torch.tensor([0]), DraftObjective(0.0, "reverse_kl", "none"), sparse)
    expected = 0.55 * math.log(0.55 / 0.80) + 0.45 * math.log(0.45 / 0.20)
    assert losses.divergence.item() == pytest.approx(expected)
    losses.loss.sum().backward()
    assert logits.grad.isfinite().all()


def test_a_likeliest_token_outside_the_vocabulary_is_no_label():
    outside = TopKTeacher(torch.tensor([[-1, 0]]), P[:, :2].log()).rows(slice(0, 1))
    losses = row_losses(Q.log(), torch.tensor([0]), DraftObjective(1.0, labels="teacher"), outside)
    assert losses.hard.item() == 0
    # Where no token followed there is no teacher either, whatever is stored there.
    inside = TopKTeacher(torch.tensor([[0, 1]]), P[:, :2].log()).rows(slice(0, 1))
    losses = row_losses(Q.log(), torch.tensor([IGNORED_LABEL]), DraftObjective(1.0, labels="teacher"), inside)
    assert losses.hard.item() == 0
