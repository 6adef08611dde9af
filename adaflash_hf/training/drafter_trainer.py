"""Trains drafters and length heads on stored trajectories with transformers' `Trainer`.

Everything that training needs and that is not special to drafters (accelerate, mixed precision, logging, checkpoints,
push to the Hub) is the parent's. A run that was killed and resumed goes through the same batches and anchors.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Subset
from transformers import Trainer, TrainerCallback, TrainerControl
from transformers.trainer_utils import EvalLoopOutput

from ..checkpoint_files import tensor_shapes
from ..errors import DrafterCheckpointError, InvalidInputError, TrainingDivergedError
from ..modeling_dflash_drafter import DFlashDrafterModel
from ..output_places import writing_to
from .anchors import attending, choose_attention
from .collator import DrafterDataCollator
from .draft_step import DraftStep, StepOutcome, check_trainable
from .head_labels import slot_verdicts
from .metrics import DraftMetrics
from .objectives import DraftObjective
from .optimizers import LENGTH_HEAD_PREFIX, MuonWithAdamW, freeze_other_parts, parameter_groups
from .saving import save_trained
from .training_arguments import DrafterTrainingArguments
from .trajectory_dataset import TrajectoryDataset
from .vocabulary import RestrictedVocabulary, build_restricted_vocabulary, count_tokens


if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..modeling_confidence_head import ConfidenceHeadModel


__all__ = ["DrafterTrainer", "last_complete_checkpoint", "resolve_teacher"]

logger = logging.getLogger(__name__)

TrajectoryRows = TrajectoryDataset | Subset

_STATE_FILE = "trainer_state.json"  # written last by `Trainer`
# A frozen drafter's loss is only looked at.
_CROSS_ENTROPY = DraftObjective(hard_label_weight=1.0, labels="trajectory")
# Of a training batch only these metrics go into the log; the others are for evaluation.
_LOGGED_METRICS = (
    "acceptance_length",
    "hard_loss",
    "divergence",
    "clipped_share",
    "length_head_error",
    "confidence_head_error",
)


class DrafterTrainer(Trainer):
    """
    Trains a drafter, its length head, both, or a confidence head on a frozen drafter.

    Args:
        model (`DFlashDrafterModel`):
            What is trained; may be wrapped by PEFT.
        target_model (`PreTrainedModel`):
            Its target, frozen here. Features and distributions that are not stored with the trajectories are computed
            with it.
        args (`DrafterTrainingArguments`):
            All settings.
        train_dataset (`TrajectoryDataset` or a `Subset` of one):
            Trajectories to train on.
        eval_dataset (`TrajectoryDataset` or a `Subset` of one, *optional*):
            Held-out trajectories.
        callbacks (`Sequence[TrainerCallback]`, *optional*):
            See [`~transformers.Trainer`].
        confidence_head (`ConfidenceHeadModel`, *optional*):
            What is trained, and saved in checkpoints, in place of `model` with `train_only="confidence_head"`.

    Raises:
        DrafterCompatibilityError: the drafter does not fit the target.
        InvalidInputError: arguments contradict each other, the drafter or the trajectories.
    """

    args: DrafterTrainingArguments
    optimizer: torch.optim.Optimizer | None
    control: TrainerControl

    def __init__(
        self,
        model: DFlashDrafterModel,
        target_model: PreTrainedModel,
        args: DrafterTrainingArguments,
        train_dataset: TrajectoryRows,
        eval_dataset: TrajectoryRows | None = None,
        callbacks: Sequence[TrainerCallback] | None = None,
        confidence_head: ConfidenceHeadModel | None = None,
    ) -> None:
        check_trainable(model, target_model)
        _check_confidence_head(confidence_head, args, draft_length=model.config.draft_length)
        if args.dataloader_persistent_workers:
            raise InvalidInputError(
                "`dataloader_persistent_workers` is true, but such workers would sample the same anchors in each "
                "epoch; leave it false."
            )
        trajectories, indices = _trajectories_of(train_dataset)
        draft_length = model.config.draft_length
        rows = args.anchors_per_trajectory * model.config.block_size
        self.attention = choose_attention(model.config, args.device, rows, args.drafter_attention)
        _freeze(model, args.train_only)
        super().__init__(
            model=model if confidence_head is None else confidence_head,
            args=args,
            data_collator=DrafterDataCollator(draft_length, args.anchors_per_trajectory, args.seed),
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            callbacks=list(callbacks or []),
        )
        if self.is_fsdp_enabled and args.use_muon:
            raise InvalidInputError(
                "`use_muon` is true, but with FSDP each process has a part of a matrix, and Muon needs whole ones. "
                "Set it to false, or leave out `fsdp`: a drafter fits on one device."
            )
        # The drafter's forward takes any keyword, which would make the parent expect it to normalize the loss.
        self.model_accepts_loss_kwargs = False
        self.add_callback(_EpochForCollator(self.data_collator))
        self.domains = trajectories.domains
        self.target_model = target_model.requires_grad_(False).eval().to(args.device)
        self.confidence_head = confidence_head
        self._drafter_config = model.config
        self._frozen_drafter = None if confidence_head is None else model.eval().to(args.device)
        self.vocabulary = self._restricted_vocabulary(trajectories, indices)
        if args.draft_vocabulary and self.vocabulary is not None:
            model.set_draft_vocabulary(self.vocabulary.token_ids)
        self.draft_step = DraftStep(
            model,
            target_model,
            args.draft_objective if args.trains_drafter else _CROSS_ENTROPY,
            position_decay=args.position_decay,
            teacher=resolve_teacher(args, trajectories),
            vocabulary=self.vocabulary,
            length_labels=args.length_labels,
            length_scale=args.length_scale,
            logits_memory_bytes=args.logits_memory_bytes,
        )
        self._losses_are_finite = torch.ones((), device=args.device)
        self.reset_train_metrics()

    def reset_train_metrics(self) -> None:
        """Forget what was measured on training batches since the last log entry."""
        self._train_metrics = DraftMetrics(self.domains, self.data_collator.draft_length, self.args.device)

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> torch.Tensor | tuple[torch.Tensor, StepOutcome]:
        """Loss of one batch, for each slot and block a mean."""
        outcome = self._run(model, inputs, as_decoding=not self.args.trains_drafter)
        loss = outcome.loss_of(self.args.train_only)
        if self.confidence_head is not None:
            loss = self._confidence_loss(model, outcome, inputs["labels"], self._train_metrics)
        outcome.add_to(self._train_metrics, inputs["domain_ids"])
        return (loss, outcome) if return_outputs else loss

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """Train; with `resume_from_checkpoint=True` from the last complete checkpoint in `output_dir`, if any."""
        if resume_from_checkpoint is True:
            found = last_complete_checkpoint(self.args.output_dir)
            resume_from_checkpoint = None if found is None else str(found)
        with attending(self._drafter_config, self.attention):
            output = super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)
        self._check_losses()
        return output

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The parent's; remembers whether the loss was finite, without waiting for the device."""
        loss = super().training_step(*args, **kwargs)
        self._losses_are_finite *= torch.isfinite(loss).all()
        return loss

    def save_drafter(self, directory: str | Path, dtype: torch.dtype | None = None) -> None:
        """
        Write what is trained as an ordinary checkpoint. All processes must call this; the main one writes.

        Args:
            directory (`str` or `Path`):
                Where to write. Of a drafter with a LoRA adapter this gets the merged drafter, and `directory/adapter`
                the adapter.
            dtype (`torch.dtype`, *optional*):
                What to round the weights to; by default they stay as they are.

        Raises:
            TrainingDivergedError: a weight is not finite.
        """
        state_dict = self.accelerator.get_state_dict(self.model)
        for name, tensor in state_dict.items():
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise TrainingDivergedError(
                    f"`{name}` has values that are no finite numbers, so nothing was written: training has diverged. "
                    "Lower `learning_rate` (--learning-rate) and begin anew (--no-resume)."
                )
        if self.args.should_save:
            save_trained(self.accelerator.unwrap_model(self.model), state_dict, directory, dtype)

    def _check_losses(self) -> None:
        """All processes must call this, so that all of them end."""
        if not bool(self.accelerator.reduce(self._losses_are_finite, reduction="mean") == 1):
            raise TrainingDivergedError(
                f"By step {self.state.global_step} the loss was no finite number any more: training has diverged. "
                f"Lower `learning_rate` (--learning-rate), which is {self.args.learning_rate:g}, and begin anew "
                "(--no-resume)."
            )

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """The parent's; of one that cannot be written nothing is left, since room is what is missing."""
        self._check_losses()  # or the last one that can be resumed from would be worthless
        directory = Path(self.args.output_dir)
        try:
            with writing_to(directory, "output_dir", "complete checkpoints stay: resume from the last one"):
                super()._save_checkpoint(model, trial)
        except Exception:
            partial = directory / f"checkpoint-{self.state.global_step}"
            if self.args.should_save and _saved_step(partial) is None:
                shutil.rmtree(partial, ignore_errors=True)
            raise

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """One group each for matrices, other parameters of the drafter, and the length head."""
        if self.optimizer is None:
            groups = self._parameter_groups(self.model if model is None else model)
            if self.args.use_muon:
                betas = (self.args.adam_beta1, self.args.adam_beta2)
                self.optimizer = MuonWithAdamW(groups, self.args.weight_decay, betas, self.args.adam_epsilon)
            else:
                optimizer_class, kwargs = self.get_optimizer_cls_and_kwargs(self.args, self.model)
                kwargs = {"weight_decay": self.args.weight_decay, **kwargs}
                self.optimizer = optimizer_class([_without(group, "use_muon") for group in groups], **kwargs)
        return self.optimizer

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """
        Held-out trajectories of this process, each in exactly one process.

        Not through accelerate, which repeats some to give all processes the same number of batches.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise InvalidInputError("`eval_dataset` is None; pass held-out trajectories to evaluate on.")
        mine = Subset(dataset, range(self.args.process_index, len(dataset), self.args.world_size))
        collator = DrafterDataCollator(
            self.data_collator.draft_length, self.args.eval_anchors_per_trajectory, self.args.seed
        )
        return DataLoader(mine, batch_size=self.args.eval_batch_size, collate_fn=collator)

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Sums over all blocks and processes first, metrics from the sums."""
        if self.is_fsdp_enabled and not self.accelerator._models:
            self.model.to(self.args.device)  # it is sharded, and moved, only when training begins
        was_training = self.model.training
        self.model.eval()
        metrics = DraftMetrics(self.domains, self.data_collator.draft_length, self.args.device)
        for batch, counts in self._evaluation_batches(dataloader):
            batch = self._prepare_inputs(batch)
            with torch.no_grad(), self.compute_loss_context_manager(), attending(self._drafter_config, self.attention):
                outcome = self._run(self.model, batch, as_decoding=True)
                if self.confidence_head is not None and counts:
                    self._confidence_loss(self.model, outcome, batch["labels"], metrics)
            if counts:
                outcome.add_to(metrics, batch["domain_ids"])
            self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        self.model.train(was_training)
        metrics.reduce(lambda values: self.accelerator.reduce(values, reduction="sum"))
        return EvalLoopOutput(
            predictions=(),
            label_ids=None,
            metrics=metrics.compute(metric_key_prefix),
            num_samples=len(dataloader.dataset),  # type: ignore[arg-type]
        )

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add what was measured on the training batches since the last entry."""
        if "loss" in logs:
            self._check_losses()
            self._train_metrics.reduce(lambda values: self.accelerator.reduce(values, reduction="sum"))
            measured = self._train_metrics.compute("train")
            logs |= {name: measured[f"train_{name}"] for name in _LOGGED_METRICS if f"train_{name}" in measured}
            self.reset_train_metrics()
        super().log(logs, *args, **kwargs)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Not counted: the parent's estimate is for one token per row of one stream."""
        return 0

    def _run(self, model: Any, inputs: dict[str, torch.Tensor], *, as_decoding: bool) -> StepOutcome:
        drafter = model if self._frozen_drafter is None else self._frozen_drafter
        return self.draft_step.run(drafter, inputs, as_decoding=as_decoding)

    def _confidence_loss(
        self, head: torch.nn.Module, outcome: StepOutcome, labels: torch.Tensor, metrics: DraftMetrics
    ) -> torch.Tensor:
        acceptance, valid = outcome.acceptance, outcome.valid
        verdicts = slot_verdicts(acceptance.accepted, labels)[valid]
        # Through `head`, not `self.confidence_head`: a wrapper for several processes must see its forward pass.
        output = head(hidden_states=outcome.hidden_states.detach()[valid], labels=verdicts)
        metrics.add_confidence(output.loss, output.prefix_probabilities, verdicts, acceptance.is_known[valid])
        return output.loss

    def _evaluation_batches(self, dataloader: DataLoader) -> Iterator[tuple[dict[str, torch.Tensor], bool]]:
        """
        The batches of this process, each with true.

        Of a sharded drafter each forward pass is one of all processes, so those with fewer batches get some to run
        along with, with false.
        """
        batch = None
        for batch in dataloader:
            yield batch, True
        if self.is_fsdp_enabled:
            held_out = dataloader.dataset.dataset  # type: ignore[attr-defined]
            most_rows = math.ceil(len(held_out) / self.args.world_size)
            assert dataloader.collate_fn is not None and dataloader.batch_size is not None
            for _ in range(math.ceil(most_rows / dataloader.batch_size) - len(dataloader)):
                yield batch or dataloader.collate_fn([held_out[0]]), False

    def _restricted_vocabulary(
        self, trajectories: TrajectoryDataset, indices: Sequence[int]
    ) -> RestrictedVocabulary | None:
        if self.args.vocabulary_size is None or not self.args.trains_drafter:
            return None
        vocab_size = self.target_model.get_output_embeddings().weight.shape[0]
        counts = count_tokens(trajectories, indices, vocab_size)
        return build_restricted_vocabulary(counts, self.args.vocabulary_size)

    def _parameter_groups(self, model: torch.nn.Module) -> list[dict[str, Any]]:
        return parameter_groups(
            model,
            learning_rate=self.args.learning_rate,
            vector_learning_rate=self.args.vector_learning_rate,
            head_learning_rate=self.args.length_head_learning_rate,
            use_muon=self.args.use_muon,
            # All of a confidence head is head.
            head_prefix=LENGTH_HEAD_PREFIX if self.confidence_head is None else "",
        )


