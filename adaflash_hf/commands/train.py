"""`adaflash train`: a drafter, its length head, or both, on stored trajectories."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InvalidInputError
from . import train_options as options
from .options import DeviceOption, Dtype, DtypeOption, TargetOption
from .trajectories import parse_layer_ids


if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..modeling_dflash_drafter import DFlashDrafterModel
    from ..training.drafter_trainer import DrafterTrainer
    from ..training.recipes import Decision
    from ..training.training_arguments import DrafterTrainingArguments
    from ..training.trajectory_dataset import TrajectoryDataset


__all__ = ["train"]

RUN_FILE = "run.json"
LOG_FILE = "training_log.jsonl"
METRICS_FILE = "metrics.json"
CHECKPOINTS = "checkpoints"
_EVALUATIONS = 20
_MINIMUM_STEPS_BETWEEN_EVALUATIONS = 25
_FINAL_LEARNING_RATE = 0.02


def train(
    trajectories: options.TrajectoriesOption,
    out: options.OutOption,
    target: TargetOption = "smollm2-135m",
    init: options.InitOption = None,
    from_scratch: options.FromScratchOption = False,
    only: options.OnlyOption = None,
    layers: options.LayersOption = None,
    block_size: options.BlockSizeOption = None,
    target_layer_ids: options.LayerIdsOption = None,
    mask_token_id: options.MaskTokenOption = None,
    length_head: options.LengthHeadOption = options.LengthHead.MEAN_LINEAR,
    objective: options.ObjectiveOption = None,
    hard_label_weight: options.HardLabelWeightOption = None,
    divergence: options.DivergenceOption = None,
    clip: options.ClipOption = None,
    clip_threshold: options.ClipThresholdOption = None,
    position_decay: options.PositionDecayOption = None,
    teacher: options.TeacherOption = options.Teacher.AUTO,
    vocabulary_size: options.VocabularySizeOption = None,
    anchors: options.AnchorsOption = None,
    batch_size: options.BatchSizeOption = None,
    gradient_accumulation: options.AccumulationOption = None,
    epochs: options.EpochsOption = None,
    steps: options.StepsOption = None,
    optimizer: options.OptimizerOption = None,
    learning_rate: options.LearningRateOption = None,
    vector_learning_rate: options.VectorLearningRateOption = None,
    warmup_steps: options.WarmupOption = None,
    decay_fraction: options.DecayFractionOption = None,
    held_out: options.HeldOutOption = 64,
    max_tokens: options.MaxTokensOption = 2048,
    features: options.FeaturesOption = options.Features.AUTO,
    seed: options.SeedOption = 0,
    resume: options.ResumeOption = True,
    report_to: options.ReportToOption = None,
    dtype: DtypeOption = Dtype.AUTO,
    device: DeviceOption = None,
) -> None:
    """Train a drafter on what its target said, from scratch or from an existing one, or only its length head."""
    start = _start(init, from_scratch, only)
    given = {
        "objective": objective,
        "hard_label_weight": hard_label_weight,
        "divergence": divergence,
        "clip": clip,
        "clip_threshold": clip_threshold,
        "position_decay": position_decay,
        "vocabulary_size": vocabulary_size,
        "optimizer": optimizer,
        "length_head_learning_rate" if start == "length_head" else "learning_rate": learning_rate,
        "vector_learning_rate": vector_learning_rate,
        "batch_size": batch_size,
        "gradient_accumulation": gradient_accumulation,
        "anchors": anchors,
        "epochs": epochs,
        "warmup_steps": warmup_steps,
        "decay_fraction": decay_fraction,
    }
    new_drafter = {
        "num_hidden_layers": layers,
        "block_size": block_size,
        "target_layer_ids": parse_layer_ids(target_layer_ids),
        "mask_token_id": mask_token_id,
    }
    _Run(
        start=start,
        target=target,
        dtype=dtype.value,
        device=device,
        trajectories=trajectories,
        out=out,
        init=init,
        only=only,
        new_drafter={name: value for name, value in new_drafter.items() if value is not None},
        length_head=None if length_head is options.LengthHead.NONE else length_head.value,
        given={name: getattr(value, "value", value) for name, value in given.items()},
        teacher=teacher.value,
        features=features.value,
        steps=steps,
        held_out=held_out,
        max_tokens=max_tokens,
        seed=seed,
        resume=resume,
        report_to=report_to or [],
    ).execute()


def _start(init: str | None, from_scratch: bool, only: options.Only | None) -> Any:
    if init is not None and from_scratch:
        raise InvalidInputError(f"`--init` is {init!r} and `--from-scratch` was given; choose one of them.")
    if only is options.Only.LENGTH_HEAD:
        if init is None:
            raise InvalidInputError("`--only` is 'length-head', which needs a trained drafter; pass it with --init.")
        return "length_head"
    return "scratch" if init is None else "init"


@dataclass
class _Run:
    """One run of the command, step by step in `execute`."""

    start: Any
    target: str
    dtype: str
    device: str | None
    trajectories: list[Path]
    out: Path
    init: str | None
    only: options.Only | None
    new_drafter: dict[str, Any]
    length_head: str | None
    given: dict[str, Any]
    teacher: str
    features: str
    steps: int | None
    held_out: int
    max_tokens: int
    seed: int
    resume: bool
    report_to: list[str]
    console: Console = field(init=False)

    def execute(self) -> None:
        from rich.console import Console
        from transformers import set_seed

        from ..embedded_target import load_target

        self.console = Console()
        target_model, tokenizer = load_target(self.target, self.dtype, device=self.device, on_progress=self._say)
        set_seed(self.seed)  # a new drafter's weights must be the same after a restart
        drafter = self._drafter(target_model, tokenizer)
        dataset = self._dataset(target_model, drafter)
        trainer, decisions = self._trainer(target_model, drafter, dataset)
        self._record(trainer, drafter, decisions)
        self._train(trainer)

    def _say(self, text: str) -> None:
        self.console.print(f"{text} ...", highlight=False, markup=False)

    def _drafter(self, target_model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> DFlashDrafterModel:
        import torch

        from ..modeling_dflash_drafter import DFlashDrafterModel
        from ..training import initialization

        if self.init is not None:
            if self.new_drafter:
                raise InvalidInputError(
                    f"`--init` is {self.init!r}, whose sizes are settled, but `{next(iter(self.new_drafter))}` was "
                    "given; leave it out, or train --from-scratch."
                )
            # Weights are trained in float32, whatever they were saved in.
            drafter = DFlashDrafterModel.from_pretrained(self.init, dtype=torch.float32)
            if drafter.length_head is None and self.length_head is not None and self.only is not options.Only.DRAFTER:
                initialization.attach_length_head(drafter, self.length_head)
            return drafter
        fields = dict(self.new_drafter)
        if "mask_token_id" not in fields:
            fields["mask_token_id"] = initialization.choose_mask_token_id(target_model, tokenizer)
        if "block_size" not in fields:
            # A small drafter on a CPU does not learn to fill longer blocks in the time there is.
            fields["block_size"] = 8 if target_model.device.type == "cpu" else 16
        config = initialization.drafter_config_for_target(target_model, length_head=self.length_head, **fields)
        drafter = DFlashDrafterModel(config)
        copied = initialization.initialize_from_target(drafter, target_model)
        total = len(list(drafter.parameters()))
        self.console.print(
            f"New drafter: {drafter.num_parameters() / 1e6:.1f}M parameters, {config.num_hidden_layers} layers, block "
            f"{config.block_size}, mask token {config.mask_token_id}, reads layers {config.target_layer_ids}; "
            f"{len(copied)} of {total} tensors from the target.",
            highlight=False,
        )
        return drafter

    def _dataset(self, target_model: PreTrainedModel, drafter: DFlashDrafterModel) -> TrajectoryDataset:
        from ..training.features import features_path
        from ..training.trajectories import find_trajectory_shards
        from ..training.trajectory_dataset import TrajectoryDataset, cache_target_features

        layer_ids = drafter.config.target_layer_ids
        if self.features == "cache":
            with self.console.status("Computing target features") as status:

                def show(done: int, total: int) -> None:
                    status.update(f"Computing target features: shard {done} of {total}")

                cache_target_features(target_model, self.trajectories, layer_ids, on_shard=show)
        if self.features == "auto":
            shards = [path for directory in self.trajectories for path in find_trajectory_shards(directory)]
            self.features = "stored" if all(features_path(path).exists() for path in shards) else "compute"
        dataset = TrajectoryDataset(
            self.trajectories,
            feature_layer_ids=None if self.features == "compute" else layer_ids,
            max_tokens=self.max_tokens,
        )
        self.console.print(
            f"{len(dataset)} trajectories, {dataset.num_response_tokens} response tokens, domains "
            f"{', '.join(dataset.domains)}; target features: {self.features}.",
            highlight=False,
        )
        return dataset

    def _trainer(
        self, target_model: PreTrainedModel, drafter: DFlashDrafterModel, dataset: TrajectoryDataset
    ) -> tuple[DrafterTrainer, list[Decision]]:
        from torch.utils.data import Subset
        from transformers import PrinterCallback

        from ..training.drafter_trainer import DrafterTrainer
        from ..training.recipes import GIVEN, Decision, Situation, decide
        from ..training.run_records import JsonLinesCallback
        from ..training.trajectory_dataset import split_by_prompt
        from .train_display import ConsoleCallback, decisions_table

        train_rows, held_out_rows = split_by_prompt(dataset, self.held_out)
        situation = Situation(
            start=self.start,
            on_cpu=target_model.device.type == "cpu",
            has_stored_teacher=dataset.teacher_top_k > 0,
            block_size=drafter.config.block_size,
        )
        decisions = decide(situation, self.given)
        if self.steps is not None:
            decisions = [row if row.name != "epochs" else Decision("steps", self.steps, GIVEN) for row in decisions]
        self.console.print(decisions_table(decisions))
        args = self._arguments(decisions, len(train_rows), target_model.device.type, bool(held_out_rows))
        trainer = DrafterTrainer(
            drafter,
            target_model,
            args,
            Subset(dataset, train_rows),
            Subset(dataset, held_out_rows) if held_out_rows else None,
            callbacks=[JsonLinesCallback(self.out / LOG_FILE), ConsoleCallback(self.console)],
        )
        trainer.remove_callback(PrinterCallback)
        return trainer, decisions

    def _arguments(
        self, decisions: list[Decision], rows: int, device_type: str, evaluates: bool
    ) -> DrafterTrainingArguments:
        import torch

        from ..embedded_target import default_dtype
        from ..training.training_arguments import DrafterTrainingArguments

        values = {decision.name: decision.value for decision in decisions}
        renamed = {
            "batch_size": "per_device_train_batch_size",
            "gradient_accumulation": "gradient_accumulation_steps",
            "anchors": "anchors_per_trajectory",
            "epochs": "num_train_epochs",
        }
        fields = {renamed.get(name, name): value for name, value in values.items()}
        decay_fraction = fields.pop("decay_fraction")
        fields["use_muon"] = fields.pop("optimizer", "adamw") == "muon"
        fields["vocabulary_size"] = fields.get("vocabulary_size") or None  # 0 stands for all tokens
        per_step = values["batch_size"] * values["gradient_accumulation"]
        steps = self.steps or max(round(-(-rows // per_step) * values["epochs"]), 1)
        fields["max_steps"] = fields.pop("steps", -1)
        fields["warmup_steps"] = min(values["warmup_steps"], steps // 2)
        every = max(steps // _EVALUATIONS, _MINIMUM_STEPS_BETWEEN_EVALUATIONS)
        return DrafterTrainingArguments(
            output_dir=str(self.out / CHECKPOINTS),
            train_only=None if self.only is None else self.only.value.replace("-", "_"),
            teacher=self.teacher,
            lr_scheduler_type="warmup_stable_decay",
            lr_scheduler_kwargs={
                "num_decay_steps": min(int(steps * decay_fraction), steps - fields["warmup_steps"]),
                "decay_type": "linear",
                "min_lr_ratio": _FINAL_LEARNING_RATE,
            },
            per_device_eval_batch_size=values["batch_size"],
            eval_strategy="steps" if evaluates else "no",
            eval_steps=every,
            save_steps=every,
            save_total_limit=2,
            # Where the hardware does not multiply bfloat16, emulating it is slower than float32.
            bf16=default_dtype(device_type) == torch.bfloat16,
            use_cpu=device_type == "cpu",
            seed=self.seed,
            report_to=self.report_to,
            disable_tqdm=True,
            **fields,
        )

    def _record(self, trainer: DrafterTrainer, drafter: DFlashDrafterModel, decisions: list[Decision]) -> None:
        """Write how the run is done, or check that the run to resume was done so."""
        from ..training.drafter_trainer import last_complete_checkpoint
        from ..training.run_records import write_run_record

        settings = {
            "target": self.target,
            "init": self.init,
            "only": self.only,
            "trajectories": [str(path) for path in self.trajectories],
            "train_trajectories": len(trainer.train_dataset),
            "held_out": self.held_out,
            "max_tokens": self.max_tokens,
            "teacher": self.teacher,
            "seed": self.seed,
            "drafter": {name: getattr(drafter.config, name) for name in ("num_hidden_layers", "block_size")},
            **{decision.name: decision.value for decision in decisions},
        }
        settings = json.loads(json.dumps(settings))
        path = self.out / RUN_FILE
        if self.resume and path.exists() and last_complete_checkpoint(self.out / CHECKPOINTS) is not None:
            stored = json.loads(path.read_text(encoding="utf-8"))["settings"]
            different = [name for name in settings if stored.get(name) != settings[name]]
            if different:
                listed = ", ".join(f"{name}: {stored.get(name)!r} there, {settings[name]!r} now" for name in different)
                raise InvalidInputError(
                    f"`--out` is {str(self.out)!r}, which holds an unfinished run with other settings ({listed}). "
                    "Repeat its options to resume it, give --no-resume to start anew, or another directory."
                )
        write_run_record(path, sys.argv, settings)

    def _train(self, trainer: DrafterTrainer) -> None:
        import torch

        from ..embedded_target import without_progress_bars
        from ..training.drafter_trainer import last_complete_checkpoint
        from ..training.estimates import estimate_training
        from .train_display import describe_estimate, results_table

        self.console.print(describe_estimate(estimate_training(trainer)), highlight=False)
        checkpoint = last_complete_checkpoint(self.out / CHECKPOINTS) if self.resume else None
        if checkpoint is not None:
            self.console.print(f"Resuming from {checkpoint.name}.", highlight=False)
        with without_progress_bars():
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        if trainer.eval_dataset is not None:
            # Trained to the end, the last evaluation was just now; resumed at the end, there was none.
            entries = [entry for entry in trainer.state.log_history if "eval_acceptance_length" in entry]
            is_fresh = bool(entries) and entries[-1]["step"] == trainer.state.global_step
            metrics = entries[-1] if is_fresh else trainer.evaluate()
            (self.out / METRICS_FILE).write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")
            self.console.print(results_table(metrics))
        drafter = trainer.accelerator.unwrap_model(trainer.model)
        # What drafters are published in; decoding in bfloat16 rounds the weights the same way.
        with without_progress_bars():
            drafter.to(torch.bfloat16).save_pretrained(self.out)
        self.console.print(f"The drafter is in {self.out}.", highlight=False)
