"""Where the target's distribution of a drafted slot comes from: its hidden states, or the stored likeliest tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch


__all__ = [
    "DenseTeacher",
    "Project",
    "Teacher",
    "TeacherRows",
    "TopKTeacher",
    "at_least_float32",
    "event_log_q",
]

# Keeps logarithms of what is left of a distribution finite; float16 log-probabilities are no more precise than that.
_SMALLEST_REST = 1e-6

Project = Callable[[torch.Tensor], torch.Tensor]


class TeacherRows(NamedTuple):
    """
    Target log-probabilities of some slots, over the events that [`divergence_of`] compares.

    Attributes:
        log_p: `[n, events]`.
        best_ids: `[n]`, the likeliest token in the drafter's vocabulary, or -1 if it is not in it.
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
        log_p = torch.log_softmax(at_least_float32(self.project(self.hidden_states[chunk])), dim=-1)
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
        ids, log_probs = self.ids[chunk].long(), at_least_float32(self.log_probs[chunk])
        log_probs = log_probs.masked_fill(ids < 0, -torch.inf)
        rest = (1 - log_probs.exp().sum(dim=-1, keepdim=True)).clamp(min=_SMALLEST_REST).log()
        return TeacherRows(torch.cat([log_probs, rest], dim=-1), ids[:, 0], ids)


def event_log_q(log_q: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
    """
    The drafter's log-probabilities of the events a teacher tells apart.

    Args:
        log_q (`torch.Tensor` of shape `[n, V]`):
            The drafter's log-probabilities of all tokens.
        ids (`torch.Tensor` of shape `[n, k]`, *optional*):
            `ids` of [`TeacherRows`].

    Returns:
        `torch.Tensor` of shape `[n, V]`, or `[n, k + 1]` of these tokens and all others
    """
    if ids is None:
        return log_q
    log_top = log_q.gather(1, ids.clamp(min=0)).masked_fill(ids < 0, -torch.inf)  # [n, k]
    rest = (1 - log_top.exp().sum(dim=-1, keepdim=True)).clamp(min=_SMALLEST_REST).log()
    return torch.cat([log_top, rest], dim=-1)


def at_least_float32(values: torch.Tensor) -> torch.Tensor:
    """Half precision is too coarse for log-probabilities; float64 stays, for gradient checks."""
    return values if values.dtype == torch.float64 else values.float()
