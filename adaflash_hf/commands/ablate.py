"""`adaflash ablate`: what training settings and length heads are worth, measured into results files."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import InvalidInputError
from . import train_options as options
from .help_pages import SectionedCommand
from .interruption import telling_what_is_kept
from .options import DeviceOption, DrafterOption, Dtype, DtypeOption, TargetOption


if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..evaluation.ablations import AblationData, AblationSettings
    from ..modeling_dflash_drafter import DFlashDrafterModel
    from ..training.trajectory_dataset import TrajectoryDataset


__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Compare training settings, or length heads, on held-out prompts.")

RESULTS = "results"
RUNS = "runs"


class Compare(StrEnum):
    """What is compared."""

    OBJECTIVE = "objective"
    HARD_LABEL_WEIGHT = "hard_label_weight"
    CLIP_THRESHOLD = "clip_threshold"
    CLIP = "clip"
    POSITION_DECAY = "position_decay"
    VOCABULARY = "vocabulary"
    BLOCK = "block"
    START = "start"
    HEADS = "heads"


_ONLY_IF_ASKED = (Compare.BLOCK, Compare.START, Compare.HEADS)

OutOption = Annotated[Path, typer.Option("--out", help="Directory for results; what is finished there is kept.")]
RunsOption = Annotated[
    Path | None,
    typer.Option(
        "--runs",
        help="Where finished runs are kept, for several comparisons to share.  [default: runs in the results]",
    ),
]
CompareOption = Annotated[
    list[Compare] | None,
    typer.Option(
        "--compare", help="May be repeated.  [default: all but block and start; heads only with a trained drafter]"
    ),
]
StepsOption = Annotated[int, typer.Option("--steps", min=1, help="Steps of each drafter: the budget.")]
HeadLearningRateOption = Annotated[float, typer.Option("--head-learning-rate", help="Learning rate of each head.")]
HeadStepsOption = Annotated[int, typer.Option("--head-steps", min=1, help="Steps of each head.")]
SeedsOption = Annotated[list[int] | None, typer.Option("--seed", help="May be repeated.  [default: 0, 1 and 2]")]
VocabularySizesOption = Annotated[
    list[int] | None,
    typer.Option("--vocabulary-sizes", min=0, help="May be repeated; 0: all.  [default: 2048, 8192 and 0]"),
]
HeadDrafterOption = Annotated[
    str | None,
    typer.Option("--head-drafter", help="Trained drafter to compare heads on.  [default: that of --init]"),
]
EvalAnchorsOption = Annotated[int, typer.Option("--eval-anchors", min=1, help="Blocks per held-out trajectory.")]
HeadOption = Annotated[
    list[str] | None,
    typer.Option("--head", help="A length head saved alone, as NAME=DIRECTORY; may be repeated."),
]
ConfidenceHeadOption = Annotated[
    list[str] | None, typer.Option("--confidence-head", help="The same of a confidence head.")
]
ScaleOption = Annotated[
    list[float] | None, typer.Option("--scale", help="Factor on the estimated length; may be repeated.")
]
ThresholdOption = Annotated[
    list[float] | None,
    typer.Option("--threshold", help="Probability down to which a slot is verified; may be repeated."),
]


@app.command(cls=SectionedCommand)
def objectives(
    trajectories: options.TrajectoriesOption,
    out: OutOption,
    runs: RunsOption = None,
    target: TargetOption = "smollm2-135m",
    init: options.InitOption = None,
    from_scratch: options.FromScratchOption = False,
    layers: options.LayersOption = None,
    block_size: options.BlockSizeOption = None,
    compare: CompareOption = None,
    steps: StepsOption = 200,
    head_steps: HeadStepsOption = 200,
    seed: SeedsOption = None,
    vocabulary_sizes: VocabularySizesOption = None,
    head_drafter: HeadDrafterOption = None,
    vocabulary_size: options.VocabularySizeOption = None,
    batch_size: options.BatchSizeOption = None,
    anchors: options.AnchorsOption = None,
    learning_rate: options.LearningRateOption = None,
    head_learning_rate: HeadLearningRateOption = 1e-3,
    held_out: options.HeldOutOption = 64,
    eval_anchors: EvalAnchorsOption = 64,
    max_tokens: options.MaxTokensOption = 2048,
    features: options.FeaturesOption = options.Features.AUTO,
    dtype: DtypeOption = Dtype.AUTO,
    device: DeviceOption = None,
) -> None:
    """Train drafters with each objective, α, δ, clipping and vocabulary, heads with each label, all on one budget."""
    from rich.console import Console

    from ..embedded_target import load_target
    from ..evaluation.ablation_variants import ablation_variants
    from ..evaluation.ablations import read_finished_runs
    from ..evaluation.result_files import check_results_place, shown_name
    from ..output_places import check_writable
    from ..training.run_records import write_run_record
    from ..training.trajectory_dataset import add_target_features, check_stored_features
    from ..weights_digest import weights_sha256
    from .loading import check_checkpoint, check_trajectories, tell_other_makers

    if (init is None) != from_scratch:
        raise InvalidInputError(
            f"`--init` is {init!r} and `--from-scratch` is {from_scratch}; all runs start the same way, so choose one."
        )
    head_drafter = head_drafter or init
    wanted = compare or [name for name in Compare if name not in _ONLY_IF_ASKED]
    if compare is None and head_drafter is not None:
        wanted.append(Compare.HEADS)
    if Compare.HEADS in wanted and head_drafter is None:
        raise InvalidInputError("`--compare heads` needs a trained drafter; pass it with --head-drafter.")
    rates = {"learning_rate": learning_rate, "head_learning_rate": head_learning_rate}
    for name, rate in rates.items():
        if rate is not None and not rate > 0:
            raise InvalidInputError(f"`{name}` is {rate}; it must be above 0.")
    sizes = {name: size for name, size in {"num_hidden_layers": layers, "block_size": block_size}.items() if size}
    if init is not None and sizes:
        raise InvalidInputError(f"`--init` is {init!r}, whose sizes are settled; leave out {', '.join(sizes)}.")
    check_results_place(out / RESULTS)
    kept = runs or out / RUNS
    check_writable(kept, "runs")
    data = _read(trajectories, max_tokens, held_out)
    dataset: Any = data.train.dataset
    given = {
        "vocabulary_size": vocabulary_size,
        "batch_size": batch_size,
        "anchors": anchors,
        "learning_rate": learning_rate,
    }
    trained_on = head_drafter if Compare.HEADS in wanted else None
    fixed: dict[str, Any] = {
        "target": target,
        "start_sha256": None if init is None else weights_sha256(init),
        "trained": None if trained_on is None else shown_name(trained_on),
        "trained_sha256": None if trained_on is None else weights_sha256(trained_on),
        "trajectories": [path.resolve().name for path in trajectories],
        "trajectories_sha256": dataset.fingerprint,
        "train_trajectories": len(data.train),
        "held_out_trajectories": len(data.held_out),
        "steps": steps,
        "head_steps": head_steps,
        "head_learning_rate": head_learning_rate,
        "eval_anchors": eval_anchors,
    }
    read_finished_runs(kept, fixed)
    check_trajectories(dataset, target, features.value)
    for option, path in (("--init", init), ("--head-drafter", trained_on)):
        if path is not None:
            check_checkpoint(path, option, target=target)
    started = None if init is None else _load_float32(init, "--init")
    trained = None if trained_on is None else _load_float32(trained_on, "--head-drafter")
    check_stored_features(dataset, features.value, None if started is None else started.config.target_layer_ids)
    console = Console(markup=False)  # names and places may have brackets
    tell_other_makers(trajectories, target, console.print)
    target_model, tokenizer = load_target(target, dtype.value, device=device, on_progress=console.print)
    new_drafter = _starts(started, sizes, target_model, tokenizer)
    example = new_drafter(0)
    add_target_features(dataset, target_model, example.config.target_layer_ids, features.value)
    fixed["start"] = _describe_start(init, example)
    common = _settings(given, fixed, init is None, target_model, example, dataset)
    comparisons = ablation_variants(
        [name.value for name in wanted], vocabulary_sizes or [2048, 8192, 0], common.vocabulary_size or 0
    )
    write_run_record(out / "run.json", sys.argv, vars(common))
    _run_all(comparisons, seed or [0, 1, 2], new_drafter, trained, target_model, data, common, out, kept, console)


@app.command(cls=SectionedCommand)
def length_head(
    trajectories: options.TrajectoriesOption,
    out: OutOption,
    target: TargetOption = "smollm2-135m",
    drafter: DrafterOption = None,
    head: HeadOption = None,
    confidence_head: ConfidenceHeadOption = None,
    scale: ScaleOption = None,
    threshold: ThresholdOption = None,
    held_out: options.HeldOutOption = 64,
    eval_anchors: EvalAnchorsOption = 64,
    max_tokens: options.MaxTokensOption = 2048,
    features: options.FeaturesOption = options.Features.AUTO,
    dtype: DtypeOption = Dtype.AUTO,
    device: DeviceOption = None,
) -> None:
    """Judge a drafter's length head, and others, on held-out blocks: error, correlation, tokens kept, rows saved."""
    from rich.console import Console

    from ..embedded_target import load_target
    from ..evaluation import head_report as report
    from ..evaluation.bench import describe_environment
    from ..evaluation.result_files import check_results_place, write_results
    from ..modeling_confidence_head import ConfidenceHeadModel
    from ..modeling_length_head import LengthHeadModel
    from ..training.trajectory_dataset import add_target_features, check_stored_features
    from .loading import (
        check_checkpoint,
        check_trajectories,
        find_drafter,
        load_beside,
        load_drafter,
        tell_other_makers,
    )

    drafter = find_drafter(target, drafter)
    named_heads, named_confidences = _named(head, "--head"), _named(confidence_head, "--confidence-head")
    check_results_place(out / RESULTS)
    data = _read(trajectories, max_tokens, held_out)
    dataset: Any = data.train.dataset
    layer_ids = check_checkpoint(drafter, target=target).target_layer_ids
    for path in named_heads.values():
        check_checkpoint(path, "--head", LengthHeadModel)
    for path in named_confidences.values():
        check_checkpoint(path, "--confidence-head", ConfidenceHeadModel)
    check_trajectories(dataset, target, features.value)
    check_stored_features(dataset, features.value, layer_ids)
    console = Console(markup=False)  # names and places may have brackets
    tell_other_makers(trajectories, target, console.print)
    target_model, _ = load_target(target, dtype.value, device=device, on_progress=console.print)
    model = load_drafter(drafter, target_model)
    heads = {} if model.length_head is None else {"length head": model.length_head}
    heads |= {name: load_beside(LengthHeadModel, path, target_model, "--head") for name, path in named_heads.items()}
    confidences = {
        name: load_beside(ConfidenceHeadModel, path, target_model, "--confidence-head")
        for name, path in named_confidences.items()
    }
    add_target_features(dataset, target_model, layer_ids, features.value)
    # The constant comes from blocks that nothing else is judged on.
    judged, calibration = (
        report.collect_blocks(model, target_model, rows, anchors_per_trajectory=eval_anchors)
        for rows in (data.held_out, data.calibration)
    )
    results = report.head_report(
        judged,
        calibration,
        heads,
        confidences,
        scales=scale or report.DEFAULT_SCALES,
        thresholds=threshold or report.DEFAULT_THRESHOLDS,
    )
    sources = {
        "drafter": drafter,
        "trajectories": [str(path) for path in trajectories],
        "held_out": len(data.held_out),
    }
    sources["environment"] = describe_environment(target_model, model)
    sections = report.head_sections(results)
    _show(console, sections)
    write_results(out / RESULTS, {**sources, **results}, f"Length heads of {drafter}", sections)
    _name_files(console, out)


