from __future__ import annotations

import math

import pytest
import torch

from adaflash_hf.errors import InvalidInputError
from adaflash_hf.training.objectives import (
    IGNORED_LABEL,
    DraftObjective,
    divergence_of,
    position_weights,
    prefix_probabilities,
    row_losses,
)
from adaflash_hf.training.teachers import TeacherRows


# The worked example of the design: both distributions over a vocabulary of four.
Q = torch.tensor([[0.55, 0.30, 0.10, 0.05]], dtype=torch.float64)
P = torch.tensor([[0.80, 0.15, 0.04, 0.01]], dtype=torch.float64)


def worked_example(**fields):
    teacher = TeacherRows(P.log(), P.argmax(-1))
    # The label is the target's likeliest token, whatever followed in the trajectory.
    return row_losses(Q.log(), torch.tensor([2]), DraftObjective(**fields), teacher)


def test_worked_example():
    losses = worked_example(hard_label_weight=0.8, clip="none")
    assert losses.hard.item() == pytest.approx(0.598, abs=5e-4)
    assert losses.divergence.item() == pytest.approx(0.174, abs=5e-4)
    assert losses.loss.item() == pytest.approx(0.513, abs=5e-4)
    assert losses.predicted_ids.tolist() == [0]


def test_worked_example_clipped_by_hand():
    # The entries are .55 ln(.55/.80) = -.20608, .30 ln 2 = .20794, .10 ln 2.5 = .09163, .05 ln 5 = .08047.
    first = 0.55 * math.log(0.55 / 0.80)
    by_entry = worked_example(hard_label_weight=0.0, clip="entry", clip_threshold=0.01)
    assert by_entry.divergence.item() == pytest.approx(first + 3 * 0.01)
    assert by_entry.clipped.item() == 0.75
    loose = worked_example(hard_label_weight=0.0, clip="entry", clip_threshold=0.085)
    assert loose.divergence.item() == pytest.approx(first + 2 * 0.085 + 0.05 * math.log(5))
    by_sum = worked_example(hard_label_weight=0.0, clip="sum", clip_threshold=0.01)
    assert by_sum.divergence.item() == pytest.approx(0.01) and by_sum.clipped.item() == 1


def test_worked_example_of_forward_kl():
    # .80 ln(.80/.55) + .15 ln(.15/.30) + .04 ln(.04/.10) + .01 ln(.01/.05)
    expected = 0.8 * math.log(0.8 / 0.55) + 0.15 * math.log(0.5) + 0.04 * math.log(0.4) + 0.01 * math.log(0.2)
    losses = worked_example(hard_label_weight=0.0, divergence="forward_kl", clip="none")
    assert losses.divergence.item() == pytest.approx(expected)


def test_a_clipped_entry_has_no_gradient():
    log_q = Q.log().requires_grad_()
    divergence, _ = divergence_of(log_q, P.log(), DraftObjective(0.0, clip="entry", clip_threshold=0.01))
    divergence.sum().backward()
    assert log_q.grad[0, 0] != 0 and log_q.grad[0, 1:].tolist() == [0, 0, 0]


def test_acceptance_by_hand():
    # Two blocks. The first drafts its labels with probability 1/2, 0.4 and 0.5, the second one slot with 0.9.
    right = torch.tensor([0.5, 0.4, 0.5, 0.9], dtype=torch.float64)
    logits = torch.stack([right, 1 - right], dim=-1).log().requires_grad_()
    acceptance = DraftObjective(0.0, "acceptance", "none")
    losses = row_losses(logits, torch.zeros(4, dtype=torch.long), acceptance, slots=torch.tensor([0, 1, 2, 0]))
    assert losses.loss.tolist() == pytest.approx([1 - 0.5, 1 - 0.5 * 0.4, 1 - 0.5 * 0.4 * 0.5, 1 - 0.9])
    # Slots of the first block less its expected accepted drafts, 0.5 + 0.2 + 0.1.
    assert losses.loss[:3].sum().item() == pytest.approx(3 - 0.8)
    losses.loss.sum().backward()
    # d(E)/d(log q_j) is the sum of the products that slot j is in, and d(log q)/d(logit) is 1 - q.
    expected = [-0.8 * 0.5, -0.3 * 0.6, -0.1 * 0.5, -0.9 * 0.1]
    assert logits.grad[:, 0].tolist() == pytest.approx(expected)


