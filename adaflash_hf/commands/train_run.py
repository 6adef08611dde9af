"""One run of `adaflash train`, step by step: from what is asked to a drafter with its card."""

from __future__ import annotations

from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainerCallback

    from ..training.drafter_trainer import DrafterTrainer
    from ..training.recipes import Decision
    from ..training.training_arguments import DrafterTrainingArguments
    from .train_request import TrainRequest
    from .train_settings import TrainData
    from .train_start import TrainStart


__all__ = ["TrainRun"]

_TENSORBOARD = "tensorboard"


class TrainRun:
    """
    A run; `execute` goes through it.

    Args:
        request (`TrainRequest`):
            What is asked.
    """

    def __init__(self, request: TrainRequest) -> None:
        from rich.console import Console

        self._request = request
        self._console = Console(quiet=not request.is_main, markup=False)  # names and places may have brackets

    def execute(self) -> None:
        """From reading the trajectories to the finished drafter, or an error before the target is loaded."""
        from transformers import set_seed

        from ..embedded_target import load_target
        from .loading import check_fits, check_trajectories
        from .train_checks import check_places, check_room, check_without_target
        from .train_records import check_same_run, recorded_settings, write_records
        from .train_settings import choose_device, read_data, settle, training_arguments
        from .train_start import load_start, new_start

        # 1. All that can be refused without the target, which may take minutes to load.
        request = self._request
        check_places(request)
        device = choose_device(request)
        with self._console.status("Reading trajectories"):
            data = read_data(request)
        set_seed(request.seed)  # a new part's weights must be the same after a restart
        start = None if request.init is None else load_start(request, request.init)
        if start is not None:
            check_fits(start.drafter.config, request.target)
        check_trajectories(data.dataset, request.target, request.features)
        check_without_target(request, start, data, device.type)
        if request.push_to_hub is not None and request.is_main:
            self._reserve(request.push_to_hub)

        # 2. Target, drafter, and what the target sees in the trajectories.
        target_model, tokenizer = load_target(
            request.target, request.dtype, device=device, on_progress=lambda text: self._say(f"{text} ...")
        )
        set_seed(request.seed)
        if start is None:
            start = new_start(request, target_model, tokenizer, self._say)
        self._add_features(target_model, start, data)

        # 3. Settings, and what is written down of them.
        settings = settle(request, start, data, target_model.device.type)
        self._tell_ignored(settings)
        arguments = training_arguments(request, settings, data, target_model.device.type)
        trainer = self._trainer(target_model, start, data, arguments)
        decisions = [*start.decisions, *settings]
        self._show_decisions(trainer, decisions)
        if request.is_main:
            check_room(request, trainer)
        recorded = recorded_settings(request, len(data.train), start.drafter.config, decisions)
        resumed = check_same_run(request, recorded)
        if request.is_main:
            write_records(request, trainer, recorded, decisions, resumed=resumed, say=self._say)

        # 4. Training.
        self._train(trainer)
        if request.is_main and not request.trains_confidence_head:
            self._publish()

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False)

    def _reserve(self, repo_id: str) -> None:
        from ..hub_upload import reserve_repository

        reserve_repository(repo_id, private=self._request.private)

    def _add_features(self, target_model: PreTrainedModel, start: TrainStart, data: TrainData) -> None:
        from ..training.trajectory_dataset import add_target_features
        from .loading import tell_other_makers

        with self._console.status("Looking for target features") as status:

            def show(done: int, total: int) -> None:
                status.update(f"Computing target features: shard {done} of {total}")

            layer_ids = start.drafter.config.target_layer_ids
            features = add_target_features(
                data.dataset, target_model, layer_ids, self._request.features, on_shard=show
            )
        tell_other_makers(self._request.trajectories, target_model.name_or_path, self._say)
        self._say(
            f"{len(data.dataset)} trajectories, {data.dataset.num_response_tokens} response tokens, domains "
            f"{', '.join(data.dataset.domains)}; target features: {features}."
        )

    def _tell_ignored(self, settings: list[Decision]) -> None:
        ignored = sorted(self._request.given.keys() - {setting.name for setting in settings} - {"epochs"})
        if ignored:
            self._say(f"Without effect here, from the configuration file: {', '.join(ignored)}.")

    def _trainer(
        self, target_model: PreTrainedModel, start: TrainStart, data: TrainData, arguments: DrafterTrainingArguments
    ) -> DrafterTrainer:
        from transformers import PrinterCallback

        from ..training.drafter_trainer import DrafterTrainer
        from ..training.initialization import new_confidence_head

        trainer = DrafterTrainer(
            start.drafter,
            target_model,
            arguments,
            data.train,
            data.held_out,
            callbacks=self._callbacks(),
            confidence_head=new_confidence_head(start.drafter) if self._request.trains_confidence_head else None,
        )
        trainer.remove_callback(PrinterCallback)
        return trainer

    def _callbacks(self) -> list[TrainerCallback]:
        from ..training.run_records import LOG_FILE, JsonLinesCallback, tensorboard_callback
        from .train_display import ConsoleCallback

        callbacks: list[TrainerCallback] = [ConsoleCallback(self._console)]
        if self._request.is_main:
            callbacks.append(JsonLinesCallback(self._request.out / LOG_FILE))
        if self._request.is_main and "tensorboard" in self._request.report_to:
            callbacks.append(tensorboard_callback(self._request.out / _TENSORBOARD))
        return callbacks

    def _show_decisions(self, trainer: DrafterTrainer, decisions: list[Decision]) -> None:
        from ..training.recipes import Decision
        from .train_display import decisions_table

        # Not among the recorded decisions: another machine may attend otherwise and still resume the run.
        attention = Decision("attention", trainer.attention.implementation, trainer.attention.reason)
        self._console.print(decisions_table([*decisions, attention]))

    def _train(self, trainer: DrafterTrainer) -> None:
        from ..embedded_target import without_progress_bars
        from ..training.drafter_trainer import last_complete_checkpoint
        from ..training.estimates import estimate_training
        from ..training.run_records import write_outcome
        from .train_display import describe_estimate, results_table

        request = self._request
        self._say(describe_estimate(estimate_training(trainer)))
        checkpoint = last_complete_checkpoint(request.checkpoints) if request.resume else None
        if checkpoint is not None:
            self._say(f"Resuming from {checkpoint.name}.")
        with without_progress_bars():
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        metrics: dict[str, float] = {}
        if trainer.eval_dataset is not None:
            # Trained to the end, the last evaluation was just now; resumed at the end, there was none.
            entries = [entry for entry in trainer.state.log_history if "eval_acceptance_length" in entry]
            is_fresh = bool(entries) and entries[-1]["step"] == trainer.state.global_step
            metrics = entries[-1] if is_fresh else trainer.evaluate()
            self._console.print(results_table(metrics))
        if request.is_main:
            write_outcome(request.out, metrics)
        self._save(trainer)

    def _save(self, trainer: DrafterTrainer) -> None:
        import torch

        from ..embedded_target import without_progress_bars
        from ..output_places import writing_to
        from ..training.saving import ADAPTER_DIRECTORY

        out = self._request.out
        # What drafters are published in; decoding in bfloat16 rounds the weights the same way.
        kept = "what was trained is in the last checkpoint: repeat the command to have it written"
        with without_progress_bars(), writing_to(out, kept=kept):
            trainer.save_drafter(out, torch.bfloat16)
        what = "confidence head" if self._request.trains_confidence_head else "drafter"
        adapter = f", its adapter in {out / ADAPTER_DIRECTORY}" if self._request.lora is not None else ""
        self._say(f"The {what} is in {out}{adapter}.")

    def _publish(self) -> None:
        from ..hub_upload import upload_drafter
        from ..model_card import CardOptions, write_drafter_card

        request = self._request
        write_drafter_card(request.out, CardOptions(repo_id=request.push_to_hub, license=request.license))
        if request.push_to_hub is not None:
            self._say(f"Pushed to {upload_drafter(request.out, request.push_to_hub)}")