class _EpochForCollator(TrainerCallback):
    """Tells the collator the epoch before the parent opens the data loader for it."""

    def __init__(self, collator: DrafterDataCollator) -> None:
        self._collator = collator

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._collator.epoch = int(state.epoch or 0)


def last_complete_checkpoint(directory: str | Path) -> Path | None:
    """
    The newest checkpoint that was written to its end, and can be read; a run killed while saving leaves one that was
    not. One that was damaged since is passed over, which is told.

    Args:
        directory (`str` or `Path`):
            `output_dir` of a run.
    """
    steps = {_saved_step(path): path for path in Path(directory).glob("checkpoint-*")}
    for step in sorted((step for step in steps if step is not None), reverse=True):
        damaged = _damaged_file(steps[step])
        if damaged is None:
            return steps[step]
        logger.warning("%s is damaged, so that %s is passed over.", damaged, steps[step].name)
    return None


def resolve_teacher(args: DrafterTrainingArguments, trajectories: TrajectoryDataset) -> str:
    """
    Where the target's distribution comes from: `"top_k"`, `"full"` or `"none"`.

    Args:
        args (`DrafterTrainingArguments`):
            Of the run.
        trajectories (`TrajectoryDataset`):
            What it trains on.

    Raises:
        InvalidInputError: it is to be a stored one, and none is stored.
    """
    if not args.trains_drafter:
        return "none"
    if args.teacher == "top_k" and not trajectories.teacher_top_k:
        raise InvalidInputError(
            "`teacher` is 'top_k', but the trajectories were stored without the target's likeliest tokens; make them "
            "with --teacher-top-k, or choose the teacher 'full'."
        )
    if args.teacher != "auto":
        return args.teacher
    if not args.draft_objective.needs_teacher:
        return "none"
    return "top_k" if trajectories.teacher_top_k else "full"