def _describe_kept(done: int, total: int, kept: Path) -> str:
    return f"{done} of {total} runs are kept in {kept}; repeat the command to go on." if done else ""


def _show(console: Any, sections: list[str]) -> None:
    """As it is in the file: its tables are too wide to be drawn in most terminals."""
    console.print("\n\n".join(sections), highlight=False, soft_wrap=True)


def _name_files(console: Any, out: Path) -> None:
    console.print(f"\nThe results are in {out / RESULTS}.md and .json.", highlight=False, soft_wrap=True)


def _named(values: list[str] | None, option: str) -> dict[str, str]:
    """`NAME=DIRECTORY` each."""
    named = {}
    for value in values or []:
        name, separator, path = value.partition("=")
        if not separator or not name or not path:
            raise InvalidInputError(f"`{option}` is {value!r}; give it as NAME=DIRECTORY.")
        named[name] = path
    return named


def _read(trajectories: list[Path], max_tokens: int, held_out: int) -> AblationData:
    from torch.utils.data import Subset

    from ..evaluation.ablations import AblationData
    from ..training.trajectory_dataset import TrajectoryDataset, split_by_prompt

    if held_out < 1:
        raise InvalidInputError(f"`--held-out` is {held_out}; hold out at least one trajectory to judge on.")
    dataset = TrajectoryDataset(trajectories, max_tokens=max_tokens)
    train, judged = split_by_prompt(dataset, held_out)
    return AblationData(Subset(dataset, train), Subset(dataset, judged))


