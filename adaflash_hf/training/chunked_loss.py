"""The loss of all slots of a batch, without ever holding all their logits.

Those would be far larger than everything else in training, so [`draft_loss`] walks over chunks of rows and computes
loss and hidden-state gradient of a chunk before the next: memory is one chunk times the vocabulary.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from ..errors import InvalidInputError
from .objectives import DraftObjective, RowLosses, row_losses
from .teachers import Project, Teacher, at_least_float32


__all__ = ["DraftLoss", "default_logits_memory", "draft_loss", "rows_per_chunk"]

# Logits, log-probabilities, their gradients and the temporaries of softmax, all [rows, V] in float32.
_BYTES_PER_LOGIT = 4 * 6


class DraftLoss(NamedTuple):
    """
    Loss of all slots of a batch; only `loss` carries a gradient.

    Attributes:
        loss: `[]`, the weighted mean over slots.
        hard: `[]`, the same mean of the hard label's loss.
        divergence: `[]`, the same mean of the divergence.
        clipped: `[]`, the same mean of the share that clipping changed.
        predicted_ids: `[n]`, the drafter's likeliest token of each slot.
    """

    loss: torch.Tensor
    hard: torch.Tensor
    divergence: torch.Tensor
    clipped: torch.Tensor
    predicted_ids: torch.Tensor


def draft_loss(
    hidden_states: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
    project: Project,
    objective: DraftObjective,
    teacher: Teacher | None = None,
    slots: torch.Tensor | None = None,
    *,
    chunk_rows: int | None = None,
) -> DraftLoss:
    """
    Weighted mean of the losses of all slots, without ever holding all their logits.

    Args:
        hidden_states (`torch.Tensor` of shape `[n, hidden_size]`):
            The drafter's hidden states; the gradient goes into them.
        labels (`torch.Tensor` of shape `[n]`):
            Tokens that followed, in the drafter's vocabulary, or `IGNORED_LABEL`.
        weights (`torch.Tensor` of shape `[n]`):
            Weight of each slot; 0 leaves it out. They are divided by their sum.
        project (`Callable`):
            Makes logits `[rows, V]` of hidden states `[rows, hidden_size]`; its own parameters get no gradient.
        objective (`DraftObjective`):
            What to compute.
        teacher (`Teacher`, *optional*):
            The target's distributions of the same slots.
        slots (`torch.Tensor` of shape `[n]`, *optional*):
            Place of each slot in its block, from 0, the slots of a block following one another; needed where
            `objective.couples_slots`.
        chunk_rows (`int`, *optional*):
            Rows per chunk; all at once by default, see [`rows_per_chunk`]. Where slots are coupled a block is never
            divided, so that a chunk has at least its rows.
    """
    if objective.needs_teacher and teacher is None:
        raise InvalidInputError(
            f"`teacher` is None, but the objective has a divergence (`hard_label_weight` is "
            f"{objective.hard_label_weight}); store the teacher with the trajectories or compute it with the target."
        )
    if objective.couples_slots and slots is None:
        raise InvalidInputError(
            "`slots` is None, but acceptance couples the slots of a block; pass their places in it."
        )
    total = weights.sum()
    # With no slot at all the mean is 0, not 0/0.
    weights = weights / torch.where(total > 0, total, torch.ones_like(total))

    def compute(rows: torch.Tensor, chunk: slice) -> RowLosses:
        teacher_rows = None
        if teacher is not None:
            with torch.no_grad():
                teacher_rows = teacher.rows(chunk)
        return row_losses(
            project(rows), labels[chunk], objective, teacher_rows, None if slots is None else slots[chunk]
        )

    # With nothing coupled, every row could begin a chunk.
    begins = (slots == 0).nonzero().flatten().tolist() if objective.couples_slots and slots is not None else None
    chunks = _chunks(len(hidden_states), chunk_rows or max(len(hidden_states), 1), begins)
    return DraftLoss(*_ChunkedMean.apply(hidden_states, weights, compute, chunks))


def default_logits_memory(device: torch.device) -> int:
    """
    Bytes that one chunk of logits and its temporaries take unless told otherwise.

    Args:
        device (`torch.device`):
            Where they are computed. On a CPU tensors of tens of megabytes are mapped anew each time, which costs more
            than the arithmetic (chunks of a third of the default elsewhere took two thirds of the time, measured).
    """
    return 128 * 2**20 if device.type == "cpu" else 512 * 2**20


def rows_per_chunk(vocab_size: int, memory_bytes: int) -> int:
    """
    How many rows [`draft_loss`] may take at a time.

    Args:
        vocab_size (`int`):
            Columns of the logits.
        memory_bytes (`int`):
            What their logits, gradients and temporaries may occupy.
    """
    return max(1, memory_bytes // (vocab_size * _BYTES_PER_LOGIT))


def _chunks(num_rows: int, chunk_rows: int, begins: list[int] | None) -> list[slice]:
    """Slices of at most `chunk_rows` rows; given where blocks begin, of whole blocks and at least one."""
    if begins is None:
        return [slice(begin, begin + chunk_rows) for begin in range(0, num_rows, chunk_rows)]
    bounds, ends = [0], [*begins[1:], num_rows]
    while bounds[-1] < num_rows:
        first = bisect_right(ends, bounds[-1])
        last = bisect_right(ends, bounds[-1] + chunk_rows) - 1
        bounds.append(ends[max(first, last)])
    return [slice(begin, end) for begin, end in zip(bounds[:-1], bounds[1:], strict=True)]


class _ChunkedMean(torch.autograd.Function):
    """The gradient of the hidden states is computed chunk by chunk in the forward pass and scaled in the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: torch.Tensor,
        weights: torch.Tensor,
        compute: Callable[[torch.Tensor, slice], RowLosses],
        chunks: list[slice],
    ) -> tuple[torch.Tensor, ...]:
        wants_gradient = ctx.needs_input_grad[0]
        gradient = torch.zeros_like(hidden_states) if wants_gradient else None
        sums = torch.zeros(4, dtype=at_least_float32(hidden_states[:0]).dtype, device=hidden_states.device)
        predicted = torch.zeros(len(hidden_states), dtype=torch.long, device=hidden_states.device)
        for chunk in chunks:
            rows = hidden_states[chunk].detach().requires_grad_(wants_gradient)
            with torch.set_grad_enabled(wants_gradient):
                losses = compute(rows, chunk)
                loss = (losses.loss * weights[chunk]).sum()
            if gradient is not None:
                (gradient[chunk],) = torch.autograd.grad(loss, rows)
            others = [(values.detach() * weights[chunk]).sum() for values in losses[1:4]]
            sums += torch.stack([loss.detach(), *others]).to(sums.dtype)
            predicted[chunk] = losses.predicted_ids
        if gradient is not None:
            ctx.save_for_backward(gradient)
        outputs = (*sums.unbind(), predicted)
        ctx.mark_non_differentiable(*outputs[1:])
        return tuple(output.clone() for output in outputs[:1]) + outputs[1:]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad_loss.to(gradient.dtype), None, None, None