def test_nothing_is_accepted_after_a_token_that_cannot_be_drafted():
    logits = torch.zeros(3, 2, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, IGNORED_LABEL, 0])
    losses = row_losses(logits, labels, DraftObjective(0.0, "acceptance", "none"), slots=torch.tensor([0, 1, 2]))
    assert losses.loss.tolist() == [0.5, 1, 1]
    losses.loss.sum().backward()
    assert logits.grad.isfinite().all() and logits.grad[1:].abs().sum() == 0 and logits.grad[0, 0] < 0


def test_a_mixture_with_acceptance():
    logits = torch.tensor([[0.25, 0.75]], dtype=torch.float64).log()
    label, slot = torch.tensor([0]), torch.tensor([0])
    losses = row_losses(logits, label, DraftObjective(0.5, "acceptance", "none"), slots=slot)
    assert losses.loss.item() == pytest.approx(0.5 * math.log(4) + 0.5 * 0.75)


def test_prefix_probabilities_of_blocks_of_different_lengths():
    log_probs = torch.tensor([0.5, 0.5, 0.25, 0.5, 0.5]).log()
    result = prefix_probabilities(log_probs, torch.tensor([0, 1, 0, 1, 2]))
    assert result.tolist() == pytest.approx([0.5, 0.25, 0.25, 0.125, 0.0625])
    assert prefix_probabilities(log_probs[:0], torch.zeros(0, dtype=torch.long)).tolist() == []


def test_what_needs_a_teacher_and_what_couples_slots():
    assert DraftObjective(0.8).needs_teacher and not DraftObjective(0.8).couples_slots
    acceptance = DraftObjective(0.8, "acceptance", "none")
    assert acceptance.couples_slots and not acceptance.needs_teacher
    assert not DraftObjective(1.0, "acceptance", "none").couples_slots


def test_position_weights():
    assert position_weights(3, None).tolist() == [1, 1, 1]
    expected = [1, math.exp(-1 / 2), math.exp(-1)]
    assert position_weights(3, 2.0).tolist() == pytest.approx(expected)
    with pytest.raises(InvalidInputError, match="position_decay"):
        position_weights(3, 0.0)


def test_named_objectives():
    fields = {"hard_label_weight": 0.7, "divergence": "forward_kl", "clip": "sum", "clip_threshold": 0.5}
    assert DraftObjective.named("cross_entropy", **fields) == DraftObjective(1.0, labels="trajectory")
    assert DraftObjective.named("mixture", **fields) == DraftObjective(0.7, "forward_kl", "sum", 0.5)
    assert DraftObjective.named("reverse_kl", **fields) == DraftObjective(0.0, "reverse_kl", "sum", 0.5)
    assert DraftObjective.named("forward_kl", **fields) == DraftObjective(0.0, "forward_kl", "none")
    assert DraftObjective.named("acceptance", **fields) == DraftObjective(
        0.0, "acceptance", "none", labels="trajectory"
    )
    mixed = DraftObjective.named("mixture", **{**fields, "divergence": "acceptance"})
    assert mixed == DraftObjective(0.7, "acceptance", "none", labels="trajectory")
    with pytest.raises(InvalidInputError, match="objective"):
        DraftObjective.named("mse", **fields)


@pytest.mark.parametrize(
    "fields", [{"hard_label_weight": 1.5}, {"divergence": "kl"}, {"clip": "all"}, {"clip_threshold": -1.0}]
)
def test_values_out_of_range_are_refused(fields):
    with pytest.raises(InvalidInputError, match=next(iter(fields))):
        DraftObjective(**fields)