def _load_float32(name_or_path: str, option: str) -> DFlashDrafterModel:
    import torch

    from ..hub_connection import loading_checkpoint
    from ..modeling_dflash_drafter import DFlashDrafterModel

    # Weights are trained in float32, whatever they were saved in.
    with loading_checkpoint(name_or_path, option):
        return DFlashDrafterModel.from_pretrained(name_or_path, dtype=torch.float32)


def _starts(
    init: DFlashDrafterModel | None,
    fields: dict[str, Any],
    target_model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
) -> Callable[[int], DFlashDrafterModel]:
    """Makes the drafter that runs of a seed start from; those from scratch differ by the seed."""
    import copy

    from transformers import set_seed

    from ..modeling_dflash_drafter import DFlashDrafterModel
    from ..training import initialization

    if init is not None:
        return lambda seed: copy.deepcopy(init)
    mask_token_id = initialization.choose_mask_token_id(target_model, tokenizer)
    fields = {"block_size": 8 if target_model.device.type == "cpu" else 16, **fields}
    config = initialization.drafter_config_for_target(target_model, mask_token_id=mask_token_id, **fields)

    def new(seed: int) -> DFlashDrafterModel:
        set_seed(seed)
        drafter = DFlashDrafterModel(copy.deepcopy(config))
        initialization.initialize_from_target(drafter, target_model)
        return drafter

    return new


