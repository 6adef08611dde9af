"""Trains variants of a drafter or a head on one budget and several seeds, and compares them on held-out prompts.

Each finished run is kept in a file of its own, so that a killed comparison goes on where it was. All runs of one seed
see the same trajectories and anchors in the same order, which is why differences are taken within a seed.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.data import Subset
from transformers import PrinterCallback, set_seed

from ..atomic_files import written_aside
from ..errors import InvalidInputError
from ..output_places import writing_to
from ..training.drafter_trainer import DrafterTrainer
from ..training.initialization import attach_length_head, new_confidence_head
from ..training.recipes import schedule_arguments
from ..training.training_arguments import DrafterTrainingArguments
from .ablation_variants import Variant
from .finished_runs import read_finished_run, refuse_difference
from .head_report import JudgedBlocks, collect_blocks, head_report


if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..modeling_dflash_drafter import DFlashDrafterModel


__all__ = [
    "HEAD",
    "AblationData",
    "AblationSettings",
    "FinishedRun",
    "planned_runs",
    "read_finished_runs",
    "run_ablations",
]

# Name of the trained head in a run's own report.
HEAD = "head"
_ELSEWHERE = "--out or --runs"
_OF_HEADS = {"trained", "trained_sha256", "head_steps", "head_learning_rate"}


@dataclass(frozen=True)
class AblationSettings:
    """
    What all runs have in common: data, start and budget.

    Attributes:
        target: Its name.
        start: What drafters start from.
        start_sha256: [`weights_sha256`] of the drafter they start from; None if that is none on the disk.
        trained: What heads are trained on; None without heads.
        trained_sha256: The same of that.
        trajectories: Directories.
        trajectories_sha256: [`TrajectoryDataset.fingerprint`] of what is in them.
        train_trajectories: How many are learned from.
        held_out_trajectories: How many are judged on.
        steps: Optimizer steps of a drafter.
        head_steps: Optimizer steps of a head.
        batch_size: Trajectories per step.
        anchors: Blocks per trajectory.
        eval_anchors: Blocks per held-out trajectory.
        learning_rate: Of a drafter, by AdamW.
        head_learning_rate: Of a head.
        warmup_steps: Of the learning rate.
        decay_fraction: Part of a run over which the rate falls.
        position_decay: See `DrafterTrainingArguments`; variants may differ.
        vocabulary_size: See `DrafterTrainingArguments`; variants may differ.
        bf16: Whether training multiplies in bfloat16.
    """

    target: str
    start: str
    start_sha256: str | None
    trained: str | None
    trained_sha256: str | None
    trajectories: list[str]
    trajectories_sha256: str
    train_trajectories: int
    held_out_trajectories: int
    steps: int
    head_steps: int
    batch_size: int
    anchors: int
    eval_anchors: int
    learning_rate: float
    head_learning_rate: float
    warmup_steps: int
    decay_fraction: float
    position_decay: float | None
    vocabulary_size: int | None
    bf16: bool


@dataclass(frozen=True)
class AblationData:
    """
    Trajectories.

    Attributes:
        train: To learn from.
        held_out: To be judged on; of other prompts.
    """

    train: Subset
    held_out: Subset

    @property
    def calibration(self) -> Subset:
        """
        As many trajectories as are held out, of those to learn from: a constant length is taken from them. From all
        over them, for those of one domain stand together.
        """
        count = min(len(self.held_out), len(self.train))
        return Subset(self.train, [index * len(self.train) // count for index in range(count)])


@dataclass(frozen=True)
class FinishedRun:
    """
    What a run gave, as it is kept.

    Attributes:
        key: Of the variant.
        seed: Of the run.
        common: What all runs have in common.
        settings: What this variant trained with.
        metrics: On held-out trajectories, after the last step.
        head: [`head_report`] of a trained head; None for a drafter.
        train_s: Seconds of training.
    """

    key: str
    seed: int
    common: dict[str, Any]
    settings: dict[str, Any]
    metrics: dict[str, float]
    head: dict[str, Any] | None
    train_s: float


def planned_runs(comparisons: Mapping[str, Mapping[str, Variant]], seeds: Sequence[int]) -> list[tuple[Variant, int]]:
    """
    Every variant once for each seed, seed by seed: a comparison that is stopped early is complete for some seeds.

    Args:
        comparisons (`Mapping[str, Mapping[str, Variant]]`):
            From `ablation_variants`.
        seeds (`Sequence[int]`):
            Seeds.
    """
    variants = {variant.key: variant for rows in comparisons.values() for variant in rows.values()}
    return [(variant, seed) for seed in seeds for variant in variants.values()]


def read_finished_runs(directory: Path, common: Mapping[str, Any]) -> dict[tuple[str, int], FinishedRun]:
    """
    All runs kept in a directory by variant and seed, also those that are not asked for: they end up in the same
    results.

    Args:
        directory (`Path`):
            Where finished runs are kept.
        common (`Mapping[str, Any]`):
            What they must have in common, as far as it is known: fields of [`AblationSettings`].

    Raises:
        InvalidInputError: one was done otherwise.
    """
    runs = {}
    expected = json.loads(json.dumps(dict(common)))
    for path in sorted(directory.glob("*-seed*.json")):
        run = read_finished_run(path, FinishedRun)
        # What only heads have in common may be settled later than the drafters' runs.
        relevant = expected.keys() - (_OF_HEADS if run.head is None else set())
        refuse_difference(path, run.common, expected, relevant, _ELSEWHERE)
        runs[run.key, run.seed] = run
    return runs


def run_ablations(
    runs: Sequence[tuple[Variant, int]],
    new_drafter: Callable[[int], DFlashDrafterModel],
    trained_drafter: DFlashDrafterModel | None,
    target_model: PreTrainedModel,
    data: AblationData,
    common: AblationSettings,
    directory: Path,
    on_run: Callable[[FinishedRun, bool], None] | None = None,
) -> list[FinishedRun]:
    """
    Do what is not done yet.

    Args:
        runs (`Sequence[tuple[Variant, int]]`):
            From [`planned_runs`].
        new_drafter (`Callable[[int], DFlashDrafterModel]`):
            Makes the drafter that a run with this seed starts from.
        trained_drafter (`DFlashDrafterModel`, *optional*):
            What heads are trained on; needed if some run trains one.
        target_model (`PreTrainedModel`):
            The target.
        data (`AblationData`):
            Trajectories.
        common (`AblationSettings`):
            What all runs have in common.
        directory (`Path`):
            Where finished runs are kept.
        on_run (`Callable[[FinishedRun, bool], None]`, *optional*):
            Called with each run and whether it was done before.

    Returns:
        `list[FinishedRun]`: one for each of `runs`
    """
    heads = [variant.key for variant, _ in runs if variant.head_of_trained]
    if heads and trained_drafter is None:
        raise InvalidInputError(f"`trained_drafter` is None, but {heads[0]!r} trains a head on one; pass it.")
    stored = read_finished_runs(directory, asdict(common))
    kept = [_stored(variant, seed, stored) for variant, seed in runs]
    blocks: list[JudgedBlocks] = []
    for index, (variant, seed) in enumerate(runs):
        run = kept[index]
        was_done = run is not None
        if run is None:
            # A head is attached to a copy, so that the next one finds the drafter as it was.
            drafter = copy.deepcopy(trained_drafter) if variant.head_of_trained else _start(variant, seed, new_drafter)
            assert drafter is not None
            if variant.head_of_trained and not blocks:
                blocks = _blocks_of_heads(drafter, target_model, data, common)
            run = _train(variant, seed, drafter, target_model, data, common, directory, blocks)
            _keep(directory, run)
            kept[index] = run
        if on_run is not None:
            on_run(run, was_done)
    return [run for run in kept if run is not None]


def _start(variant: Variant, seed: int, new_drafter: Callable[[int], DFlashDrafterModel]) -> DFlashDrafterModel:
    """The drafter that a run starts from, of the variant's own configuration and, if it says so, random weights."""
    drafter = new_drafter(seed)
    if not variant.config and not variant.is_random:
        return drafter
    config = copy.deepcopy(drafter.config)
    for name, value in variant.config.items():
        setattr(config, name, value)
    set_seed(seed)
    changed = type(drafter)(config).to(drafter.device, drafter.dtype)
    if not variant.is_random:
        changed.load_state_dict(drafter.state_dict())
    elif drafter.draft_token_ids is not None:
        changed.set_draft_vocabulary(drafter.draft_token_ids)
    return changed


