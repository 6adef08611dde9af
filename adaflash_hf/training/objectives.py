"""What a drafter is trained on: hard labels, divergences from the target's distribution, acceptance, and mixtures.

For one drafted slot, q is the drafter's distribution and p the target's given the trajectory up to that token:

    loss = hard_label_weight * (-log q(label)) + (1 - hard_label_weight) * divergence(q, p)

In place of a divergence, which knows one slot only, can stand what decoding counts: the probability that slot i is not
accepted, 1 - q_1(label_1) * ... * q_i(label_i). Summed over the slots of a block it is the block's length less the
expected number of accepted drafts.

Divergences and hard labels are in nats. Not covered: temperatures other than 1, gradients into the target's LM head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from ..errors import InvalidInputError
from .teachers import TeacherRows, at_least_float32, event_log_q


__all__ = [
    "IGNORED_LABEL",
    "OBJECTIVES",
    "DraftObjective",
    "RowLosses",
    "divergence_of",
    "position_weights",
    "prefix_probabilities",
    "row_losses",
]

IGNORED_LABEL = -100
OBJECTIVES = ("cross_entropy", "mixture", "reverse_kl", "forward_kl", "acceptance")
DIVERGENCES = ("reverse_kl", "forward_kl", "acceptance")
CLIPS = ("entry", "sum", "none")


@dataclass(frozen=True)
class DraftObjective:
    """
    The loss of one drafted slot.

    Attributes:
        hard_label_weight: α, the share of the hard label's loss; 1 needs no teacher.
        divergence: `"reverse_kl"`, the sum of q·log(q/p), `"forward_kl"`, the sum of p·log(p/q), or in their place
            `"acceptance"`, the probability that a slot is not accepted, which is never clipped and needs no teacher.
        clip: What of the divergence is clipped from above: each vocabulary `"entry"` before the sum (the paper), the
            `"sum"` of a slot (the authors' code), or `"none"`.
        clip_threshold: δ, in nats.
        labels: `"teacher"`: the hard label is the target's likeliest token; `"trajectory"`: the token that followed.
            The two agree on greedy trajectories. Without a teacher it is always the trajectory.
    """

    hard_label_weight: float = 0.8
    divergence: Literal["reverse_kl", "forward_kl", "acceptance"] = "reverse_kl"
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
                divergence), `"reverse_kl"`, `"forward_kl"` (online speculative decoding), or `"acceptance"` (the
                expected number of accepted drafts).
            hard_label_weight (`float`), divergence (`str`):
                Used by `"mixture"`.
            clip (`str`), clip_threshold (`float`):
                Used by all but `"cross_entropy"` and `"acceptance"`; a forward KL on its own is never clipped.
        """
        fields: dict[str, Any] = {"clip": clip, "clip_threshold": clip_threshold}
        if name == "cross_entropy":
            return cls(hard_label_weight=1.0, labels="trajectory")
        if name == "mixture" and divergence == "acceptance":
            return cls(hard_label_weight, divergence="acceptance", clip="none", labels="trajectory")
        if name == "mixture":
            return cls(hard_label_weight=hard_label_weight, divergence=divergence, **fields)  # type: ignore[arg-type]
        if name == "reverse_kl":
            return cls(hard_label_weight=0.0, divergence="reverse_kl", **fields)
        if name == "forward_kl":
            return cls(hard_label_weight=0.0, divergence="forward_kl", clip="none")
        if name == "acceptance":
            return cls(hard_label_weight=0.0, divergence="acceptance", clip="none", labels="trajectory")
        raise InvalidInputError(f"`objective` is {name!r}; choose one of {', '.join(map(repr, OBJECTIVES))}.")

    @property
    def needs_teacher(self) -> bool:
        """Whether the target's distribution enters the loss."""
        return self.hard_label_weight < 1 and self.divergence != "acceptance"

    @property
    def couples_slots(self) -> bool:
        """Whether the loss of a slot depends on the slots before it in its block."""
        return self.hard_label_weight < 1 and self.divergence == "acceptance"


class RowLosses(NamedTuple):
    """
    Losses of some slots.

    Attributes:
        loss: `[n]`, what is trained on.
        hard: `[n]`, -log q(label).
        divergence: `[n]`, after clipping, or what stands in its place; 0 without either.
        clipped: `[n]`, share of vocabulary entries (or the slot itself) that clipping changed.
        predicted_ids: `[n]`, the drafter's likeliest token.
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


def prefix_probabilities(log_probs: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """
    Probability that a slot and all slots before it in its block are accepted.

    Args:
        log_probs (`torch.Tensor` of shape `[n]`):
            Log-probability that a slot is accepted if those before it were; -inf where it cannot be.
        slots (`torch.Tensor` of shape `[n]`):
            Place of each slot in its block, from 0; the slots of a block follow one another.

    Returns:
        `torch.Tensor` of shape `[n]`
    """
    if not len(slots):
        return log_probs.exp()
    block = (slots == 0).cumsum(0) - 1
    padded = log_probs.new_zeros(int(block[-1]) + 1, int(slots.max()) + 1)
    padded = padded.index_put((block, slots), log_probs)  # [blocks, slots]
    return padded.cumsum(dim=-1).exp()[block, slots]


def row_losses(
    logits: torch.Tensor,
    labels: torch.Tensor,
    objective: DraftObjective,
    teacher: TeacherRows | None = None,
    slots: torch.Tensor | None = None,
) -> RowLosses:
    """
    Losses of slots whose logits are at hand: the dense form, differentiable in `logits`.

    Args:
        logits (`torch.Tensor` of shape `[n, V]`):
            The drafter's logits.
        labels (`torch.Tensor` of shape `[n]`):
            Tokens that followed, or `IGNORED_LABEL` for a slot whose hard label counts nothing and that is never
            accepted.
        objective (`DraftObjective`):
            What to compute.
        teacher (`TeacherRows`, *optional*):
            The target's distribution; without one there is no divergence.
        slots (`torch.Tensor` of shape `[n]`, *optional*):
            See [`prefix_probabilities`]; only acceptance asks for them, and then all slots of a block are needed.
    """
    log_q = torch.log_softmax(at_least_float32(logits), dim=-1)
    if teacher is not None and objective.labels == "teacher":
        # A slot without a token that followed has no valid teacher either, hence stays ignored.
        is_ignored = (labels == IGNORED_LABEL) | (teacher.best_ids < 0)
        labels = teacher.best_ids.masked_fill(is_ignored, IGNORED_LABEL)
    hard = torch.nn.functional.nll_loss(log_q, labels, ignore_index=IGNORED_LABEL, reduction="none")
    weight, divergence = objective.hard_label_weight, torch.zeros_like(hard)
    clipped = torch.zeros_like(hard)
    if objective.couples_slots:
        assert slots is not None
        divergence = 1 - prefix_probabilities((-hard).masked_fill(labels == IGNORED_LABEL, -torch.inf), slots)
    elif teacher is None:
        weight = 1.0
    elif objective.needs_teacher:
        divergence, clipped = divergence_of(event_log_q(log_q, teacher.ids), teacher.log_p, objective)
    loss = weight * hard + (1 - weight) * divergence
    return RowLosses(loss, hard, divergence, clipped, logits.detach().argmax(dim=-1))