def _damaged_file(checkpoint: Path) -> Path | None:
    """By header and length of safetensors, and by the end of the archives that torch writes."""
    for path in sorted(checkpoint.iterdir()):
        if path.suffix in (".pt", ".pth") and not zipfile.is_zipfile(path):
            return path
        try:
            tensor_shapes([str(path)] if path.suffix == ".safetensors" else [])
        except DrafterCheckpointError:
            return path
    return None


def _saved_step(checkpoint: Path) -> int | None:
    """Step of a complete checkpoint; None for what is not one."""
    try:
        return int(json.loads((checkpoint / _STATE_FILE).read_text(encoding="utf-8"))["global_step"])
    except (OSError, ValueError, KeyError):
        return None


def _trajectories_of(dataset: Any) -> tuple[TrajectoryDataset, Sequence[int]]:
    """The trajectories behind a dataset, and which of them it shows."""
    if isinstance(dataset, TrajectoryDataset):
        return dataset, range(len(dataset))
    if isinstance(dataset, Subset) and isinstance(dataset.dataset, TrajectoryDataset):
        return dataset.dataset, dataset.indices
    raise InvalidInputError(
        f"`train_dataset` is a {type(dataset).__name__}; pass a TrajectoryDataset or a torch Subset of one."
    )


def _check_confidence_head(
    head: ConfidenceHeadModel | None, args: DrafterTrainingArguments, *, draft_length: int
) -> None:
    if (head is not None) != (args.train_only == "confidence_head"):
        raise InvalidInputError(
            f"`confidence_head` is {'None' if head is None else 'given'}, but `train_only` is {args.train_only!r}; a "
            "confidence head is passed exactly if `train_only` is 'confidence_head'."
        )
    if head is not None and head.config.draft_length != draft_length:
        raise InvalidInputError(
            f"`confidence_head` is for {head.config.draft_length} drafts a block, the drafter makes {draft_length}; "
            "make one with `new_confidence_head(drafter)`."
        )


def _freeze(model: Any, train_only: str | None) -> None:
    has_head = model.length_head is not None
    if train_only == "length_head" and not has_head:
        raise InvalidInputError(
            "`train_only` is 'length_head', but the drafter has none; call `attach_length_head(drafter)` first."
        )
    if train_only is not None:
        freeze_other_parts(model, train_only)
    if train_only != "confidence_head" and not any(parameter.requires_grad for parameter in model.parameters()):
        raise InvalidInputError(
            f"`train_only` is {train_only!r}, but no parameter of that part of the drafter requires a gradient. Of a "
            "drafter with an adapter the length head is trained if the adapter has it in `modules_to_save`."
        )


def _without(group: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != key}
