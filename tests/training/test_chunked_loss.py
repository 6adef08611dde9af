"""The chunked loss: equal to the dense form in value and gradient, and never more than a chunk of logits."""

from __future__ import annotations

import pytest
import torch

from adaflash_hf.errors import InvalidInputError
from adaflash_hf.training.chunked_loss import draft_loss, rows_per_chunk
from adaflash_hf.training.objectives import IGNORED_LABEL, DraftObjective
from adaflash_hf.training.teachers import DenseTeacher, TopKTeacher


OBJECTIVES = [
    DraftObjective(hard_label_weight=1.0, labels="trajectory"),
    DraftObjective(0.8, "reverse_kl", "none"),
    DraftObjective(0.8, "reverse_kl", "entry", 0.01),
    DraftObjective(0.3, "reverse_kl", "sum", 1.0),
    DraftObjective(0.0, "reverse_kl", "entry", 0.05),
    DraftObjective(0.0, "forward_kl", "none"),
    DraftObjective(0.5, "forward_kl", "none", labels="trajectory"),
    DraftObjective(0.0, "acceptance", "none", labels="trajectory"),
    DraftObjective(0.3, "acceptance", "none", labels="teacher"),
]
# Three whole blocks of four slots, one of two and one of three: responses end within a block.
SLOTS = torch.tensor([0, 1, 2, 3, 0, 1, 0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 3])


def random_problem(rows=17, hidden_size=6, vocab_size=11, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype)

    head, target_head = randn(vocab_size, hidden_size), randn(vocab_size, 5)
    labels = torch.randint(vocab_size, (rows,), generator=generator)
    labels[2] = IGNORED_LABEL
    weights = torch.rand(rows, generator=generator, dtype=dtype)
    weights[2] = 0
    teacher = DenseTeacher(randn(rows, 5), lambda states: states @ target_head.T)
    return randn(rows, hidden_size), labels, weights, head, teacher


def dense_loss(hidden, labels, weights, head, teacher, objective, slots):
    """The formulas once more, on all logits, written without the library's parts."""
    q = torch.softmax(hidden @ head.T, -1)
    p = torch.softmax(teacher.project(teacher.hidden_states), -1)
    label = labels if objective.labels == "trajectory" else p.argmax(-1).where(labels != IGNORED_LABEL, labels)
    right = q[torch.arange(len(q)), label.clamp(min=0)]
    hard = torch.where(label == IGNORED_LABEL, 0.0, -right.log())
    if objective.divergence == "acceptance":
        divergence = []
        for row, slot in enumerate(slots.tolist()):
            reached = torch.ones((), dtype=q.dtype)
            for before in range(row - slot, row + 1):
                reached = reached * (right[before] if label[before] != IGNORED_LABEL else 0)
            divergence.append(1 - reached)
        divergence = torch.stack(divergence)
    else:
        entries = q * (q / p).log() if objective.divergence == "reverse_kl" else p * (p / q).log()
        if objective.clip == "entry":
            divergence = torch.where(entries < objective.clip_threshold, entries, objective.clip_threshold).sum(-1)
        else:
            divergence = entries.sum(-1)
        if objective.clip == "sum":
            divergence = torch.where(divergence < objective.clip_threshold, divergence, objective.clip_threshold)
    loss = objective.hard_label_weight * hard + (1 - objective.hard_label_weight) * divergence
    return (loss * weights).sum() / weights.sum()


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
@pytest.mark.parametrize("chunk_rows", [1, 5, 64])
def test_chunked_equals_dense_in_value_and_gradient(objective, chunk_rows):
    # float32 with the tolerance that the design asks for.
    hidden, labels, weights, head, teacher = random_problem(dtype=torch.float32)
    hidden.requires_grad_()
    expected = dense_loss(hidden, labels, weights, head, teacher, objective, SLOTS)
    (expected_gradient,) = torch.autograd.grad(expected, hidden)
    result = draft_loss(
        hidden, labels, weights, lambda rows: rows @ head.T, objective, teacher, SLOTS, chunk_rows=chunk_rows
    )
    (gradient,) = torch.autograd.grad(3 * result.loss, hidden)
    torch.testing.assert_close(result.loss, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradient, 3 * expected_gradient, atol=1e-5, rtol=1e-5)
    assert torch.equal(result.predicted_ids, (hidden @ head.T).argmax(-1))


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_gradcheck(objective):
    hidden, labels, weights, head, teacher = random_problem(rows=6)
    hidden.requires_grad_()

    def loss(states):
        return draft_loss(
            states, labels, weights, lambda rows: rows @ head.T, objective, teacher, SLOTS[:6], chunk_rows=2
        ).loss

    assert torch.autograd.gradcheck(loss, (hidden,))


def test_gradcheck_with_a_top_k_teacher():
    hidden, labels, weights, head, dense = random_problem(rows=5)
    top = dense.rows(slice(0, 5)).log_p.topk(3)
    ids = top.indices.clone()
    ids[1, 2] = ids[3, 0] = -1
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


def rows_seen(objective, chunk_rows, slots=None):
    hidden, labels, weights, head, _ = random_problem()
    seen = []

    def project(rows):
        seen.append(len(rows))
        return rows @ head.T

    draft_loss(hidden, labels, weights, project, objective, slots=slots, chunk_rows=chunk_rows)
    return seen


def test_never_more_than_a_chunk_of_logits():
    assert rows_seen(DraftObjective(1.0), 7) == [7, 7, 3]
    # 152k columns in 256 MB: logits, gradients and temporaries of 73 rows.
    assert rows_per_chunk(151_936, 256 * 2**20) == 73
    assert rows_per_chunk(10**9, 1) == 1


def test_coupled_slots_come_in_whole_blocks():
    acceptance = DraftObjective(0.0, "acceptance", "none")
    # Blocks of 4, 2, 4, 3 and 4 rows.
    assert rows_seen(acceptance, 7, SLOTS) == [6, 7, 4]
    assert rows_seen(acceptance, 1, SLOTS) == [4, 2, 4, 3, 4]
    assert rows_seen(acceptance, None, SLOTS) == [17]
    with pytest.raises(InvalidInputError, match="slots"):
        rows_seen(acceptance, 7)


def test_no_slots_at_all():
    hidden, labels, weights, head, _ = random_problem()
    for objective in (DraftObjective(1.0), DraftObjective(0.0, "acceptance", "none")):
        nothing = draft_loss(
            hidden[:0].requires_grad_(),
            labels[:0],
            weights[:0],
            lambda rows: rows @ head.T,
            objective,
            slots=SLOTS[:0],
        )
        nothing.loss.backward()
        assert nothing.loss.item() == 0


def test_half_precision_hidden_states_give_a_float32_loss():
    hidden, labels, weights, head, _ = random_problem(dtype=torch.float32)
    states = hidden.bfloat16().requires_grad_()
    result = draft_loss(states, labels, weights, lambda rows: rows @ head.bfloat16().T, DraftObjective(1.0))
    result.loss.backward()
    assert result.loss.dtype == torch.float32 and states.grad.dtype == torch.bfloat16


def test_a_divergence_needs_a_teacher():
    hidden, labels, weights, head, _ = random_problem()
    with pytest.raises(InvalidInputError, match="teacher"):
        draft_loss(hidden, labels, weights, lambda rows: rows @ head.T, DraftObjective(0.5))
