"""Options of `adaflash online`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


__all__ = [
    "AnchorsOption",
    "AttachOption",
    "BalancedOption",
    "BufferOption",
    "BufferRowsOption",
    "ConcurrencyOption",
    "DomainOption",
    "EpochsOption",
    "ExistingPublishDirOption",
    "HeldOutOption",
    "HeldOutShareOption",
    "InferenceThreadsOption",
    "KeepVersionsOption",
    "LearningRateBackoffOption",
    "LearningRateOption",
    "LengthHeadLearningRateOption",
    "LoraRankOption",
    "MaxNewTokensOption",
    "MaxPromptTokensOption",
    "MaxRoundsOption",
    "MaxTokensOption",
    "MetricsHostOption",
    "MetricsPortOption",
    "MinHeldOutOption",
    "ObjectiveOption",
    "OnceOption",
    "OptionalBufferOption",
    "PromptsOption",
    "PublishDirOption",
    "RoundSizeOption",
    "SeedOption",
    "TemperatureOption",
    "ToleranceOption",
    "TrainerDeviceOption",
    "TrainerThreadsOption",
]

_SERVING, _TRAINING, _WATCHING = "Inference side", "Trainer", "Watching"

BufferOption = Annotated[
    Path, typer.Option("--buffer", help="File of the replay buffer, on a local disk; made if it is not there.")
]
OptionalBufferOption = Annotated[
    Path | None, typer.Option("--buffer", help="File of the replay buffer, for its depth and acceptance by domain.")
]
PublishDirOption = Annotated[
    Path, typer.Option("--publish-dir", help="Directory of published versions, state and status.", file_okay=False)
]
ExistingPublishDirOption = Annotated[
    Path, typer.Option("--publish-dir", help="Directory that `adaflash online run` publishes to.", file_okay=False)
]
BufferRowsOption = Annotated[int, typer.Option("--buffer-rows", min=2, help="Most trajectories a new buffer keeps.")]
HeldOutShareOption = Annotated[
    float,
    typer.Option("--held-out-share", min=0.0, max=0.9, help="Share of prompts a new buffer never trains on."),
]
AttachOption = Annotated[bool, typer.Option("--attach", help="Trainer only, on a buffer that another process fills.")]

PromptsOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--prompts",
        help="JSON lines or JSON file of prompts to serve, needed without --attach; several are interleaved.",
        exists=True,
        dir_okay=False,
        rich_help_panel=_SERVING,
    ),
]
DomainOption = Annotated[
    str | None,
    typer.Option(
        "--domain",
        help="Domain of all prompts; default: each record's field `domain`, or the file's name.",
        rich_help_panel=_SERVING,
    ),
]
OnceOption = Annotated[
    bool,
    typer.Option(
        "--once/--loop",
        help="Serve the prompts once, do the rounds that are due, and end; or begin again after the last one.",
        rich_help_panel=_SERVING,
    ),
]
ConcurrencyOption = Annotated[
    int, typer.Option("--concurrency", "-c", min=1, help="Requests in flight.", rich_help_panel=_SERVING)
]
MaxNewTokensOption = Annotated[
    int, typer.Option("--max-new-tokens", "-n", min=1, help="Longest response.", rich_help_panel=_SERVING)
]
MaxPromptTokensOption = Annotated[
    int, typer.Option("--max-prompt-tokens", min=1, help="Longer prompts are left out.", rich_help_panel=_SERVING)
]
TemperatureOption = Annotated[
    float, typer.Option("--temperature", min=0.0, help="0 decodes greedily.", rich_help_panel=_SERVING)
]
InferenceThreadsOption = Annotated[
    int | None,
    typer.Option(
        "--inference-threads",
        min=1,
        help="Threads of this side; default on a CPU: half of the cores.",
        rich_help_panel=_SERVING,
    ),
]

RoundSizeOption = Annotated[
    int, typer.Option("--round-size", min=1, help="New trajectories of a round.", rich_help_panel=_TRAINING)
]
EpochsOption = Annotated[
    int, typer.Option("--epochs", min=1, help="How often a round goes through them.", rich_help_panel=_TRAINING)
]
MaxTokensOption = Annotated[
    int, typer.Option("--max-tokens", min=8, help="Longer trajectories are cut.", rich_help_panel=_TRAINING)
]
AnchorsOption = Annotated[
    int, typer.Option("--anchors", min=1, help="Blocks per trajectory and epoch.", rich_help_panel=_TRAINING)
]
LearningRateOption = Annotated[
    float, typer.Option("--learning-rate", help="Of the drafter.", rich_help_panel=_TRAINING)
]
LengthHeadLearningRateOption = Annotated[
    float, typer.Option("--length-head-learning-rate", help="Of its length head.", rich_help_panel=_TRAINING)
]
LearningRateBackoffOption = Annotated[
    float,
    typer.Option(
        "--learning-rate-backoff",
        help="Factor on both rates after a round that was rejected; published ones take it back. 1: none.",
        rich_help_panel=_TRAINING,
    ),
]
ObjectiveOption = Annotated[
    str,
    typer.Option("--objective", help="mixture, or forward_kl (OSD), cross_entropy, ...", rich_help_panel=_TRAINING),
]
LoraRankOption = Annotated[
    int | None,
    typer.Option("--lora-rank", min=1, help="Train an adapter in place of all weights.", rich_help_panel=_TRAINING),
]
BalancedOption = Annotated[
    bool,
    typer.Option(
        "--balanced/--newest",
        help="Equal shares of all domains in a round, earlier trajectories included; or the newest ones.",
        rich_help_panel=_TRAINING,
    ),
]
HeldOutOption = Annotated[
    int,
    typer.Option(
        "--held-out",
        min=0,
        help="Held-out trajectories a round is judged on; 0 publishes unjudged.",
        rich_help_panel=_TRAINING,
    ),
]
MinHeldOutOption = Annotated[
    int, typer.Option("--min-held-out", min=0, help="No round before there are so many.", rich_help_panel=_TRAINING)
]
ToleranceOption = Annotated[
    float,
    typer.Option("--tolerance", min=0.0, help="How far held-out tau may fall in a round.", rich_help_panel=_TRAINING),
]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Of sampling, order and anchors.")]
KeepVersionsOption = Annotated[
    int, typer.Option("--keep-versions", min=1, help="Newest versions that stay.", rich_help_panel=_TRAINING)
]
MaxRoundsOption = Annotated[
    int | None, typer.Option("--max-rounds", min=1, help="End after so many rounds.", rich_help_panel=_TRAINING)
]
TrainerDeviceOption = Annotated[
    str | None,
    typer.Option("--trainer-device", help="Where the trainer runs; default: --device.", rich_help_panel=_TRAINING),
]
TrainerThreadsOption = Annotated[
    int | None,
    typer.Option(
        "--trainer-threads",
        min=1,
        help="Threads of the trainer; default on a CPU: half of the cores.",
        rich_help_panel=_TRAINING,
    ),
]
MetricsPortOption = Annotated[
    int | None,
    typer.Option(
        "--metrics-port", min=0, max=65535, help="Serve Prometheus metrics at this port.", rich_help_panel=_WATCHING
    ),
]
MetricsHostOption = Annotated[
    str, typer.Option("--metrics-host", help="Address to serve them at.", rich_help_panel=_WATCHING)
]
