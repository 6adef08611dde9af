"""Options that several subcommands share, so that each is spelled, explained and defaulted in one place."""

from __future__ import annotations

import logging
from enum import StrEnum
from typing import Annotated, Any

import typer


__all__ = [
    "Baseline",
    "BaselineOption",
    "DeviceOption",
    "DraftProposal",
    "DraftProposalOption",
    "DrafterOption",
    "Dtype",
    "DtypeOption",
    "LengthPolicy",
    "LengthPolicyOption",
    "PrepackOption",
    "PrivateOption",
    "TargetOption",
    "VerboseOption",
    "drafting_kwargs",
    "is_default",
    "warn_if_idle",
]


class Dtype(StrEnum):
    """What the target computes in."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class LengthPolicy(StrEnum):
    """Who decides how many drafted tokens the target verifies."""

    FIXED = "fixed"
    LENGTH_HEAD = "length_head"
    CONFIDENCE = "confidence"
    COST_AWARE = "cost_aware"


class Baseline(StrEnum):
    """What plain decoding runs on in a comparison."""

    LOADED = "loaded"
    PREPACKED = "prepacked"


class DraftProposal(StrEnum):
    """How draft tokens are chosen when sampling."""

    ARGMAX = "argmax"
    SAMPLE = "sample"


TargetOption = Annotated[
    str,
    typer.Option(
        "--target", help="Hub id or directory of the model that decides the text; smollm2-135m needs no network."
    ),
]
DrafterOption = Annotated[
    str | None,
    typer.Option(
        "--drafter", help="Hub id or directory of its drafter; default: for smollm2-135m the one in checkpoints/."
    ),
]
DtypeOption = Annotated[
    Dtype,
    typer.Option("--dtype", help="Dtype of both models; auto takes bfloat16 where the hardware multiplies it."),
]
DeviceOption = Annotated[
    str | None, typer.Option("--device", help="Where both models run; default: cuda if there is one, else cpu.")
]
LengthPolicyOption = Annotated[
    LengthPolicy | None,
    typer.Option(
        "--length-policy",
        help="What decides how much of a draft is verified; default: cost_aware, and fixed in `adaflash online`.",
    ),
]
DraftProposalOption = Annotated[
    DraftProposal | None,
    typer.Option("--draft-proposal", help="How draft tokens are chosen when sampling; default: argmax."),
]
PrepackOption = Annotated[
    bool,
    typer.Option(
        "--prepack/--no-prepack",
        help="On a CPU: rearrange weights for blocks of rows (memory for speed).",
    ),
]
BaselineOption = Annotated[
    Baseline,
    typer.Option(
        "--baseline",
        help="Plain decoding runs on the model as it was loaded, or on the same rearranged weights as AdaFlash.",
    ),
]
PrivateOption = Annotated[bool, typer.Option("--private/--public", help="Of a repository that is new.")]
VerboseOption = Annotated[
    bool, typer.Option("--verbose", "-v", help="Also show the verify lengths and where the time went.")
]


def is_default(context: typer.Context, name: str) -> bool:
    """Whether an option was given neither on the command line nor in a configuration file."""
    source = context.get_parameter_source(name)
    return source is None or source.name == "DEFAULT"


def drafting_kwargs(
    length_policy: LengthPolicy | None, draft_proposal: DraftProposal | None, *, is_greedy: bool = False
) -> dict[str, Any]:
    """
    The arguments of `generate()` that only a call with a drafter takes.

    Where decoding is greedy, it is said on standard error that a draft proposal has no effect.

    Costs are weighed unless another policy is asked for: a user of a command has not said that the machine is one
    where rows are free. That they are measured first, once, is said on standard error.
    """
    kwargs = {"length_policy": (length_policy or LengthPolicy.COST_AWARE).value}
    if kwargs["length_policy"] == LengthPolicy.COST_AWARE:
        _show_calibration()
    warn_if_idle(draft_proposal, is_greedy=is_greedy)
    return kwargs if draft_proposal is None else {**kwargs, "draft_proposal": draft_proposal.value}


def warn_if_idle(draft_proposal: DraftProposal | None, *, is_greedy: bool) -> None:
    """
    Say on standard error that a draft proposal has no effect, where decoding is greedy.

    Args:
        draft_proposal (`DraftProposal`, *optional*):
            Value of `--draft-proposal`.
        is_greedy (`bool`):
            Whether the likeliest tokens are taken.
    """
    if draft_proposal is not None and is_greedy:
        typer.echo(
            f"Warning: `--draft-proposal` is {draft_proposal.value!r}, but decoding is greedy; it has no effect.",
            err=True,
        )


def _show_calibration() -> None:
    calibration = logging.getLogger("adaflash_hf.generation.cost_calibration")
    if not calibration.handlers:
        calibration.addHandler(logging.StreamHandler())
        calibration.setLevel(logging.INFO)
