"""One run of `adaflash train`: from options to a drafter with its card."""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InvalidInputError


if TYPE_CHECKING:
    from peft import PeftModel
    from rich.console import Console
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

    from ..modeling_dflash_drafter import DFlashDrafterModel
    from ..training.drafter_trainer import DrafterTrainer
    from ..training.presets import DrafterPreset
    from ..training.recipes import Decision
    from ..training.training_arguments import DrafterTrainingArguments
    from ..training.trajectory_dataset import TrajectoryDataset
    from .train_lora import LoraOptions


__all__ = ["TrainingRun"]

TENSORBOARD = "tensorboard"
_CONFIDENCE_HEAD = "confidence-head"
# Of the drafter, in the record of a run.
_RECORDED_FIELDS = ("num_hidden_layers", "block_size", "is_causal")
_WRITTEN_MODEL_TYPES = ("dflash_drafter", "adaflash_confidence_head")
_EVALUATIONS = 20
_KEPT_CHECKPOINTS = 2
_MINIMUM_STEPS_BETWEEN_EVALUATIONS = 25


@dataclass
class TrainingRun:
    """
    What the options came to; `execute` goes through the run step by step.

    Attributes:
        lora: An adapter to train in place of all weights.
        shape: Given fields of a new drafter, by option name.
        causal_blocks: Whether rows of a block see only those before them, if that was given.
        given: Given settings that have defaults in `recipes.py`.
        droppable: Those of them that a configuration file gave, which may turn out to have no effect.
        options: All options by name, for the configuration written beside the drafter.
    """

    start: Any
    target: str
    dtype: str
    device: str | None
    trajectories: list[Path]
    out: Path
    init: str | None
    preset: DrafterPreset | None
    only: str | None
    lora: LoraOptions | None
    shape: dict[str, Any]
    causal_blocks: bool | None
    length_head: str | None
    given: dict[str, Any]
    droppable: list[str]
    teacher: str
    features: str
    steps: int | None
    held_out: int
    max_tokens: int
    seed: int
    resume: bool
    report_to: list[str]
    push_to_hub: str | None
    private: bool
    license: str | None
    options: dict[str, Any]
    console: Console = field(init=False)
    decisions: list[Decision] = field(init=False, default_factory=list)

    def execute(self) -> None:
        from rich.console import Console
        from transformers import set_seed

        from ..embedded_target import load_target

        # With several processes, started by torchrun or accelerate, one of them speaks and writes.
        self.is_main = os.environ.get("RANK", "0") == "0"
        self.console = Console(quiet=not self.is_main, markup=False)  # names and places may have brackets
        self._check_before_work()
        target_model, tokenizer = load_target(self.target, self.dtype, device=self.device, on_progress=self._say)
        set_seed(self.seed)  # a new drafter's weights must be the same after a restart
        drafter = self._drafter(target_model, tokenizer)
        dataset = self._dataset(target_model, drafter)
        trainer = self._trainer(target_model, drafter, dataset)
        if self.is_main:
            self._check_room(trainer)
        self._record(trainer, drafter)
        self._train(trainer)
        if self.is_main and self.only != _CONFIDENCE_HEAD:
            self._publish()

    def _check_room(self, trainer: DrafterTrainer) -> None:
        """For the checkpoints that are kept, the one that is written before the oldest goes, and the drafter."""
        from ..output_places import check_room
        from ..training.estimates import checkpoint_bytes
        from ..training.run_records import CHECKPOINTS

        args = trainer.args
        weights = sum(parameter.numel() for parameter in trainer.model.parameters())
        saves = math.ceil(args.max_steps / args.save_steps) if args.max_steps > 0 else _KEPT_CHECKPOINTS + 1
        files = [file for file in (self.out / CHECKPOINTS).rglob("*") if file.is_file()]
        needed = min(saves, _KEPT_CHECKPOINTS + 1) * checkpoint_bytes(trainer) + 2 * weights
        check_room(self.out, needed - sum(file.stat().st_size for file in files))

    def _say(self, text: str) -> None:
        self.console.print(f"{text} ...", highlight=False)

    def _check_before_work(self) -> None:
        """What can fail for reasons outside of training, before the hours that it takes."""
        from ..hub_upload import reserve_repository
        from ..output_places import check_writable
        from ..training.run_records import check_reporting

        check_reporting(self.report_to)
        if self.is_main:
            check_writable(self.out)
            self._check_holds_no_other_model()
            for path in self.trajectories if self.features == "cache" else ():
                check_writable(path, "trajectories")
        several = int(os.environ.get("WORLD_SIZE", "1")) > 1
        if several and self.features == "cache":
            raise InvalidInputError(
                "`--features` is 'cache', but several processes would write the same files; run with one process "
                "first (--steps 1), then with all of them and --features stored."
            )
        if several and self.device is None:
            import torch

            self.device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
        if self.push_to_hub is not None and self.only == _CONFIDENCE_HEAD:
            raise InvalidInputError(
                f"`--push-to-hub` is {self.push_to_hub!r}, but a confidence head alone is not a drafter; leave it out."
            )
        if self.push_to_hub is not None and self.is_main:
            reserve_repository(self.push_to_hub, private=self.private)

    def _check_holds_no_other_model(self) -> None:
        """The drafter's files would take the place of that model's: of the target's, where the two are mixed up."""
        from ..checkpoint_files import stored_model_type

        try:
            model_type = stored_model_type(self.out)
        except (OSError, ValueError):
            return
        if model_type not in _WRITTEN_MODEL_TYPES:
            raise InvalidInputError(
                f"`--out` is {str(self.out)!r}, which holds a model of type {model_type!r} that would be overwritten; "
                "pass another directory for the drafter."
            )

    def _drafter(
        self, target_model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
    ) -> DFlashDrafterModel | PeftModel:
        import torch

        from ..hub_connection import loading_checkpoint
        from ..modeling_dflash_drafter import DFlashDrafterModel
        from ..training.initialization import attach_length_head

        if self.init is None:
            return self._new_drafter(target_model, tokenizer)
        if self.shape:
            raise InvalidInputError(
                f"`--init` is {self.init!r}, whose sizes are settled, but `{next(iter(self.shape))}` was given; leave "
                "it out, or train --from-scratch."
            )
        changed = {} if self.causal_blocks is None else {"is_causal": self.causal_blocks}
        # Weights are trained in float32, whatever they were saved in.
        with loading_checkpoint(self.init, "--init"):
            drafter = DFlashDrafterModel.from_pretrained(self.init, dtype=torch.float32, **changed)
        trains_length_head = self.only not in ("drafter", _CONFIDENCE_HEAD)
        if drafter.length_head is None and self.length_head is not None and trains_length_head:
            if self.lora is not None:
                self.lora.refuse_new_length_head(self.init)
            attach_length_head(drafter, self.length_head)
        if self.lora is not None:
            self.decisions = self.lora.decisions()
            return self.lora.put_on(drafter, self.init)
        return drafter

    def _new_drafter(self, target_model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> DFlashDrafterModel:
        from ..modeling_dflash_drafter import DFlashDrafterModel
        from ..training import initialization
        from ..training.recipes import CONFIG_FIELDS, ShapeDefaults, decide_shape

        defaults = ShapeDefaults(
            on_cpu=target_model.device.type == "cpu",
            num_target_layers=target_model.config.get_text_config().num_hidden_layers,
            target_layer_ids=initialization.default_target_layer_ids(target_model),
            choose_mask_token_id=lambda: initialization.choose_mask_token_id(target_model, tokenizer),
        )
        self.decisions = decide_shape(defaults, self.shape, self.preset)
        decided = {CONFIG_FIELDS.get(name, name): value for name, value, _ in self.decisions}
        fields = {**(self.preset.fields if self.preset is not None else {}), **decided}
        if self.causal_blocks is not None:
            fields["is_causal"] = self.causal_blocks
        config = initialization.drafter_config_for_target(target_model, length_head=self.length_head, **fields)
        drafter = DFlashDrafterModel(config)
        copied = initialization.initialize_from_target(drafter, target_model)
        total = len(list(drafter.parameters()))
        self.console.print(
            f"New drafter: {drafter.num_parameters() / 1e6:.1f}M parameters; {len(copied)} of {total} tensors start "
            "as copies of the target's.",
            highlight=False,
        )
        return drafter

    def _dataset(self, target_model: PreTrainedModel, drafter: DFlashDrafterModel | PeftModel) -> TrajectoryDataset:
        from ..training.trajectory_dataset import open_trajectories

        layer_ids = drafter.config.target_layer_ids
        with self.console.status("Reading trajectories") as status:

            def show(done: int, total: int) -> None:
                status.update(f"Computing target features: shard {done} of {total}")

            dataset, self.features = open_trajectories(
                target_model, self.trajectories, layer_ids, self.features, max_tokens=self.max_tokens, on_shard=show
            )
        self._warn_of_other_targets(target_model.name_or_path)
        self.console.print(
            f"{len(dataset)} trajectories, {dataset.num_response_tokens} response tokens, domains "
            f"{', '.join(dataset.domains)}; target features: {self.features}.",
            highlight=False,
        )
        return dataset

    def _warn_of_other_targets(self, target: str) -> None:
        """Only told: the same target may be a directory here and a name on the Hub there."""
        from ..training.trajectories import read_settings

        for directory in self.trajectories:
            maker = read_settings(directory).get("target")
            if maker and maker != target:
                self.console.print(
                    f"Warning: {directory} holds responses of {maker!r}, and the target is {target!r}. If these "
                    "are not the same model, little of what the drafter learns will be accepted.",
                    highlight=False,
                )

    def _trainer(
        self, target_model: PreTrainedModel, drafter: DFlashDrafterModel | PeftModel, dataset: TrajectoryDataset
    ) -> DrafterTrainer:
        from torch.utils.data import Subset
        from transformers import PrinterCallback

        from ..training.drafter_trainer import DrafterTrainer
        from ..training.initialization import new_confidence_head
        from ..training.recipes import Decision
        from ..training.trajectory_dataset import split_by_prompt
        from .train_display import decisions_table

        train_rows, held_out_rows = split_by_prompt(dataset, self.held_out)
        settings = self._settings(target_model, drafter, dataset)
        self.decisions += settings
        trainer = DrafterTrainer(
            drafter,
            target_model,
            self._arguments(settings, len(train_rows), target_model.device.type, bool(held_out_rows)),
            Subset(dataset, train_rows),
            Subset(dataset, held_out_rows) if held_out_rows else None,
            callbacks=self._callbacks(),
            confidence_head=new_confidence_head(drafter) if self.only == _CONFIDENCE_HEAD else None,
        )
        trainer.remove_callback(PrinterCallback)
        # Not among the recorded decisions: another machine may attend otherwise and still resume the run.
        attention = Decision("attention", trainer.attention.implementation, trainer.attention.reason)
        self.console.print(decisions_table([*self.decisions, attention]))
        return trainer

    def _settings(
        self, target_model: PreTrainedModel, drafter: DFlashDrafterModel | PeftModel, dataset: TrajectoryDataset
    ) -> list[Decision]:
        from ..training.recipes import GIVEN, Decision, Situation, decide

        situation = Situation(
            start=self.start,
            on_cpu=target_model.device.type == "cpu",
            has_stored_teacher=dataset.teacher_top_k > 0,
            block_size=drafter.config.block_size,
            hidden_size=drafter.config.hidden_size,
            has_draft_vocabulary=drafter.draft_token_ids is not None,
        )
        settings = decide(situation, self.given, self.droppable)
        ignored = sorted(self.given.keys() - {setting.name for setting in settings})
        if ignored:
            self.console.print(f"Without effect here, from the configuration file: {', '.join(ignored)}.")
        if self.steps is not None:
            settings = [row if row.name != "epochs" else Decision("steps", self.steps, GIVEN) for row in settings]
        return settings

    def _callbacks(self) -> list[TrainerCallback]:
        from ..training.run_records import LOG_FILE, JsonLinesCallback, tensorboard_callback
        from .train_display import ConsoleCallback

        callbacks: list[TrainerCallback] = [ConsoleCallback(self.console)]
        if self.is_main:
            callbacks.append(JsonLinesCallback(self.out / LOG_FILE))
        if self.is_main and "tensorboard" in self.report_to:
            callbacks.append(tensorboard_callback(self.out / TENSORBOARD))
        return callbacks

    def _arguments(
        self, settings: list[Decision], rows: int, device_type: str, evaluates: bool
    ) -> DrafterTrainingArguments:
        import torch

        from ..embedded_target import default_dtype
        from ..training.recipes import schedule_arguments
        from ..training.run_records import CHECKPOINTS
        from ..training.training_arguments import DrafterTrainingArguments

        values = {setting.name: setting.value for setting in settings}
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
        per_step = values["batch_size"] * values["gradient_accumulation"] * int(os.environ.get("WORLD_SIZE", "1"))
        steps = self.steps or max(round(-(-rows // per_step) * values["epochs"]), 1)
        fields["max_steps"] = fields.pop("steps", -1)
        fields |= schedule_arguments(steps, values["warmup_steps"], decay_fraction)
        every = max(steps // _EVALUATIONS, _MINIMUM_STEPS_BETWEEN_EVALUATIONS)
        return DrafterTrainingArguments(
            output_dir=str(self.out / CHECKPOINTS),
            train_only=None if self.only is None else self.only.replace("-", "_"),
            teacher=self.teacher,
            per_device_eval_batch_size=values["batch_size"],
            eval_strategy="steps" if evaluates else "no",
            # What a drafter that goes on gained is only seen from where it began.
            eval_on_start=evaluates and self.init is not None and not (self.out / CHECKPOINTS).exists(),
            eval_steps=every,
            save_steps=every,
            save_total_limit=_KEPT_CHECKPOINTS,
            # Where the hardware does not multiply bfloat16, emulating it is slower than float32.
            bf16=default_dtype(device_type) == torch.bfloat16,
            use_cpu=device_type == "cpu",
            seed=self.seed,
            report_to=[name for name in self.report_to if name != "tensorboard"],
            disable_tqdm=True,
            **fields,
        )

    def _record(self, trainer: DrafterTrainer, drafter: DFlashDrafterModel | PeftModel) -> None:
        """Write how the run is done, or check that the run to resume was done so."""
        from ..training.drafter_trainer import last_complete_checkpoint
        from ..training.run_records import CHECKPOINTS, RUN_FILE, data_record, machine_record, write_run_record
        from ..training.run_stages import EARLIER

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
            "drafter": {name: getattr(drafter.config, name) for name in _RECORDED_FIELDS},
            **{decision.name: decision.value for decision in self.decisions},
        }
        settings = json.loads(json.dumps(settings))
        path = self.out / RUN_FILE
        earlier: dict[str, Any] | None = None
        if self.resume and path.exists() and last_complete_checkpoint(self.out / CHECKPOINTS) is not None:
            record = json.loads(path.read_text(encoding="utf-8"))
            stored, earlier = record["settings"], {name: record[name] for name in EARLIER if name in record}
            different = [name for name in settings if stored.get(name) != settings[name]]
            if different:
                listed = ", ".join(f"{name}: {stored.get(name)!r} there, {settings[name]!r} now" for name in different)
                raise InvalidInputError(
                    f"`--out` is {str(self.out)!r}, which holds a run with other settings ({listed}). Repeat its "
                    "options to go on with it, give --no-resume to start anew, or another directory."
                )
        if self.is_main:
            more = {
                "reasons": {decision.name: decision.reason for decision in self.decisions},
                "data": data_record(trainer.train_dataset, trainer.eval_dataset, self.trajectories),
                "machine": machine_record(trainer.args.device, trainer.args.world_size),
                **(self._earlier_stages() if earlier is None else earlier),
            }
            write_run_record(path, sys.argv, settings, more)
            self._write_config()

    def _earlier_stages(self) -> dict[str, Any]:
        from ..training.run_stages import earlier_stages

        if self.init is None:
            return {}
        earlier = earlier_stages(self.init, self.out)
        if not earlier["previous"]:
            self.console.print(
                f"{self.init} has no run.json of its training, so the records of this drafter begin with this run.",
                highlight=False,
            )
        return earlier

    def _write_config(self) -> None:
        """The options with which `--config` repeats this run; those with a default that depends have their value."""
        from ..training.run_records import CONFIG_FILE
        from .config_files import write_config_file

        names = {"length_head_learning_rate": "learning_rate"}
        decided = {names.get(d.name, d.name): d for d in self.decisions}
        values = {**self.options, **{name: decision.value for name, decision in decided.items()}}
        if isinstance(values.get("target_layer_ids"), list):
            values["target_layer_ids"] = ",".join(map(str, values["target_layer_ids"]))
        reasons = {name: decision.reason for name, decision in decided.items()}
        write_config_file(self.out / CONFIG_FILE, values, reasons)

    def _train(self, trainer: DrafterTrainer) -> None:
        from ..embedded_target import without_progress_bars
        from ..training.drafter_trainer import last_complete_checkpoint
        from ..training.estimates import estimate_training
        from ..training.run_records import CHECKPOINTS, write_outcome
        from .train_display import describe_estimate, results_table

        self.console.print(describe_estimate(estimate_training(trainer)), highlight=False)
        checkpoint = last_complete_checkpoint(self.out / CHECKPOINTS) if self.resume else None
        if checkpoint is not None:
            self.console.print(f"Resuming from {checkpoint.name}.", highlight=False)
        with without_progress_bars():
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        metrics: dict[str, float] = {}
        if trainer.eval_dataset is not None:
            # Trained to the end, the last evaluation was just now; resumed at the end, there was none.
            entries = [entry for entry in trainer.state.log_history if "eval_acceptance_length" in entry]
            is_fresh = bool(entries) and entries[-1]["step"] == trainer.state.global_step
            metrics = entries[-1] if is_fresh else trainer.evaluate()
            self.console.print(results_table(metrics))
        if self.is_main:
            write_outcome(self.out, metrics)
        self._save(trainer)

    def _save(self, trainer: DrafterTrainer) -> None:
        import torch

        from ..embedded_target import without_progress_bars
        from ..output_places import writing_to
        from ..training.saving import ADAPTER_DIRECTORY

        # What drafters are published in; decoding in bfloat16 rounds the weights the same way.
        kept = "what was trained is in the last checkpoint: repeat the command to have it written"
        with without_progress_bars(), writing_to(self.out, kept=kept):
            trainer.save_drafter(self.out, torch.bfloat16)
        what = "drafter" if self.only != _CONFIDENCE_HEAD else "confidence head"
        adapter = f", its adapter in {self.out / ADAPTER_DIRECTORY}" if self.lora is not None else ""
        self.console.print(f"The {what} is in {self.out}{adapter}.", highlight=False)

    def _publish(self) -> None:
        from ..hub_upload import upload_drafter
        from ..model_card import CardOptions, write_drafter_card

        write_drafter_card(self.out, CardOptions(repo_id=self.push_to_hub, license=self.license))
        if self.push_to_hub is not None:
            url = upload_drafter(self.out, self.push_to_hub)
            self.console.print(f"Pushed to {url}", highlight=False)
