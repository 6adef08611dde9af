"""What a drafter and its length head are worth on responses that nobody learns from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .head_report import collect_blocks, estimate_quality, length_head_estimate, scaled_choice


if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..modeling_dflash_drafter import DFlashDrafterModel


__all__ = ["measure_held_out"]


def measure_held_out(
    drafter: DFlashDrafterModel,
    target: PreTrainedModel,
    examples: Sequence[dict[str, Any]],
    *,
    anchors_per_trajectory: int,
    length_scale: float,
) -> dict[str, float]:
    """
    Greedy hindsight on the same blocks whatever the weights.

    Args:
        drafter (`DFlashDrafterModel`):
            Who drafts.
        target (`PreTrainedModel`):
            Its target.
        examples (`Sequence[dict[str, Any]]`):
            Rows that [`DrafterDataCollator`] takes.
        anchors_per_trajectory (`int`):
            Blocks of each.
        length_scale (`float`):
            Of the verify lengths that the head would choose.

    Returns:
        `dict[str, float]`: `acceptance_length` of whole blocks, and with a length head `head_error_tokens` (mean
        absolute error of the tokens it expects), `head_rows` it would have verified, and `head_acceptance_length`
        of these
    """
    blocks = collect_blocks(drafter, target, examples, anchors_per_trajectory=anchors_per_trajectory)
    measured = {
        "blocks": float(len(blocks.accepted)),
        "acceptance_length": 1 + blocks.accepted.double().mean().item(),
    }
    if drafter.length_head is not None:
        expected = length_head_estimate(drafter.length_head, blocks)
        choice = scaled_choice(expected, blocks, length_scale)
        measured |= {
            "head_error_tokens": estimate_quality(expected, blocks).mean_absolute_error_tokens,
            "head_rows": choice.mean_rows,
            "head_acceptance_length": choice.acceptance_length,
        }
    return measured