def _train(
    variant: Variant,
    seed: int,
    drafter: DFlashDrafterModel,
    target_model: PreTrainedModel,
    data: AblationData,
    common: AblationSettings,
    directory: Path,
    blocks: Sequence[JudgedBlocks],
) -> FinishedRun:
    trainer = _trainer(variant, seed, drafter, target_model, data, common, directory)
    began = time.perf_counter()
    if variant.trains != "nothing":
        trainer.train()
    train_s = time.perf_counter() - began
    metrics = {name.removeprefix("eval_"): value for name, value in trainer.evaluate().items()}
    report = _report(trainer, drafter, *blocks) if variant.head_of_trained else None
    return FinishedRun(variant.key, seed, asdict(common), dict(variant.settings), metrics, report, train_s)


def _trainer(
    variant: Variant,
    seed: int,
    drafter: DFlashDrafterModel,
    target_model: PreTrainedModel,
    data: AblationData,
    common: AblationSettings,
    directory: Path,
) -> DrafterTrainer:
    set_seed(seed)  # a new head's weights
    confidence_head = None
    if variant.trains == "length_head":
        attach_length_head(drafter, variant.head_type or "mean_linear")
    elif variant.trains == "confidence_head":
        confidence_head = new_confidence_head(drafter)
    steps = common.head_steps if variant.head_of_trained else common.steps
    fields: dict[str, Any] = {
        "output_dir": str(directory),
        "train_only": "drafter" if variant.trains == "nothing" else variant.trains,
        "max_steps": steps,
        "per_device_train_batch_size": common.batch_size,
        "per_device_eval_batch_size": common.batch_size,
        "anchors_per_trajectory": common.anchors,
        "eval_anchors_per_trajectory": common.eval_anchors,
        "learning_rate": common.learning_rate,
        "length_head_learning_rate": common.head_learning_rate,
        **schedule_arguments(steps, common.warmup_steps, common.decay_fraction),
        "position_decay": common.position_decay,
        "vocabulary_size": common.vocabulary_size,
        "bf16": common.bf16,
        "use_cpu": target_model.device.type == "cpu",
        "seed": seed,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }
    args = DrafterTrainingArguments(**{**fields, **variant.settings})
    trainer = DrafterTrainer(drafter, target_model, args, data.train, data.held_out, confidence_head=confidence_head)
    trainer.remove_callback(PrinterCallback)
    return trainer


