from __future__ import annotations

import math

import pytest
import torch

from adaflash_hf.errors import InvalidInputError
from adaflash_hf.training.objectives import (
    IGNORED_LABEL,
    DenseTeacher,
    DraftObjective,
    TeacherRows,
    TopKTeacher,
    divergence_of,
    draft_loss,
    position_weights,
    row_losses,
    rows_per_chunk,
)


# The worked example of the design: both distributions over a vocabulary of four.
Q = torch.tensor([[0.55, 0.30, 0.10, 0.05]], dtype=torch.float64)
P = torch.tensor([[0.80, 0.15, 0.04, 0.01]], dtype=torch.float64)

OBJECTIVES = [
    DraftObjective(hard_label_weight=1.0, labels="trajectory"),
    DraftObjective(0.8, "reverse_kl", "none"),
    DraftObjective(0.8, "reverse_kl", "entry", 0.01),
    DraftObjective(0.3, "reverse_kl", "sum", 1.0),
    DraftObjective(0.0, "forward_kl", "none"),
    DraftObjective(0.5, "forward_kl", "none", labels="trajectory"),
]


def worked_example(**fields):
    teacher = TeacherRows(P.log(), P.argmax(-1))
    # The label is the target's likeliest token, whatever followed in the trajectory.
    return row_losses(Q.log(), torch.tensor([2]), DraftObjective(**fields), teacher)


def random_problem(rows=13, hidden_size=6, vocab_size=11, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype)

    head, target_head = randn(vocab_size, hidden_size), randn(vocab_size, 5)
    labels = torch.randint(vocab_size, (rows,), generator=generator)
    labels[3] = IGNORED_LABEL
    weights = torch.rand(rows, generator=generator, dtype=dtype)
    weights[3] = 0
    teacher = DenseTeacher(randn(rows, 5), lambda states: states @ target_head.T)
    return randn(rows, hidden_size), labels, weights, head, teacher


def dense_mixture(hidden, labels, weights, head, teacher, objective):
    """The formulas once more, on all logits, written without the library's parts."""
    q = torch.softmax(hidden @ head.T, -1)
    p = torch.softmax(teacher.project(teacher.hidden_states), -1)
    label = labels if objective.labels == "trajectory" else p.argmax(-1)
    hard = -q[torch.arange(len(q)), label.clamp(min=0)].log()
    entries = q * (q / p).log() if objective.divergence == "reverse_kl" else p * (p / q).log()
    if objective.clip == "entry":
        divergence = torch.where(entries < objective.clip_threshold, entries, objective.clip_threshold).sum(-1)
    else:
        divergence = entries.sum(-1)
    if objective.clip == "sum":
        divergence = torch.where(divergence < objective.clip_threshold, divergence, objective.clip_threshold)
    loss = objective.hard_label_weight * hard + (1 - objective.hard_label_weight) * divergence
    return (loss * weights).sum() / weights.sum()


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
    outside = TopKTeacher(torch.tensor([[-1, 0]]), P[:, :2].log()).rows(slice(0, 1))
    assert outside.best_ids.tolist() == [IGNORED_LABEL]


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
@pytest.mark.parametrize("chunk_rows", [1, 5, 64])
def test_chunked_equals_dense_in_value_and_gradient(objective, chunk_rows):
    # float32 with the tolerance that the design asks for.
    hidden, labels, weights, head, teacher = random_problem(dtype=torch.float32)
    hidden.requires_grad_()
    expected = dense_mixture(hidden, labels, weights, head, teacher, objective)
    (expected_gradient,) = torch.autograd.grad(expected, hidden)
    result = draft_loss(hidden, labels, weights, lambda rows: rows @ head.T, objective, teacher, chunk_rows=chunk_rows)
    (gradient,) = torch.autograd.grad(3 * result.loss, hidden)
    torch.testing.assert_close(result.loss, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradient, 3 * expected_gradient, atol=1e-5, rtol=1e-5)
    assert torch.equal(result.predicted_ids, (hidden @ head.T).argmax(-1))


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_gradcheck(objective):
    hidden, labels, weights, head, teacher = random_problem(rows=5)
    hidden.requires_grad_()

    def loss(states):
        return draft_loss(states, labels, weights, lambda rows: rows @ head.T, objective, teacher, chunk_rows=2).loss

    assert torch.autograd.gradcheck(loss, (hidden,))


def test_gradcheck_with_a_top_k_teacher():
    hidden, labels, weights, head, dense = random_problem(rows=5)
    top = dense.rows(slice(0, 5)).log_p.topk(3)
    ids = top.indices.clone()
    ids[1, 2] = ids[2, 0] = -1
    hidden.requires_grad_()
    for divergence in ("reverse_kl", "forward_kl"):
        objective = DraftObjective(0.5, divergence, "none")

        def loss(states, objective=objective):
            teacher = TopKTeacher(ids, top.values)
            return draft_loss(
                states, labels, weights, lambda rows: rows @ head.T, objective, teacher, chunk_rows=2
            ).loss

        assert torch.autograd.gradcheck(loss, (hidden,))


def test_slots_without_weight_change_nothing():
    hidden, labels, weights, head, _ = random_problem()
    objective = DraftObjective(1.0)
    kept = weights > 0
    one = draft_loss(hidden, labels, weights, lambda rows: rows @ head.T, objective)
    two = draft_loss(hidden[kept], labels[kept], weights[kept], lambda rows: rows @ head.T, objective)
    torch.testing.assert_close(one.loss, two.loss)
    nothing = draft_loss(hidden, labels, 0 * weights, lambda rows: rows @ head.T, objective)
    assert nothing.loss.item() == 0


def test_never_more_than_a_chunk_of_logits():
    hidden, labels, weights, head, _ = random_problem()
    seen = []

    def project(rows):
        seen.append(len(rows))
        return rows @ head.T

    draft_loss(hidden, labels, weights, project, DraftObjective(1.0), chunk_rows=4)
    assert seen == [4, 4, 4, 1]
    # 152k columns in 256 MB: logits, gradients and temporaries of 70 rows.
    assert rows_per_chunk(151_936, 256 * 2**20) == 73
    assert rows_per_chunk(10**9, 1) == 1


def test_half_precision_hidden_states_give_a_float32_loss():
    hidden, labels, weights, head, _ = random_problem(dtype=torch.float32)
    states = hidden.bfloat16().requires_grad_()
    result = draft_loss(states, labels, weights, lambda rows: rows @ head.bfloat16().T, DraftObjective(1.0))
    result.loss.backward()
    assert result.loss.dtype == torch.float32 and states.grad.dtype == torch.bfloat16


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
    with pytest.raises(InvalidInputError, match="objective"):
        DraftObjective.named("mse", **fields)


@pytest.mark.parametrize(
    "fields", [{"hard_label_weight": 1.5}, {"divergence": "kl"}, {"clip": "all"}, {"clip_threshold": -1.0}]
)
def test_values_out_of_range_are_refused(fields):
    with pytest.raises(InvalidInputError, match=next(iter(fields))):
        DraftObjective(**fields)


def test_a_divergence_needs_a_teacher():
    hidden, labels, weights, head, _ = random_problem()
    with pytest.raises(InvalidInputError, match="teacher"):
        draft_loss(hidden, labels, weights, lambda rows: rows @ head.T, DraftObjective(0.5))
