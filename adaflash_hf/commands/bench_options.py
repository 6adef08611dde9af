"""Options of `adaflash bench`, and what they come to."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


__all__ = [
    "ApiKeyOption",
    "AssistantOption",
    "BaseUrlsOption",
    "ConcurrenciesOption",
    "ConfidenceHeadOption",
    "DataDirOption",
    "IgnoreEosOption",
    "MaxNewTokensOption",
    "MethodsOption",
    "ModelOption",
    "OsdDrafterOption",
    "OutOption",
    "PlotsOption",
    "RepeatsOption",
    "RequestsOption",
    "TemperatureOption",
    "Via",
    "ViaOption",
    "WarmUpTokensOption",
    "WorkloadsOption",
    "settle_plots",
]


class Via(StrEnum):
    """What our methods decode in."""

    ENGINE = "engine"
    GENERATE = "generate"


MethodsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--method",
        "-m",
        help="plain, dflash[:rows], adaflash[:scale], confidence[:threshold], cost_aware, oracle, osd[:rows]; "
        "transformers, transformers_cb, prompt_lookup[:tokens], transformers_dflash, transformers_mtp, assistant. "
        "Repeat it, or separate names by commas. Default: plain, dflash, adaflash, cost_aware.",
    ),
]
WorkloadsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--workload",
        "-w",
        help="gsm8k, humaneval, vicuna, blend or another name that `adaflash evaluate list` shows, a file of "
        "prompts, or a Hub data set as org/name[:split[:column]]; default: blend.",
    ),
]
ConcurrenciesOption = Annotated[
    list[str] | None, typer.Option("--concurrency", "-c", help="Requests in flight at once; default: 1,8.")
]
RequestsOption = Annotated[
    int | None,
    typer.Option("--requests", min=1, help="Requests of each run; default: twice the concurrency, at least 8."),
]
MaxNewTokensOption = Annotated[int, typer.Option("--max-new-tokens", "-n", min=8, help="Longest answer.")]
RepeatsOption = Annotated[int, typer.Option("--repeats", min=1, help="Timed runs of each method; medians count.")]
WarmUpTokensOption = Annotated[
    int, typer.Option("--warm-up-tokens", min=0, help="Longest answer of the untimed run before.")
]
IgnoreEosOption = Annotated[bool, typer.Option("--ignore-eos", help="Let every answer run to its full length.")]
InTurnsOption = Annotated[
    bool,
    typer.Option(
        "--in-turns",
        help="Let the engines of all methods answer side by side, a round each in turn: a machine that changes its "
        "speed does so for all. Then neither the time to the first token nor the peak memory is told.",
    ),
]
ViaOption = Annotated[
    Via, typer.Option("--via", help="What our methods decode in: the engine, or generate() on padded batches.")
]
AssistantOption = Annotated[
    str | None, typer.Option("--assistant", help="Small model of the same vocabulary, for the method assistant.")
]
ConfidenceHeadOption = Annotated[
    str | None, typer.Option("--confidence-head", help="Confidence head for confidence and cost_aware.")
]
OsdDrafterOption = Annotated[
    str | None,
    typer.Option("--osd-drafter", help="Drafter of the method osd, adapted with --objective forward_kl."),
]
TemperatureOption = Annotated[
    float, typer.Option("--temperature", min=0.0, help="0 is greedy; above, answers are sampled.")
]
DataDirOption = Annotated[
    Path | None,
    typer.Option("--data-dir", help="Whole test sets in place of the shipped prompts.", exists=True),
]
OutOption = Annotated[
    Path, typer.Option("--out", "-o", help="Results go to this name with .json, .md and -….png added.")
]
PlotsOption = Annotated[bool, typer.Option("--plots/--no-plots", help="Also draw pictures; needs matplotlib.")]
BaseUrlsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--base-url",
        help="Measure a running OpenAI-compatible server instead, as URL or name=URL; repeat it to compare "
        "several with the first.",
    ),
]
ModelOption = Annotated[str | None, typer.Option("--model", help="With --base-url: name to ask for.")]
ApiKeyOption = Annotated[
    str | None, typer.Option("--api-key", envvar="OPENAI_API_KEY", help="With --base-url: bearer token.")
]


def settle_plots(plots: bool) -> bool:
    """
    Whether pictures are drawn. Where matplotlib is missing, they are not, and that is told before hours of measuring.

    Args:
        plots (`bool`):
            Value of `--plots`.
    """
    from ..errors import MissingDependencyError
    from ..evaluation.pictures import matplotlib_figure

    if not plots:
        return False
    try:
        matplotlib_figure()
    except MissingDependencyError as error:
        typer.echo(f"Warning: there will be no pictures. {error}", err=True)
        return False
    return True
