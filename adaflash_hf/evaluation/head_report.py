"""How well a length choice fits held-out blocks: error, correlation, and accepted tokens kept against rows saved.

Everything is measured on drafted blocks whose verdict over the full block is known from the text that followed, so one
pass of the drafter serves every head, scale and threshold, and none of them can hide what it cut off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from ..errors import InvalidInputError
from ..generation.length_policies import scaled_verify_lengths
from ..training.collator import DrafterDataCollator
from ..training.draft_step import DraftStep
from ..training.objectives import DraftObjective
from .result_files import markdown_table


if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..modeling_confidence_head import ConfidenceHeadModel
    from ..modeling_dflash_drafter import DFlashDrafterModel
    from ..modeling_length_head import LengthHeadModel


__all__ = [
    "DEFAULT_SCALES",
    "DEFAULT_THRESHOLDS",
    "JudgedBlocks",
    "LengthChoice",
    "LengthEstimate",
    "collect_blocks",
    "confidence_estimates",
    "constant_estimate",
    "estimate_quality",
    "fixed_choices",
    "head_report",
    "head_sections",
    "length_head_estimate",
    "oracle_choice",
    "scaled_choice",
]

DEFAULT_SCALES = (1.0, 1.15, 1.3, 1.6, 2.0)
DEFAULT_THRESHOLDS = (0.94, 0.8, 0.6, 0.4, 0.2, 0.1, 0.05)
_HINDSIGHT = DraftObjective(hard_label_weight=1.0, labels="trajectory")
_BLOCKS_AT_ONCE = 1024


@dataclass(frozen=True)
class JudgedBlocks:
    """
    Drafted blocks and the target's verdict.

    Attributes:
        hidden_states: `[n, block, H]`, the drafter's.
        accepted: `[n]`, leading drafts of the full block equal to the tokens that followed.
        domain_ids: `[n]`.
        block_size: Rows of a block, the anchor included.
    """

    hidden_states: torch.Tensor
    accepted: torch.Tensor
    domain_ids: torch.Tensor
    block_size: int


@dataclass(frozen=True)
class LengthEstimate:
    """
    How close an estimate of (accepted + 1) comes.

    Attributes:
        mean_absolute_error: As a share of the block, as length heads are trained and logged.
        mean_absolute_error_tokens: In tokens.
        bias_tokens: How many tokens too many are expected on average.
        correlation: Pearson's, with the verdict; None for an estimate that never varies.
    """

    mean_absolute_error: float
    mean_absolute_error_tokens: float
    bias_tokens: float
    correlation: float | None


@dataclass(frozen=True)
class LengthChoice:
    """
    What verifying only so many rows keeps.

    Attributes:
        setting: What the lengths were chosen by, such as `"1.3"`.
        mean_rows: Rows verified per block, the anchor included.
        rows_saved: Share of the full block's rows that are not verified.
        tokens_kept: Share of the accepted drafts of full blocks that are still accepted.
        tokens_kept_fixed: The same of a fixed length that verifies as many rows on average.
        acceptance_length: Tokens committed per block, the bonus included.
    """

    setting: str
    mean_rows: float
    rows_saved: float
    tokens_kept: float
    tokens_kept_fixed: float
    acceptance_length: float


@torch.no_grad()
def collect_blocks(
    drafter: DFlashDrafterModel,
    target_model: PreTrainedModel,
    rows: Any,
    *,
    anchors_per_trajectory: int = 64,
    batch_size: int = 1,
    seed: int = 0,
) -> JudgedBlocks:
    """
    Draft blocks on trajectories and judge them by hindsight.

    Args:
        drafter (`DFlashDrafterModel`):
            Drafts; put into evaluation mode.
        target_model (`PreTrainedModel`):
            Its target.
        rows (`TrajectoryDataset` or a `Subset` of one):
            The trajectories.
        anchors_per_trajectory (`int`, *optional*, defaults to 64):
            Blocks of each.
        batch_size (`int`, *optional*, defaults to 1):
            Trajectories per forward pass.
        seed (`int`, *optional*, defaults to 0):
            Decides which blocks.
    """
    drafter.eval()
    step = DraftStep(drafter, target_model, _HINDSIGHT)
    collator = DrafterDataCollator(drafter.config.draft_length, anchors_per_trajectory, seed)
    hidden, accepted, domains = [], [], []
    for batch in DataLoader(rows, batch_size=batch_size, collate_fn=collator):
        batch = {name: value.to(drafter.device) for name, value in batch.items()}
        judged = step.judge(drafter, batch)
        known = judged.acceptance.is_known & judged.valid
        hidden.append(judged.hidden_states[known])
        accepted.append(judged.acceptance.accepted[known])
        domains.append(batch["domain_ids"][:, None].expand_as(known)[known])
    if not sum(map(len, accepted)):
        raise InvalidInputError(
            f"`rows` are {len(rows)} trajectories without one block whose verdict is known; hold out more of them, or "
            "longer ones."
        )
    return JudgedBlocks(torch.cat(hidden), torch.cat(accepted), torch.cat(domains), drafter.config.block_size)


@torch.no_grad()
def length_head_estimate(head: LengthHeadModel, blocks: JudgedBlocks) -> torch.Tensor:
    """
    Tokens that a length head expects to be committed.

    Args:
        head (`LengthHeadModel`):
            The head.
        blocks (`JudgedBlocks`):
            Blocks of the drafter it belongs to.

    Returns:
        `torch.Tensor` of shape `[n]`
    """
    return _in_parts(lambda part: head(part).ratio, blocks) * blocks.block_size


@torch.no_grad()
def confidence_estimates(head: ConfidenceHeadModel, blocks: JudgedBlocks) -> torch.Tensor:
    """
    Probability that each slot is accepted, the slots before it included, by a confidence head.

    Args:
        head (`ConfidenceHeadModel`):
            The head.
        blocks (`JudgedBlocks`):
            Blocks of the drafter it belongs to.

    Returns:
        `torch.Tensor` of shape `[n, draft_length]`
    """
    return _in_parts(lambda part: head(part).prefix_probabilities, blocks)


def constant_estimate(calibration: JudgedBlocks, blocks: JudgedBlocks) -> torch.Tensor:
    """
    The mean of other blocks, for every block.

    Args:
        calibration (`JudgedBlocks`):
            Blocks to take the mean of; not those it is judged on.
        blocks (`JudgedBlocks`):
            Blocks it is judged on.

    Returns:
        `torch.Tensor` of shape `[n]`
    """
    return (calibration.accepted.float().mean() + 1).expand(len(blocks.accepted))


def estimate_quality(expected: torch.Tensor, blocks: JudgedBlocks) -> LengthEstimate:
    """
    Compare an estimate with the verdict over full blocks.

    Args:
        expected (`torch.Tensor` of shape `[n]`):
            Tokens expected to be committed, the bonus included.
        blocks (`JudgedBlocks`):
            The blocks.
    """
    expected, committed = expected.double().cpu(), blocks.accepted.double().cpu() + 1
    error, bias = (expected - committed).abs().mean().item(), (expected - committed).mean().item()
    varies = expected.std(correction=0) > 1e-9 and committed.std(correction=0) > 0
    correlation = torch.corrcoef(torch.stack([expected, committed]))[0, 1].item() if varies else None
    return LengthEstimate(error / blocks.block_size, error, bias, correlation)


def _choice(setting: str, lengths: torch.Tensor, blocks: JudgedBlocks) -> LengthChoice:
    accepted = blocks.accepted.double()
    drafts = lengths.to(accepted) - 1
    mean_rows, total = lengths.double().mean().item(), accepted.sum().clamp(min=1).item()
    kept = torch.minimum(accepted, drafts).sum().item()
    # Between two whole lengths: each for its share of the blocks.
    below, share = int(mean_rows), mean_rows - int(mean_rows)
    fixed = sum(
        weight * accepted.clamp(max=length - 1).sum().item()
        for length, weight in ((below, 1 - share), (below + 1, share))
    )
    return LengthChoice(
        setting=setting,
        mean_rows=mean_rows,
        rows_saved=1 - mean_rows / blocks.block_size,
        tokens_kept=kept / total,
        tokens_kept_fixed=fixed / total,
        acceptance_length=1 + kept / len(accepted),
    )


def fixed_choices(blocks: JudgedBlocks) -> list[LengthChoice]:
    """Every fixed verify length, from 2 to the whole block."""
    return [
        _choice(str(length), torch.full_like(blocks.accepted, length), blocks)
        for length in range(2, blocks.block_size + 1)
    ]


def oracle_choice(blocks: JudgedBlocks) -> LengthChoice:
    """Exactly the rows that are accepted: the best that any choice could do."""
    return _choice("oracle", (blocks.accepted + 1).clamp(2, blocks.block_size), blocks)


def scaled_choice(expected: torch.Tensor, blocks: JudgedBlocks, scale: float) -> LengthChoice:
    """
    What the verify lengths keep that decoding makes of an estimate.

    Args:
        expected (`torch.Tensor` of shape `[n]`):
            Tokens expected to be committed, the bonus included.
        blocks (`JudgedBlocks`):
            The blocks.
        scale (`float`):
            Factor on the estimate.
    """
    return _choice(f"{scale:g}", scaled_verify_lengths(expected / blocks.block_size, blocks.block_size, scale), blocks)


def _threshold_choices(prefix: torch.Tensor, blocks: JudgedBlocks, thresholds: Sequence[float]) -> list[LengthChoice]:
    choices = []
    for threshold in thresholds:
        lengths = 1 + (prefix >= threshold).sum(dim=-1)
        choices.append(_choice(f"{threshold:g}", lengths.clamp(2, blocks.block_size), blocks))
    return choices


def head_report(
    blocks: JudgedBlocks,
    calibration: JudgedBlocks,
    length_heads: Mapping[str, LengthHeadModel],
    confidence_heads: Mapping[str, ConfidenceHeadModel],
    *,
    scales: Sequence[float] = DEFAULT_SCALES,
    thresholds: Sequence[float] = DEFAULT_THRESHOLDS,
) -> dict[str, Any]:
    """
    All heads and baselines on the same blocks, as plain data for a results file.

    Args:
        blocks (`JudgedBlocks`):
            Held-out blocks.
        calibration (`JudgedBlocks`):
            Blocks that the constant is taken from.
        length_heads (`Mapping[str, LengthHeadModel]`):
            By name.
        confidence_heads (`Mapping[str, ConfidenceHeadModel]`):
            By name.
        scales (`Sequence[float]`, *optional*):
            Factors on an estimate that its verify length is made with.
        thresholds (`Sequence[float]`, *optional*):
            A slot is verified while its probability by a confidence head is at least this.

    Returns:
        `dict[str, Any]`: `blocks`, `block_size`, `acceptance_length`, and under `estimates` and `choices` a
        [`LengthEstimate`] and [`LengthChoice`]s for each head and baseline
    """
    constant = constant_estimate(calibration, blocks)
    estimates = {"constant": estimate_quality(constant, blocks)}
    choices = {"fixed length": fixed_choices(blocks), "oracle": [oracle_choice(blocks)]}
    for name, length_head in length_heads.items():
        expected = length_head_estimate(length_head, blocks)
        estimates[name] = estimate_quality(expected, blocks)
        choices[f"{name}, scale"] = [scaled_choice(expected, blocks, scale) for scale in scales]
    for name, confidence_head in confidence_heads.items():
        prefix = confidence_estimates(confidence_head, blocks)
        expected = 1 + prefix.sum(dim=-1)
        estimates[name] = estimate_quality(expected, blocks)
        choices[f"{name}, scale"] = [scaled_choice(expected, blocks, scale) for scale in scales]
        choices[f"{name}, threshold"] = _threshold_choices(prefix, blocks, thresholds)
    return {
        "blocks": len(blocks.accepted),
        "block_size": blocks.block_size,
        "acceptance_length": 1 + blocks.accepted.double().mean().item(),
        "estimates": {name: asdict(estimate) for name, estimate in estimates.items()},
        "choices": {name: [asdict(choice) for choice in row] for name, row in choices.items()},
    }


def head_sections(report: Mapping[str, Any]) -> list[str]:
    """
    Paragraphs and tables of a Markdown report.

    Args:
        report (`Mapping[str, Any]`):
            From [`head_report`].

    Returns:
        `list[str]`: one paragraph, heading or table each
    """
    estimates = [
        [name, row["mean_absolute_error_tokens"], row["mean_absolute_error"], row["bias_tokens"], row["correlation"]]
        for name, row in report["estimates"].items()
    ]
    choices = [
        [
            f"{name} {choice['setting']}" if name != "oracle" else name,
            choice["mean_rows"],
            choice["rows_saved"],
            choice["tokens_kept"],
            choice["tokens_kept_fixed"],
            choice["acceptance_length"],
        ]
        for name, row in report["choices"].items()
        for choice in row
    ]
    return [
        f"{report['blocks']:,} held-out blocks of {report['block_size']} rows, whose verdict over the full block is "
        f"known by hindsight (greedy); verified in full they commit {report['acceptance_length']:.3f} tokens each.",
        "## How close the estimates come",
        markdown_table(
            ["", "error (tokens)", "error (share of the block)", "too many expected (tokens)", "correlation"],
            estimates,
        ),
        "## What verifying so many rows keeps",
        "Rows count the anchor, and at least two are verified. Kept is the share of the drafts accepted in full "
        "blocks that are among the rows verified. The oracle verifies exactly what is accepted.",
        markdown_table(
            ["", "rows", "rows saved", "accepted kept", "kept by a fixed length of as many rows", "tau"], choices
        ),
    ]


def _in_parts(estimate: Callable[[torch.Tensor], torch.Tensor], blocks: JudgedBlocks) -> torch.Tensor:
    return torch.cat([estimate(part) for part in blocks.hidden_states.split(_BLOCKS_AT_ONCE)]).float()
