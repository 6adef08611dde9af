"""What a drafter is trained on: hard labels, divergences from the target's distribution, and their mixture.

For one drafted slot, q is the drafter's distribution and p the target's given the trajectory up to that token:

    loss = hard_label_weight * (-log q(label)) + (1 - hard_label_weight) * divergence(q, p)

The logits of all slots would be far larger than everything else in training, so [`draft_loss`] walks over chunks of
rows and computes loss and hidden-state gradient of a chunk before the next: memory is one chunk times the vocabulary.
All values are in nats. Not covered: temperatures other than 1, gradients into the target's LM head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch.autograd.function import once_differentiable

from ..errors import InvalidInputError


__all__ = [
    "IGNORED_LABEL",
    "OBJECTIVES",
    "DenseTeacher",
    "DraftLoss",
    "DraftObjective",
    "RowLosses",
    "TopKTeacher",
    "divergence_of",
    "draft_loss",
    "position_weights",
    "row_losses",
    "rows_per_chunk",
]

IGNORED_LABEL = -100
OBJECTIVES = ("cross_entropy", "mixture", "reverse_kl", "forward_kl")
DIVERGENCES = ("reverse_kl", "forward_kl")
CLIPS = ("entry", "sum", "none")
# Keeps logarithms of what is left of a distribution finite; float16 log-probabilities are no more precise than that.
_SMALLEST_REST = 1e-6
# Logits, log-probabilities, their gradients and the temporaries of softmax, all [rows, V] in float32.
_BYTES_PER_LOGIT = 4 * 6

Project = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class DraftObjective:
    """
    The loss of one drafted slot.

    Attributes:
        hard_label_weight: α, the share of the hard label's loss; 1 needs no teacher.
        divergence: `"reverse_kl"`, the sum of q·log(q/p), or `"forward_kl"`, the sum of p·log(p/q).
        clip: What of the divergence is clipped from above: each vocabulary `"entry"` before the sum (the paper), the
            `"sum"` of a slot (the authors' code), or `"none"`.
        clip_threshold: δ, in nats.
        labels: `"teacher"`: the hard label is the target's likeliest token; `"trajectory"`: the token that followed.
            The two agree on greedy trajectories. Without a teacher it is always the trajectory.
    """

    hard_label_weight: float = 0.8
    divergence: Literal["reverse_kl", "forward_kl"] = "reverse_kl"
    clip: Literal["entry", "sum", "none"] = "entry"
    clip_threshold: float = 0.01
    labels: Literal["teacher", "trajectory"] = "teacher"

    def __post_init__(self) -> None:
        if not 0 <= self.hard_label_weight <= 1:
            raise InvalidInputError(f"`hard_label_weight` is {self.hard_label_weight}; it must be from 0 to 1.")
        for name, allowed in (("divergence", DIVERGENCES), ("clip", CLIPS), ("labels", ("teacher", "trajectory"))):
            if getattr(self, name) not in allowed:
                raise InvalidInputError(
                    f"`{name}` is {getattr(self, name)!r}; choose one of {', '.join(map(repr, allowed))}."
                )
        if self.clip_threshold < 0:
            raise InvalidInputError(f"`clip_threshold` is {self.clip_threshold}; it must not be negative.")

    @classmethod
    def named(
        cls, name: str, *, hard_label_weight: float, divergence: str, clip: str, clip_threshold: float
    ) -> DraftObjective:
        """
        The objective of a run.

        Args:
            name (`str`):
                `"cross_entropy"` (DFlash: the trajectory's tokens alone), `"mixture"` (the paper: hard label and a
                divergence), `"reverse_kl"`, or `"forward_kl"` (online speculative decoding).
            hard_label_weight (`float`), divergence (`str`):
                Used by `"mixture"`.
            clip (`str`), clip_threshold (`float`):
                Used by all but `"cross_entropy"`; a forward KL on its own is never clipped.
        """
        fields: dict[str, Any] = {"clip": clip, "clip_threshold": clip_threshold}
        if name == "cross_entropy":
            return cls(hard_label_weight=1.0, labels="trajectory")
        if name == "mixture":
            return cls(hard_label_weight=hard_label_weight, divergence=divergence, **fields)  # type: ignore[arg-type]
        if name == "reverse_kl":
            return cls(hard_label_weight=0.0, divergence="reverse_kl", **fields)
        if name == "forward_kl":
            return cls(hard_label_weight=0.0, divergence="forward_kl", clip="none")
        raise InvalidInputError(f"`objective` is {name!r}; choose one of {', '.join(map(repr, OBJECTIVES))}.")

    @property
    def needs_teacher(self) -> bool:
        """Whether the target's distribution enters the loss."""
        return self.hard_label_weight < 1


class TeacherRows(NamedTuple):
    """
    Target log-probabilities of some slots, over the events that [`divergence_of`] compares.

    Attributes:
        log_p: `[n, events]`.
        best_ids: `[n]`, the likeliest token in the drafter's vocabulary, or `IGNORED_LABEL` if it is not in it.
        ids: `[n, k]`: events are these tokens and, as the last one, all others; -1 marks a token outside the
            drafter's vocabulary. None: events are the vocabulary's tokens.
    """

    log_p: torch.Tensor
    best_ids: torch.Tensor
    ids: torch.Tensor | None = None


class Teacher(Protocol):
    """Gives the target's distribution for a chunk of slots, so that only a chunk of it exists at a time."""

    def rows(self, chunk: slice) -> TeacherRows:
        """Target log-probabilities of the slots in `chunk`."""


@dataclass(frozen=True)
class DenseTeacher:
    """
    The full distribution, from the target's own hidden states.

    Attributes:
        hidden_states: `[n, target_hidden_size]`, inputs of the target's LM head.
        project: Makes logits over the drafter's vocabulary of them.
    """

    hidden_states: torch.Tensor
    project: Project

    def rows(self, chunk: slice) -> TeacherRows:
        """See [`Teacher`]."""
        log_p = torch.log_softmax(_at_least_float32(self.project(self.hidden_states[chunk])), dim=-1)
        return TeacherRows(log_p, log_p.argmax(dim=-1))


@dataclass(frozen=True)
class TopKTeacher:
    """
    The likeliest tokens, as stored with the trajectories; all other tokens count as one event.

    A divergence over these k + 1 events is never above the full one, and close to it while the rest is small.

    Attributes:
        ids: `[n, k]`, likeliest first, in the drafter's vocabulary; -1 for a token outside it.
        log_probs: `[n, k]`.
    """

    ids: torch.Tensor
    log_probs: torch.Tensor

    def rows(self, chunk: slice) -> TeacherRows:
        """See [`Teacher`]."""
        ids, log_probs = self.ids[chunk].long(), _at_least_float32(self.log_probs[chunk])
        log_probs = log_probs.masked_fill(ids < 0, -torch.inf)
        rest = (1 - log_probs.exp().sum(dim=-1, keepdim=True)).clamp(min=_SMALLEST_REST).log()
        best = torch.where(ids[:, 0] < 0, IGNORED_LABEL, ids[:, 0])
        return TeacherRows(torch.cat([log_probs, rest], dim=-1), best, ids)


class RowLosses(NamedTuple):
    """
    Losses of some slots.

    Attributes:
        loss: `[n]`, what is trained on.
        hard: `[n]`, -log q(label).
        divergence: `[n]`, after clipping; 0 without a teacher.
        clipped: `[n]`, share of vocabulary entries (or the slot itself) that clipping changed.
        predicted_ids: `[n]`, the drafter's likeliest token.
    """

    loss: torch.Tensor
    hard: torch.Tensor
    divergence: torch.Tensor
    clipped: torch.Tensor
    predicted_ids: torch.Tensor


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


def position_weights(
    draft_length: int, position_decay: float | None, device: torch.device | None = None
) -> torch.Tensor:
    """
    Weights exp(-(i - 1) / position_decay) of the slots i = 1 .. draft_length.

    Args:
        draft_length (`int`):
            Drafts of a block.
        position_decay (`float`, *optional*):
            Slots after which the weight has fallen to 1/e; None weighs all slots alike.
        device (`torch.device`, *optional*):
            Where to put them.

    Returns:
        `torch.Tensor` of shape `[draft_length]`
    """
    if position_decay is None:
        return torch.ones(draft_length, device=device)
    if position_decay <= 0:
        raise InvalidInputError(f"`position_decay` is {position_decay}; it must be above 0, or None for no decay.")
    return torch.exp(-torch.arange(draft_length, device=device) / position_decay)


def divergence_of(
    log_q: torch.Tensor, log_p: torch.Tensor, objective: DraftObjective
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Divergence of two distributions over the same events.

    Args:
        log_q (`torch.Tensor` of shape `[n, events]`):
            The drafter's log-probabilities; -inf where an event is left out.
        log_p (`torch.Tensor` of shape `[n, events]`):
            The target's; -inf where an event is left out.
        objective (`DraftObjective`):
            Says which divergence, and what to clip.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: divergence `[n]`, and the share of entries that clipping changed `[n]`.
    """
    left_out = (log_p == -torch.inf) | (log_q == -torch.inf)
    # Left out before the products, not after: 0 * inf would poison the gradient.
    difference = (log_q - log_p).masked_fill(left_out, 0.0)
    if objective.divergence == "reverse_kl":
        entries = log_q.masked_fill(left_out, -torch.inf).exp() * difference
    else:
        entries = -log_p.masked_fill(left_out, -torch.inf).exp() * difference
    if objective.clip == "entry":
        clipped = (entries > objective.clip_threshold).to(entries.dtype).mean(dim=-1)
        return entries.clamp(max=objective.clip_threshold).sum(dim=-1), clipped
    total = entries.sum(dim=-1)
    if objective.clip == "sum":
        clipped = (total > objective.clip_threshold).to(total.dtype)
        return total.clamp(max=objective.clip_threshold), clipped
    return total, torch.zeros_like(total)


def row_losses(
    logits: torch.Tensor, labels: torch.Tensor, objective: DraftObjective, teacher: TeacherRows | None = None
) -> RowLosses:
    """
    Losses of slots whose logits are at hand: the dense form, differentiable in `logits`.

    Args:
        logits (`torch.Tensor` of shape `[n, V]`):
            The drafter's logits.
        labels (`torch.Tensor` of shape `[n]`):
            Tokens that followed, or `IGNORED_LABEL` for a slot whose hard label counts nothing.
        objective (`DraftObjective`):
            What to compute.
        teacher (`TeacherRows`, *optional*):
            The target's distribution; without one there is no divergence.
    """
    log_q = torch.log_softmax(_at_least_float32(logits), dim=-1)
    if teacher is not None and objective.labels == "teacher":
        # A slot without a token that followed has no valid teacher either, hence stays ignored.
        labels = torch.where(labels == IGNORED_LABEL, labels, teacher.best_ids)
    hard = torch.nn.functional.nll_loss(log_q, labels, ignore_index=IGNORED_LABEL, reduction="none")
    divergence = clipped = torch.zeros_like(hard)
    if teacher is not None and objective.needs_teacher:
        divergence, clipped = divergence_of(_event_log_q(log_q, teacher.ids), teacher.log_p, objective)
    weight = objective.hard_label_weight if teacher is not None else 1.0
    loss = weight * hard + (1 - weight) * divergence
    return RowLosses(loss, hard, divergence, clipped, logits.detach().argmax(dim=-1))


def draft_loss(
    hidden_states: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
    project: Project,
    objective: DraftObjective,
    teacher: Teacher | None = None,
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
        chunk_rows (`int`, *optional*):
            Rows per chunk; all at once by default, see [`rows_per_chunk`].
    """
    if objective.needs_teacher and teacher is None:
        raise InvalidInputError(
            f"`teacher` is None, but the objective has a divergence (`hard_label_weight` is "
            f"{objective.hard_label_weight}); store the teacher with the trajectories or compute it with the target."
        )
    total = weights.sum()
    # With no slot at all the mean is 0, not 0/0.
    weights = weights / torch.where(total > 0, total, torch.ones_like(total))

    def compute(rows: torch.Tensor, chunk: slice) -> RowLosses:
        teacher_rows = None
        if teacher is not None:
            with torch.no_grad():
                teacher_rows = teacher.rows(chunk)
        return row_losses(project(rows), labels[chunk], objective, teacher_rows)

    return DraftLoss(*_ChunkedMean.apply(hidden_states, weights, compute, chunk_rows or max(len(hidden_states), 1)))


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


class _ChunkedMean(torch.autograd.Function):
    """The gradient of the hidden states is computed chunk by chunk in the forward pass and scaled in the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: torch.Tensor,
        weights: torch.Tensor,
        compute: Callable[[torch.Tensor, slice], RowLosses],
        chunk_rows: int,
    ) -> tuple[torch.Tensor, ...]:
        wants_gradient = ctx.needs_input_grad[0]
        gradient = torch.zeros_like(hidden_states) if wants_gradient else None
        sums = torch.zeros(4, dtype=_at_least_float32(hidden_states[:0]).dtype, device=hidden_states.device)
        predicted = torch.zeros(len(hidden_states), dtype=torch.long, device=hidden_states.device)
        for begin in range(0, len(hidden_states), chunk_rows):
            chunk = slice(begin, begin + chunk_rows)
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


def _event_log_q(log_q: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
    """The drafter's log-probabilities of the teacher's events: `[n, V]` as they are, or of k tokens and the rest."""
    if ids is None:
        return log_q
    log_top = log_q.gather(1, ids.clamp(min=0)).masked_fill(ids < 0, -torch.inf)  # [n, k]
    rest = (1 - log_top.exp().sum(dim=-1, keepdim=True)).clamp(min=_SMALLEST_REST).log()
    return torch.cat([log_top, rest], dim=-1)


def _at_least_float32(values: torch.Tensor) -> torch.Tensor:
    """Half precision is too coarse for log-probabilities; float64 stays, for gradient checks."""
    return values if values.dtype == torch.float64 else values.float()