def _describe_start(init: str | None, drafter: DFlashDrafterModel) -> str:
    from ..evaluation.result_files import shown_name

    if init is not None:
        return f"the drafter {shown_name(init)}"
    sizes = f"{drafter.config.num_hidden_layers} layers, block {drafter.config.block_size}"
    return f"its target's last layers ({sizes}, {drafter.num_parameters() / 1e6:.1f}M parameters)"


def _settings(
    given: dict[str, Any],
    fixed: dict[str, Any],
    is_new: bool,
    target_model: PreTrainedModel,
    drafter: DFlashDrafterModel,
    dataset: TrajectoryDataset,
) -> AblationSettings:
    """What is not given is as `adaflash train` would have it."""
    import torch

    from ..embedded_target import default_dtype
    from ..evaluation.ablations import AblationSettings
    from ..training.recipes import Situation, decide

    situation = Situation(
        start="scratch" if is_new else "init",
        on_cpu=target_model.device.type == "cpu",
        has_stored_teacher=dataset.teacher_top_k > 0,
        block_size=drafter.config.block_size,
        hidden_size=drafter.config.hidden_size,
        has_draft_vocabulary=drafter.draft_token_ids is not None,
    )
    values = {decision.name: decision.value for decision in decide(situation, {"optimizer": "adamw", **given})}
    return AblationSettings(
        **fixed,
        batch_size=values["batch_size"],
        anchors=values["anchors"],
        learning_rate=values["learning_rate"],
        warmup_steps=values["warmup_steps"],
        decay_fraction=values["decay_fraction"],
        position_decay=values["position_decay"],
        vocabulary_size=values["vocabulary_size"] or None,
        bf16=default_dtype(target_model.device.type) == torch.bfloat16,
    )


def _run_all(
    comparisons: Any,
    seeds: list[int],
    new_drafter: Callable[[int], DFlashDrafterModel],
    trained: DFlashDrafterModel | None,
    target_model: PreTrainedModel,
    data: AblationData,
    common: AblationSettings,
    out: Path,
    kept: Path,
    console: Any,
) -> None:
    """Run what is missing; the results file is there after the first run and grows with each."""
    import time

    from ..embedded_target import without_progress_bars
    from ..evaluation.ablation_tables import ablation_results, ablation_sections
    from ..evaluation.ablations import FinishedRun, planned_runs, run_ablations
    from ..evaluation.bench import describe_environment
    from ..evaluation.result_files import write_results

    runs = planned_runs(comparisons, seeds)
    finished: list[FinishedRun] = []
    began, new = time.perf_counter(), 0

    def show(run: FinishedRun, was_done: bool) -> None:
        nonlocal new
        finished.append(run)
        new += not was_done
        sections = ablation_sections(comparisons, finished, common, seeds)
        results = ablation_results(comparisons, finished, common, seeds)
        results["environment"] = describe_environment(target_model)
        write_results(out / RESULTS, results, "Ablations", sections)
        left = len(runs) - len(finished)
        rest = f", about {(time.perf_counter() - began) / new * left / 60:.0f} min left" if new and left else ""
        state = "kept" if was_done else f"{run.train_s:.0f} s"
        tau = run.metrics.get("acceptance_length", float("nan"))
        console.print(
            f"{len(finished)} of {len(runs)}: {run.key}, seed {run.seed}: tau {tau:.3f} ({state}{rest})",
            highlight=False,
            soft_wrap=True,
        )

    with without_progress_bars(), telling_what_is_kept(lambda: _describe_kept(len(finished), len(runs), kept)):
        run_ablations(runs, new_drafter, trained, target_model, data, common, kept, show)
    _show(console, ablation_sections(comparisons, finished, common, seeds))
    _name_files(console, out)
