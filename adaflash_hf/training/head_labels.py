"""What length heads and confidence heads learn from: the verdict on a drafted block, as labels in [0, 1]."""

from __future__ import annotations

import torch

from ..generation.length_policies import scaled_verify_lengths
from ..modeling_confidence_head import UNREACHED_LABEL
from .objectives import IGNORED_LABEL


__all__ = [
    "LENGTH_LABELS",
    "hindsight_length_labels",
    "slot_verdicts",
    "truncated_length_labels",
]

# "hindsight": accepted drafts of the full block, known from the text that followed. "truncated": what is seen by a
# server that verifies only as far as the head says.
LENGTH_LABELS = ("hindsight", "truncated")


def hindsight_length_labels(accepted: torch.Tensor, block_size: int) -> torch.Tensor:
    """
    Labels from the verdict on whole blocks.

    Args:
        accepted (`torch.Tensor` of any shape):
            Accepted drafts of each block.
        block_size (`int`):
            Rows of a block, the anchor included.

    Returns:
        `torch.Tensor` of that shape: (accepted + 1) / block_size, at most 1
    """
    return ((accepted + 1) / block_size).clamp(max=1.0)


def truncated_length_labels(
    accepted: torch.Tensor, ratio: torch.Tensor, block_size: int, length_scale: float
) -> torch.Tensor:
    """
    Labels from blocks that were verified only as far as the head said: never more than it asked for.

    Args:
        accepted (`torch.Tensor` of any shape):
            Drafts of each block that would be accepted if all were verified.
        ratio (`torch.Tensor` of that shape):
            The head's estimates.
        block_size (`int`):
            Rows of a block, the anchor included.
        length_scale (`float`):
            See [`scaled_verify_lengths`].

    Returns:
        `torch.Tensor` of that shape: (min(accepted, verified drafts) + 1) / block_size
    """
    verified = scaled_verify_lengths(ratio, block_size, length_scale) - 1
    return hindsight_length_labels(torch.minimum(accepted.to(verified), verified), block_size)


def slot_verdicts(accepted: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """
    What became of each slot of a block.

    Args:
        accepted (`torch.Tensor` of shape `[...]`):
            Leading drafts that were accepted.
        labels (`torch.Tensor` of shape `[..., draft_length]`):
            Tokens that followed the anchor; `IGNORED_LABEL` beyond the end of the response.

    Returns:
        `torch.Tensor` of shape `[..., draft_length]`: 1 where the slot was accepted, 0 where it was the first that was
        not, `UNREACHED_LABEL` beyond and where there is no token to compare with
    """
    slot = torch.arange(labels.shape[-1], device=labels.device)
    verdicts = (slot < accepted[..., None]).long()
    is_known = (slot <= accepted[..., None]) & (labels != IGNORED_LABEL)
    return verdicts.masked_fill(~is_known, UNREACHED_LABEL)
