"""Options of `adaflash train`. Where no default is shown, it depends on the run and is printed with its reason."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from .config_files import config_file_callback


__all__ = [
    "AccumulationOption",
    "AnchorsOption",
    "BatchSizeOption",
    "BlockSizeOption",
    "CausalBlocksOption",
    "Clip",
    "ClipOption",
    "ClipThresholdOption",
    "ConfigOption",
    "DecayFractionOption",
    "Divergence",
    "DivergenceOption",
    "DraftVocabularyOption",
    "EpochsOption",
    "Features",
    "FeaturesOption",
    "FromScratchOption",
    "HardLabelWeightOption",
    "HeldOutOption",
    "InitOption",
    "LayerIdsOption",
    "LayersOption",
    "LearningRateOption",
    "LengthHead",
    "LengthHeadOption",
    "LengthLabels",
    "LengthLabelsOption",
    "LicenseOption",
    "ListPresetsOption",
    "LoraAlphaOption",
    "LoraRankOption",
    "LoraTargetModulesOption",
    "MaskTokenOption",
    "MaxTokensOption",
    "Objective",
    "ObjectiveOption",
    "Only",
    "OnlyOption",
    "Optimizer",
    "OptimizerOption",
    "OutOption",
    "PositionDecayOption",
    "PresetOption",
    "PrivateOption",
    "PushToHubOption",
    "ReportToOption",
    "ResumeOption",
    "SeedOption",
    "StepsOption",
    "Teacher",
    "TeacherOption",
    "TrajectoriesOption",
    "VectorLearningRateOption",
    "VocabularySizeOption",
    "WarmupOption",
]

_START, _LEARN, _RUN, _PUBLISH = "What is trained", "What is learned", "How it runs", "What becomes of it"


class Only(StrEnum):
    """Part of the drafter to train."""

    DRAFTER = "drafter"
    LENGTH_HEAD = "length-head"
    CONFIDENCE_HEAD = "confidence-head"


class LengthHead(StrEnum):
    """Shape of a new length head."""

    MEAN_LINEAR = "mean_linear"
    MEAN_LAST_RESIDUAL = "mean_last_residual"
    NONE = "none"


class Objective(StrEnum):
    """Loss of a slot."""

    MIXTURE = "mixture"
    CROSS_ENTROPY = "cross_entropy"
    REVERSE_KL = "reverse_kl"
    FORWARD_KL = "forward_kl"
    ACCEPTANCE = "acceptance"


class Divergence(StrEnum):
    """Soft part of the mixture."""

    REVERSE_KL = "reverse_kl"
    FORWARD_KL = "forward_kl"
    ACCEPTANCE = "acceptance"


class LengthLabels(StrEnum):
    """What the length head learns."""

    HINDSIGHT = "hindsight"
    TRUNCATED = "truncated"


class Clip(StrEnum):
    """What of the divergence is clipped."""

    ENTRY = "entry"
    SUM = "sum"
    NONE = "none"


class Teacher(StrEnum):
    """Where the target's distribution comes from."""

    AUTO = "auto"
    TOP_K = "top_k"
    FULL = "full"
    NONE = "none"


class Features(StrEnum):
    """Where the target's hidden states come from."""

    AUTO = "auto"
    STORED = "stored"
    CACHE = "cache"
    COMPUTE = "compute"


class Optimizer(StrEnum):
    """What updates the weights."""

    MUON = "muon"
    ADAMW = "adamw"


