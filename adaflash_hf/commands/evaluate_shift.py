"""`adaflash evaluate online` and `cross-domain`: a drafter that knows one domain serves others."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import InvalidInputError
from .interruption import telling_what_is_kept
from .options import DeviceOption, DrafterOption, Dtype, DtypeOption, TargetOption


__all__ = ["cross_domain", "online"]

_DEFAULT_METHODS = "static,osd,adaflash,adaflash-lora"
_TRAFFIC, _TRAINING = "Traffic", "Training"


class ShiftPolicy(StrEnum):
    """Who decides how much of a draft is verified."""

    FIXED = "fixed"
    LENGTH_HEAD = "length_head"


def _traffic(*names: str, **more: Any) -> Any:
    return typer.Option(*names, rich_help_panel=_TRAFFIC, **more)


def _training(*names: str, **more: Any) -> Any:
    return typer.Option(*names, rich_help_panel=_TRAINING, **more)


DataOption = Annotated[
    Path | None,
    _traffic("--data", help="Directory with gsm8k_train.jsonl, codealpaca.json and alpaca_seed_tasks.jsonl."),
]
PromptsOption = Annotated[
    list[str] | None, _traffic("--prompts", metavar="DOMAIN=FILE", help="Prompts of a domain; may be repeated.")
]
TrajectoriesOption = Annotated[
    list[Path] | None,
    _traffic("--trajectories", exists=True, file_okay=False, help="Answered prompts instead; may be repeated."),
]
HomeOption = Annotated[str, _traffic("--home", help="Domain that the drafter knows.")]
PhasesOption = Annotated[str, _traffic("--phases", help="Domains served after it, separated by commas.")]
RoundsOption = Annotated[int, _traffic("--rounds-per-phase", min=1, help="Rounds of adaptation in each.")]
PerRoundOption = Annotated[int, _traffic("--trajectories-per-round", min=1, help="Requests before each round.")]
HomeTrajectoriesOption = Annotated[
    int | None, _traffic("--home-trajectories", min=1, help="Served first; default: as many as in a round.")
]
HeldOutOption = Annotated[int, _traffic("--held-out", min=1, help="Answers of each domain that are never served.")]
HeldOutAnchorsOption = Annotated[int, _traffic("--held-out-anchors", min=1, help="Blocks judged on each.")]
MaxNewTokensOption = Annotated[int, _traffic("--max-new-tokens", "-n", min=1, help="Longest answer.")]
MaxPromptTokensOption = Annotated[int, _traffic("--max-prompt-tokens", min=1, help="Longer prompts are left out.")]
ReplayOption = Annotated[bool, _traffic("--replay", help="Draft on known answers instead of decoding; no speeds.")]
ConcurrencyOption = Annotated[int, _traffic("--concurrency", min=1, help="Requests decoded at a time.")]
PolicyOption = Annotated[ShiftPolicy, _traffic("--length-policy", help="What decides how much is verified.")]
ScaleOption = Annotated[float, _traffic("--length-scale", help="Factor on the length head's forecast.")]
MethodsOption = Annotated[str, _training("--methods", help="Ways of adapting, separated by commas.")]
SeedsOption = Annotated[str, _training("--seeds", help="Separated by commas.")]
BalancedOption = Annotated[bool, _training("--balanced", help="Every round learns of all domains seen so far.")]
GuardOption = Annotated[bool, _training("--guard", help="Publish only what held-out traffic approves of.")]
EpochsOption = Annotated[int, _training("--epochs", min=1, help="Passes over the trajectories of a round.")]
AccumulationOption = Annotated[int, _training("--gradient-accumulation", min=1, help="Trajectories per update.")]
AnchorsOption = Annotated[int, _training("--anchors", min=1, help="Blocks per trajectory.")]
RateOption = Annotated[float, _training("--learning-rate", help="Of all methods but LoRA.")]
LoraRateOption = Annotated[float, _training("--lora-learning-rate", help="Of LoRA.")]
TeacherOption = Annotated[
    bool, _training("--stored-teacher", help="Learn from the likeliest tokens stored with replayed answers.")
]
ReferenceOption = Annotated[
    list[str] | None,
    _training("--reference", metavar="DOMAIN=DRAFTER", help="A drafter that knows a domain; may be repeated."),
]
ReferenceEpochsOption = Annotated[
    int, _training("--reference-epochs", min=1, help="Passes of a drafter that is trained on one domain here.")
]


def online(
    data: DataOption = None,
    prompts: PromptsOption = None,
    trajectories: TrajectoriesOption = None,
    target: TargetOption = "smollm2-135m",
    drafter: DrafterOption = None,
    dtype: DtypeOption = Dtype.AUTO,
    device: DeviceOption = None,
    home: HomeOption = "maths",
    phases: PhasesOption = "code,chat,maths",
    rounds_per_phase: RoundsOption = 10,
    trajectories_per_round: PerRoundOption = 128,
    home_trajectories: HomeTrajectoriesOption = None,
    held_out: HeldOutOption = 64,
    held_out_anchors: HeldOutAnchorsOption = 32,
    max_new_tokens: MaxNewTokensOption = 512,
    max_prompt_tokens: MaxPromptTokensOption = 512,
    replay: ReplayOption = False,
    concurrency: ConcurrencyOption = 16,
    length_policy: PolicyOption = ShiftPolicy.FIXED,
    length_scale: ScaleOption = 1.3,
    methods: MethodsOption = _DEFAULT_METHODS,
    seeds: SeedsOption = "0,1,2",
    balanced: BalancedOption = False,
    guard: GuardOption = False,
    epochs: EpochsOption = 2,
    gradient_accumulation: AccumulationOption = 2,
    anchors: AnchorsOption = 512,
    learning_rate: RateOption = 3e-4,
    lora_learning_rate: LoraRateOption = 1e-3,
    stored_teacher: TeacherOption = False,
    reference: ReferenceOption = None,
    reference_epochs: ReferenceEpochsOption = 6,
    out: Path = Path("online"),
    plots: bool = True,
) -> None:
    """Ways of adapting a drafter to the same traffic, while it shifts from one domain to the next."""
    options = dict(locals())
    chosen = _names(options.pop("methods"))
    _check_methods(chosen)
    if stored_teacher and not replay:
        raise InvalidInputError(
            "`--stored-teacher` is given without `--replay`; what is decoded anew may differ from what is stored."
        )
    from ..embedded_target import without_progress_bars

    with without_progress_bars(), telling_what_is_kept(lambda: _describe_kept(out)):
        _shift_run(options).compare(chosen, plots)


def cross_domain(
    data: DataOption = None,
    prompts: PromptsOption = None,
    trajectories: TrajectoriesOption = None,
    target: TargetOption = "smollm2-135m",
    drafter: DrafterOption = None,
    dtype: DtypeOption = Dtype.AUTO,
    device: DeviceOption = None,
    home: HomeOption = "maths",
    phases: PhasesOption = "code,chat,maths",
    rounds_per_phase: RoundsOption = 2,
    trajectories_per_round: PerRoundOption = 48,
    home_trajectories: HomeTrajectoriesOption = 1,
    held_out: HeldOutOption = 32,
    held_out_anchors: HeldOutAnchorsOption = 32,
    max_new_tokens: MaxNewTokensOption = 256,
    max_prompt_tokens: MaxPromptTokensOption = 512,
    anchors: AnchorsOption = 512,
    learning_rate: RateOption = 3e-4,
    gradient_accumulation: AccumulationOption = 2,
    stored_teacher: TeacherOption = False,
    reference: ReferenceOption = None,
    reference_epochs: ReferenceEpochsOption = 6,
    seeds: SeedsOption = "0",
    out: Path = Path("cross-domain"),
    plots: bool = True,
) -> None:
    """A drafter trained on each domain in turn, judged on held-out answers of all of them."""
    options = dict(locals())
    # Nothing is served but what the start is judged by; that is known already.
    fixed = {
        "replay": True,
        "concurrency": 1,
        "length_policy": ShiftPolicy.FIXED,
        "length_scale": 1.3,
        "balanced": False,
        "guard": False,
        "epochs": reference_epochs,
        "lora_learning_rate": learning_rate,
    }
    from ..embedded_target import without_progress_bars

    with without_progress_bars(), telling_what_is_kept(lambda: _describe_kept(out)):
        _shift_run({**options, **fixed}).cross(plots)


def _describe_kept(out: Path) -> str:
    there = len(list((out / "runs").glob("*.json")))
    return f"{there} finished runs are kept in {out / 'runs'}; repeat the command to go on." if there else ""


def _shift_run(options: dict[str, Any]) -> Any:
    """Options as typer reads them, made into what a run needs."""
    from rich.console import Console

    from .shift_run import ShiftRun

    del options["plots"]
    seeds, references = options.pop("seeds"), options.pop("reference")
    return ShiftRun(
        **{
            **options,
            "dtype": options["dtype"].value,
            "length_policy": options["length_policy"].value,
            "phases": _names(options["phases"]),
            "seeds": _numbers(seeds),
            "prompts": {domain: Path(path) for domain, path in _pairs(options["prompts"], "--prompts").items()},
            "trajectories": options["trajectories"] or [],
            "references": _pairs(references, "--reference"),
            "console": Console(),
        }
    )


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _numbers(text: str) -> list[int]:
    try:
        return [int(name) for name in _names(text)]
    except ValueError as error:
        raise InvalidInputError(f"`--seeds` is {text!r}; expected whole numbers, separated by commas.") from error


def _pairs(values: Sequence[str] | None, option: str) -> dict[str, str]:
    """`DOMAIN=VALUE` each."""
    pairs = {}
    for value in values or ():
        domain, separator, rest = value.partition("=")
        if not (domain and separator and rest):
            raise InvalidInputError(f"`{option}` is {value!r}; give it as DOMAIN=VALUE, such as code=prompts.jsonl.")
        pairs[domain] = rest
    return pairs


def _check_methods(names: Sequence[str]) -> None:
    """Before anything is loaded."""
    from ..evaluation.domain_shift import METHODS

    unknown = next((name for name in names if name not in METHODS), None)
    if unknown is not None:
        raise InvalidInputError(f"`--methods` has {unknown!r}; choose from {', '.join(METHODS)}.")