def _blocks_of_heads(
    drafter: DFlashDrafterModel, target_model: PreTrainedModel, data: AblationData, common: AblationSettings
) -> list[JudgedBlocks]:
    """Held-out blocks, and as many others for the constant; the same for all heads and seeds."""
    return [
        collect_blocks(drafter, target_model, rows, anchors_per_trajectory=common.eval_anchors)
        for rows in (data.held_out, data.calibration)
    ]


def _report(
    trainer: DrafterTrainer, drafter: DFlashDrafterModel, held_out: JudgedBlocks, others: JudgedBlocks
) -> dict[str, Any]:
    if trainer.confidence_head is not None:
        return head_report(held_out, others, {}, {HEAD: trainer.confidence_head.eval()})
    assert drafter.length_head is not None
    return head_report(held_out, others, {HEAD: drafter.length_head.eval()}, {})


def _path(directory: Path, variant_key: str, seed: int) -> Path:
    return directory / f"{variant_key}-seed{seed}.json"


def _stored(variant: Variant, seed: int, stored: Mapping[tuple[str, int], FinishedRun]) -> FinishedRun | None:
    run = stored.get((variant.key, seed))
    if run is not None:
        expected = json.loads(json.dumps(dict(variant.settings)))
        path = _path(Path(), variant.key, seed)
        refuse_difference(path, run.settings, expected, expected.keys() | run.settings.keys(), _ELSEWHERE)
    return run


def _keep(directory: Path, run: FinishedRun) -> None:
    path = _path(directory, run.key, run.seed)
    with writing_to(directory, kept="the runs before are there: repeat to go on"):
        directory.mkdir(parents=True, exist_ok=True)
        with written_aside(path) as partial:
            partial.write_text(json.dumps(asdict(run), indent=2) + "\n", encoding="utf-8")