TrajectoriesOption = Annotated[
    list[Path],
    typer.Option(
        "--trajectories", help="Directory from `adaflash trajectories`; may be repeated.", exists=True, file_okay=False
    ),
]
OutOption = Annotated[Path, typer.Option("--out", help="Directory for the drafter; a killed run resumes there.")]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="YAML file with options of this command; the command line wins. A run leaves one in --out.",
        exists=True,
        dir_okay=False,
        is_eager=True,
        callback=config_file_callback,
    ),
]
InitOption = Annotated[
    str | None, typer.Option("--init", help="Hub id or directory of a drafter to go on with.", rich_help_panel=_START)
]
FromScratchOption = Annotated[
    bool,
    typer.Option("--from-scratch", help="A new drafter, started from the target's layers.", rich_help_panel=_START),
]
PresetOption = Annotated[
    str | None,
    typer.Option(
        "--preset",
        help="Target and shape of a published drafter, such as qwen3-8b; other options change parts of it.",
        rich_help_panel=_START,
    ),
]
OnlyOption = Annotated[
    Only | None, typer.Option("--only", help="Train this part alone.  [default: both]", rich_help_panel=_START)
]
LoraRankOption = Annotated[
    int | None,
    typer.Option(
        "--lora-rank",
        min=1,
        help="Train a LoRA adapter of this rank on the drafter of --init; --out gets the merged drafter, and the "
        "adapter in adapter/.",
        rich_help_panel=_START,
    ),
]
LoraAlphaOption = Annotated[
    float | None,
    typer.Option("--lora-alpha", help="The adapter is scaled by alpha / rank.", rich_help_panel=_START),
]
LoraTargetModulesOption = Annotated[
    str | None,
    typer.Option(
        "--lora-target-modules", help="Layers to adapt, as fc,q_proj,v_proj.  [default: all]", rich_help_panel=_START
    ),
]
LayersOption = Annotated[
    int | None, typer.Option("--layers", min=1, help="Layers of a new drafter.  [default: 5]", rich_help_panel=_START)
]
BlockSizeOption = Annotated[
    int | None,
    typer.Option(
        "--block-size", min=2, help="Rows of a new drafter's block, anchor included.", rich_help_panel=_START
    ),
]
CausalBlocksOption = Annotated[
    bool | None,
    typer.Option(
        "--causal-blocks/--no-causal-blocks",
        help="Whether rows of a block see only those before them, so that blocks can be cut where many requests share "
        "the machine; a drafter of --init learns it anew.  [default: as --init; a new one sees both ways]",
        rich_help_panel=_START,
    ),
]
LayerIdsOption = Annotated[
    str | None,
    typer.Option("--target-layer-ids", help="Target layers a new drafter reads, as 1,8,14.", rich_help_panel=_START),
]
MaskTokenOption = Annotated[
    int | None,
    typer.Option("--mask-token-id", min=0, help="Token that stands for a row to draft.", rich_help_panel=_START),
]
LengthHeadOption = Annotated[
    LengthHead,
    typer.Option("--length-head", help="Head of a drafter that has none yet.", rich_help_panel=_START),
]
LengthLabelsOption = Annotated[
    LengthLabels | None,
    typer.Option(
        "--length-labels",
        help="Label of the length head: over the full block, or over what it would have had verified.",
        rich_help_panel=_LEARN,
    ),
]
ObjectiveOption = Annotated[
    Objective | None,
    typer.Option("--objective", help="Loss of a slot; mixture is of hard and soft labels.", rich_help_panel=_LEARN),
]
HardLabelWeightOption = Annotated[
    float | None,
    typer.Option(
        "--hard-label-weight",
        min=0.0,
        max=1.0,
        help="α, the share of hard labels in the mixture.",
        rich_help_panel=_LEARN,
    ),
]
DivergenceOption = Annotated[
    Divergence | None, typer.Option("--divergence", help="Soft part of the mixture.", rich_help_panel=_LEARN)
]
ClipOption = Annotated[
    Clip | None, typer.Option("--clip", help="What of the divergence is clipped.", rich_help_panel=_LEARN)
]
ClipThresholdOption = Annotated[
    float | None,
    typer.Option("--clip-threshold", min=0.0, help="δ, where clipping begins, in nats.", rich_help_panel=_LEARN),
]
PositionDecayOption = Annotated[
    float | None,
    typer.Option(
        "--position-decay", help="Slots after which the weight of a slot has fallen to 1/e.", rich_help_panel=_LEARN
    ),
]
TeacherOption = Annotated[
    Teacher, typer.Option("--teacher", help="Where soft targets come from.", rich_help_panel=_LEARN)
]
VocabularySizeOption = Annotated[
    int | None,
    typer.Option(
        "--vocabulary-size",
        min=0,
        help="Tokens in the training softmax, of those that occur; 0 for all.",
        rich_help_panel=_LEARN,
    ),
]
DraftVocabularyOption = Annotated[
    bool | None,
    typer.Option(
        "--draft-vocabulary/--no-draft-vocabulary",
        help="Let the drafter draft the tokens of --vocabulary-size alone, for a cheaper LM head.",
        rich_help_panel=_LEARN,
    ),
]
AnchorsOption = Annotated[
    int | None, typer.Option("--anchors", min=1, help="Blocks per trajectory and epoch.", rich_help_panel=_RUN)
]
BatchSizeOption = Annotated[
    int | None, typer.Option("--batch-size", min=1, help="Trajectories per forward pass.", rich_help_panel=_RUN)
]
AccumulationOption = Annotated[
    int | None,
    typer.Option("--gradient-accumulation", min=1, help="Forward passes per step.", rich_help_panel=_RUN),
]
EpochsOption = Annotated[
    float | None, typer.Option("--epochs", help="Passes over the trajectories.", rich_help_panel=_RUN)
]
StepsOption = Annotated[
    int | None, typer.Option("--steps", min=1, help="Steps, instead of --epochs.", rich_help_panel=_RUN)
]
OptimizerOption = Annotated[
    Optimizer | None,
    typer.Option("--optimizer", help="muon is for matrices; AdamW takes the rest.", rich_help_panel=_RUN),
]
LearningRateOption = Annotated[
    float | None,
    typer.Option("--learning-rate", "--lr", help="Of what is trained; with muon, of matrices.", rich_help_panel=_RUN),
]
VectorLearningRateOption = Annotated[
    float | None, typer.Option("--vector-learning-rate", help="Of norms, with muon.", rich_help_panel=_RUN)
]
WarmupOption = Annotated[
    int | None,
    typer.Option("--warmup-steps", min=0, help="Steps in which the rate rises from 0.", rich_help_panel=_RUN),
]
DecayFractionOption = Annotated[
    float | None,
    typer.Option(
        "--decay-fraction", min=0.0, max=1.0, help="Last part of the run, with a falling rate.", rich_help_panel=_RUN
    ),
]
HeldOutOption = Annotated[
    int, typer.Option("--held-out", min=0, help="Trajectories kept for evaluation.", rich_help_panel=_RUN)
]
MaxTokensOption = Annotated[
    int, typer.Option("--max-tokens", min=4, help="Longer trajectories are cut.", rich_help_panel=_RUN)
]
FeaturesOption = Annotated[
    Features,
    typer.Option(
        "--features",
        help="The target's hidden states: stored with the trajectories, computed at each step, or computed once and "
        "cached beside the trajectories.",
        rich_help_panel=_RUN,
    ),
]
SeedOption = Annotated[
    int, typer.Option("--seed", min=0, help="Of new weights, order and anchors.", rich_help_panel=_RUN)
]
ResumeOption = Annotated[
    bool, typer.Option("--resume/--no-resume", help="Go on from the last checkpoint in --out.", rich_help_panel=_RUN)
]
ReportToOption = Annotated[
    list[str] | None,
    typer.Option("--report-to", help="Also log there, for example tensorboard.", rich_help_panel=_RUN),
]
PushToHubOption = Annotated[
    str | None,
    typer.Option("--push-to-hub", help="Repository to push drafter and card to, org/name.", rich_help_panel=_PUBLISH),
]
PrivateOption = Annotated[
    bool, typer.Option("--private/--public", help="Of a repository that is new.", rich_help_panel=_PUBLISH)
]
LicenseOption = Annotated[
    str | None,
    typer.Option(
        "--license", help="For the model card, such as apache-2.0.  [default: the target's]", rich_help_panel=_PUBLISH
    ),
]


def _print_presets(requested: bool) -> None:
    if requested:
        from rich.console import Console

        from .train_display import presets_table

        Console().print(presets_table())
        raise typer.Exit


ListPresetsOption = Annotated[
    bool,
    typer.Option(
        "--list-presets",
        help="Show the presets and stop.",
        is_eager=True,
        callback=_print_presets,
        rich_help_panel=_START,
    ),
]
