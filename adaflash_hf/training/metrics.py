"""How far drafts would have been accepted, judged by the tokens that followed (greedy hindsight).

The response is the target's own text, so a drafted token is accepted exactly if it is the token that followed and all
drafts before it are. Everything is kept as sums and counts, which add up over batches and processes; divisions come
last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from .objectives import IGNORED_LABEL


__all__ = ["Acceptance", "DraftMetrics", "hindsight_acceptance"]


class Acceptance(NamedTuple):
    """
    Hindsight verdict on some blocks.

    Attributes:
        accepted: `[...]`, leading drafts equal to the tokens that followed.
        is_complete: `[...]`, whether all drafts of the block have a token to compare with.
        is_known: `[...]`, whether `accepted` is final: the block is complete, a draft was wrong, or the response ended
            by itself, so that nothing beyond it could have been committed.
    """

    accepted: torch.Tensor
    is_complete: torch.Tensor
    is_known: torch.Tensor


def hindsight_acceptance(predicted: torch.Tensor, labels: torch.Tensor, finished: torch.Tensor) -> Acceptance:
    """
    Count the accepted drafts of each block, over the full block.

    Args:
        predicted (`torch.Tensor` of shape `[..., draft_length]`):
            Drafted tokens.
        labels (`torch.Tensor` of shape `[..., draft_length]`):
            Tokens that followed the anchor; `IGNORED_LABEL` beyond the end of the response.
        finished (`torch.Tensor` of shape `[...]`):
            Whether the response ended by itself.
    """
    exists = labels != IGNORED_LABEL
    accepted = ((predicted == labels) & exists).long().cumprod(dim=-1).sum(dim=-1)
    is_complete = exists.all(dim=-1)
    was_wrong = accepted < exists.sum(dim=-1)
    return Acceptance(accepted, is_complete, is_complete | was_wrong | finished)


class DraftMetrics:
    """
    Sums over evaluated blocks.

    Only complete blocks count for acceptance: the end of a response would otherwise look like a rejection.

    Args:
        domains (`Sequence[str]`):
            Names of the domains; equal in all processes.
        draft_length (`int`):
            Drafts of a block.
        device (`torch.device`, *optional*):
            Where to add up.
    """

    def __init__(self, domains: Sequence[str], draft_length: int, device: torch.device | None = None) -> None:
        self.domains = list(domains)

        def zeros(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.float64, device=device)

        self.accepted_sum = zeros(len(self.domains))
        self.blocks = zeros(len(self.domains))
        self.accepted_at = zeros(draft_length)
        self.loss_sums = zeros(4)
        self.loss_weight = zeros(1)
        self.head_sums = zeros(3)
        self.head_blocks = zeros(1)
        self.confidence_sums = zeros(2)
        self.confidence_counts = zeros(2)

    def add_blocks(self, acceptance: Acceptance, domain_ids: torch.Tensor, valid: torch.Tensor) -> None:
        """
        Count blocks.

        Args:
            acceptance (`Acceptance` of shape `[batch, num_anchors]`):
                The verdict.
            domain_ids (`torch.Tensor` of shape `[batch]`):
                Domain of each trajectory.
            valid (`torch.Tensor` of shape `[batch, num_anchors]`):
                Which anchors are real, not padding.
        """
        counts = acceptance.is_complete & valid
        accepted = acceptance.accepted[counts].double()
        domain = domain_ids[:, None].expand_as(counts)[counts]
        self.accepted_sum.index_add_(0, domain, accepted)
        self.blocks.index_add_(0, domain, torch.ones_like(accepted))
        positions = torch.arange(1, len(self.accepted_at) + 1, device=accepted.device)
        self.accepted_at += (accepted[:, None] >= positions).sum(dim=0)

    def add_losses(self, means: Sequence[torch.Tensor], weight: torch.Tensor) -> None:
        """
        Count losses.

        Args:
            means (`Sequence[torch.Tensor]`):
                Mean loss, hard loss, divergence and clipped share of a batch.
            weight (`torch.Tensor`):
                Weight of the slots they are means of.
        """
        self.loss_sums += torch.stack([mean.detach().double() for mean in means]) * weight
        self.loss_weight += weight

    def add_head(self, ratio: torch.Tensor, labels: torch.Tensor) -> None:
        """
        Count errors of the length head.

        Args:
            ratio (`torch.Tensor` of shape `[n]`):
                Its estimates.
            labels (`torch.Tensor` of shape `[n]`):
                Hindsight labels of the same blocks.
        """
        error = (ratio - labels).double()
        self.head_sums += torch.stack([error.abs().sum(), error.square().sum(), error.sum()])
        self.head_blocks += len(error)

    def add_confidence(
        self, loss: torch.Tensor, prefix_probabilities: torch.Tensor, verdicts: torch.Tensor, is_known: torch.Tensor
    ) -> None:
        """
        Count losses and errors of a confidence head.

        Args:
            loss (`torch.Tensor` of shape `[]`):
                Its mean loss over the slots with a verdict.
            prefix_probabilities (`torch.Tensor` of shape `[n, draft_length]`):
                Its estimates that a slot is accepted.
            verdicts (`torch.Tensor` of shape `[n, draft_length]`):
                See [`slot_verdicts`].
            is_known (`torch.Tensor` of shape `[n]`):
                Blocks whose number of accepted drafts is final.
        """
        slots = (verdicts >= 0).sum()
        expected, accepted = prefix_probabilities.detach().sum(dim=-1), (verdicts == 1).sum(dim=-1)
        # As a share of the block, so that the length head's error compares with it.
        error = (expected - accepted).abs()[is_known].double() / (len(self.accepted_at) + 1)
        self.confidence_sums += torch.stack([loss.detach().double() * slots, error.sum()])
        self.confidence_counts += torch.stack([slots, is_known.sum()])

    def reduce(self, add_over_processes: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace each sum by the sum over all processes."""
        for name, value in vars(self).items():
            if isinstance(value, torch.Tensor):
                setattr(self, name, add_over_processes(value))

    def compute(self, prefix: str) -> dict[str, float]:
        """
        Divide.

        Args:
            prefix (`str`):
                Stands before each name, with an underscore.

        Returns:
            `dict[str, float]`: `acceptance_length` (bonus included; overall, by domain, and the spread between the
            best and the worst domain), `acceptance_position_<i>` (share of blocks whose first i drafts were accepted),
            losses in nats, and errors of the heads as a share of the block. The bias of a length head is positive if
            it expects too much, as it does where it has learned from what its drafter knows by heart.
        """
        values: dict[str, float] = {}
        blocks = self.blocks.sum().item()
        if blocks:
            values["acceptance_length"] = 1 + self.accepted_sum.sum().item() / blocks
            by_domain = {
                domain: 1 + accepted / count
                for domain, accepted, count in zip(
                    self.domains, self.accepted_sum.tolist(), self.blocks.tolist(), strict=True
                )
                if count
            }
            values |= {f"acceptance_length_{domain}": value for domain, value in by_domain.items()}
            values["acceptance_length_spread"] = max(by_domain.values()) - min(by_domain.values())
            for position, count in enumerate(self.accepted_at.tolist(), start=1):
                values[f"acceptance_position_{position}"] = count / blocks
        if self.loss_weight.item():
            means = (self.loss_sums / self.loss_weight).tolist()
            values |= dict(zip(("loss", "hard_loss", "divergence", "clipped_share"), means, strict=True))
        if self.head_blocks.item():
            absolute, squared, signed = (self.head_sums / self.head_blocks).tolist()
            values["length_head_error"] = absolute
            values["length_head_loss"] = squared
            values["length_head_bias"] = signed
        if self.confidence_counts.min().item():
            loss, error = (self.confidence_sums / self.confidence_counts).tolist()
            values["confidence_head_loss"] = loss
            values["confidence_head_error"] = error
        values["blocks"] = blocks
        return {f"{prefix}_{name}": value for name, value in values.items()}
