"""Trains and judges a drafter on recorded trajectories: the work of one round, without deciding what to do with it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..errors import InvalidInputError, TrainingDivergedError
from ..training.anchors import attending, choose_attention
from ..training.collator import DrafterDataCollator
from ..training.draft_step import DraftStep, check_trainable
from ..training.lora import add_lora
from ..training.metrics import DraftMetrics
from ..training.objectives import DraftObjective
from ..training.optimizers import MuonWithAdamW, freeze_other_parts, parameter_groups
from .online_arguments import OnlineTrainingArguments
from .recorded_trajectory import RecordedTrajectory


if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..modeling_dflash_drafter import DFlashDrafterModel


__all__ = ["InterruptedRoundError", "RoundResult", "RoundTrainer", "StoredOutputs"]

_BETAS = (0.9, 0.95)
# Of all tokens of a trajectory: `teacher_ids` and `teacher_log_probs` `[response, k]`, and perhaps
# `context_hidden_states` `[n - 1, layers * hidden]`.
StoredOutputs = Callable[[RecordedTrajectory], dict[str, torch.Tensor]]
# What a frozen drafter's loss is does not matter; this one needs no teacher.
_CROSS_ENTROPY = DraftObjective(hard_label_weight=1.0, labels="trajectory")


class InterruptedRoundError(Exception):
    """Somebody asked to stop; the round is unfinished."""


@dataclass
class RoundResult:
    """
    What training did.

    Attributes:
        updates: Optimizer steps.
        tokens: Response tokens gone through, each epoch counted.
        train_s: Seconds.
        metrics: Loss, acceptance and errors on the training blocks, see [`DraftMetrics.compute`].
    """

    updates: int = 0
    tokens: int = 0
    train_s: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)


class RoundTrainer:
    """
    A drafter in training, and its optimizer.

    Args:
        drafter (`DFlashDrafterModel`):
            Taken over: put into float32, and wrapped by PEFT if a LoRA rank is given.
        target (`PreTrainedModel`):
            Its target, frozen here.
        arguments (`OnlineTrainingArguments`):
            All settings.
        device (`torch.device` or `str`, *optional*):
            Where to train; by default where the target is.
        base_name_or_path (`str`, *optional*):
            What an adapter names as its base.
        stored (`Callable`, *optional*):
            Gives what is known of a trajectory, see [`StoredOutputs`]. The likeliest tokens then stand for the
            target's distributions, and features that are known are not computed.

    Attributes:
        model: The drafter, or what PEFT made of it.
        optimizer: Its optimizer.
    """

    def __init__(
        self,
        drafter: DFlashDrafterModel,
        target: PreTrainedModel,
        arguments: OnlineTrainingArguments,
        *,
        device: torch.device | str | None = None,
        base_name_or_path: str | None = None,
        stored: StoredOutputs | None = None,
    ) -> None:
        self.arguments, self.target = arguments, target.requires_grad_(False).eval()
        self._stored = stored
        self.device = torch.device(target.device if device is None else device)
        if arguments.trained_parts == "length_head" and drafter.length_head is None:
            raise InvalidInputError("`trained_parts` is 'length_head', but the drafter has none; train 'drafter'.")
        check_trainable(drafter, target)
        self.vocab_size = target.get_input_embeddings().weight.shape[0]
        drafter = drafter.float().to(self.device)
        self.model: Any = drafter
        if arguments.lora_rank is not None:
            base = base_name_or_path or drafter.config.name_or_path or "."
            self.model = add_lora(drafter, arguments.lora_rank, base_name_or_path=base)
        if arguments.trained_parts != "both":
            freeze_other_parts(self.model, arguments.trained_parts)
        self.optimizer = self._new_optimizer()
        trains_drafter = arguments.trained_parts != "length_head"
        objective = arguments.draft_objective if trains_drafter else _CROSS_ENTROPY
        self._step = DraftStep(
            self.model,
            target,
            objective,
            position_decay=arguments.position_decay,
            teacher=_teacher_of(objective, stored),
            length_labels=arguments.length_labels,
            length_scale=arguments.length_scale,
            logits_memory_bytes=arguments.logits_memory_bytes,
        )
        # Judging needs no teacher, only what decoding would accept.
        self._judge = DraftStep(self.model, target, _CROSS_ENTROPY, logits_memory_bytes=arguments.logits_memory_bytes)
        self._drafter_config, self._draft_length = drafter.config, drafter.config.draft_length
        rows = arguments.anchors_per_trajectory * drafter.config.block_size
        self._attention = choose_attention(drafter.config, self.device, rows)

    def reset_optimizer(self) -> None:
        """Forget all averages: the weights are no longer those they were taken of."""
        self.optimizer = self._new_optimizer()

    def train(
        self,
        trajectories: Sequence[RecordedTrajectory],
        round_id: int,
        *,
        rate_factor: float = 1.0,
        on_update: Callable[[int, int], None] | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> RoundResult:
        """
        Go through the trajectories of a round. What it does depends on the arguments and the weights alone.

        Args:
            trajectories (`Sequence[RecordedTrajectory]`):
                What to train on.
            round_id (`int`):
                Number of the round; decides order and anchors.
            rate_factor (`float`, *optional*, defaults to 1.0):
                On the learning rates.
            on_update (`Callable[[int, int], None]`, *optional*):
                Called after each update with how many are done and how many there are.
            should_stop (`Callable[[], bool]`, *optional*):
                Asked after each forward.

        Raises:
            InterruptedRoundError: `should_stop` said so.
            TrainingDivergedError: The loss is not finite.
        """
        arguments, began_s = self.arguments, time.perf_counter()
        result, metrics = RoundResult(), self._metrics(trajectories)
        collator = DrafterDataCollator(self._draft_length, arguments.anchors_per_trajectory, arguments.seed)
        batches = [
            (epoch, batch)
            for epoch in range(arguments.epochs)
            for batch in self._batches(trajectories, (arguments.seed, round_id, epoch))
        ]
        steps = arguments.gradient_accumulation_steps
        groups = [batches[begin : begin + steps] for begin in range(0, len(batches), steps)]
        self.model.train()
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = rate_factor * parameters["initial_lr"]
        for group in groups:
            for epoch, members in group:
                collator.epoch = round_id * arguments.epochs + epoch
                batch = self._collate(collator, members, metrics.domains)
                with self._computing():
                    outcome = self._step.run(self.model, batch)
                    loss = outcome.loss_of(self.arguments.trained_parts) / len(group)
                if not bool(torch.isfinite(loss)):
                    raise TrainingDivergedError(f"The loss of round {round_id} is {loss.item()}.")
                loss.backward()
                outcome.add_to(metrics, batch["domain_ids"])
                result.tokens += sum(one.num_response_tokens for one in members)
                if should_stop():
                    self.optimizer.zero_grad()
                    raise InterruptedRoundError
            self._update(round_id)
            result.updates += 1
            if on_update is not None:
                on_update(result.updates, len(groups))
        result.metrics = metrics.compute("train")
        result.train_s = time.perf_counter() - began_s
        return result

    @torch.no_grad()
    def evaluate(
        self, trajectories: Sequence[RecordedTrajectory], *, should_stop: Callable[[], bool] = lambda: False
    ) -> dict[str, float]:
        """
        Greedy hindsight acceptance, on the same anchors for the same trajectories whatever the weights.

        Args:
            trajectories (`Sequence[RecordedTrajectory]`):
                What to judge on.
            should_stop (`Callable[[], bool]`, *optional*):
                Asked after each forward.

        Returns:
            `dict[str, float]`: See [`DraftMetrics.compute`].
        """
        arguments, metrics = self.arguments, self._metrics(trajectories)
        collator = DrafterDataCollator(self._draft_length, arguments.eval_anchors_per_trajectory, arguments.seed)
        self.model.eval()
        size = arguments.batch_size
        for begin in range(0, len(trajectories), size):
            batch = self._collate(collator, trajectories[begin : begin + size], metrics.domains)
            with self._computing():
                self._judge.run(self.model, batch, as_decoding=True).add_to(metrics, batch["domain_ids"])
            if should_stop():
                raise InterruptedRoundError
        return metrics.compute("eval")

    def _update(self, round_id: int) -> None:
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        limit = self.arguments.max_grad_norm or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(parameters, limit)
        if not bool(torch.isfinite(norm)):
            raise TrainingDivergedError(f"The gradient's norm in round {round_id} is {norm.item()}.")
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _batches(
        self, trajectories: Sequence[RecordedTrajectory], seed: tuple[int, ...]
    ) -> Iterator[list[RecordedTrajectory]]:
        order = list(trajectories)
        random.Random(repr(seed)).shuffle(order)
        for begin in range(0, len(order), self.arguments.batch_size):
            yield order[begin : begin + self.arguments.batch_size]

    def _collate(
        self, collator: DrafterDataCollator, members: Sequence[RecordedTrajectory], domains: list[str]
    ) -> dict[str, torch.Tensor]:
        examples = [one.example(domains.index(one.domain), self.arguments.max_tokens) for one in members]
        if self._stored is not None:
            examples = [example | self._stored(one) for example, one in zip(examples, members, strict=True)]
        return {name: tensor.to(self.device) for name, tensor in collator(examples).items()}

    def _metrics(self, trajectories: Sequence[RecordedTrajectory]) -> DraftMetrics:
        return DraftMetrics(sorted({one.domain for one in trajectories}), self._draft_length, self.device)

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Attention and precision of a forward pass in training."""
        dtype = self.arguments.autocast_dtype(self.device)
        precision = nullcontext() if dtype is None else torch.autocast(self.device.type, dtype=dtype)
        with attending(self._drafter_config, self._attention), precision:
            yield

    def _new_optimizer(self) -> torch.optim.Optimizer:
        arguments = self.arguments
        groups = parameter_groups(
            self.model,
            learning_rate=arguments.learning_rate,
            head_learning_rate=arguments.length_head_learning_rate,
            use_muon=arguments.use_muon,
        )
        optimizer: torch.optim.Optimizer
        if arguments.use_muon:
            optimizer = MuonWithAdamW(groups, arguments.weight_decay, _BETAS)
        else:
            plain = [{"params": group["params"], "lr": group["lr"]} for group in groups]
            optimizer = torch.optim.AdamW(plain, weight_decay=arguments.weight_decay, betas=_BETAS)
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
        return optimizer


def _teacher_of(objective: DraftObjective, stored: StoredOutputs | None) -> str:
    if not objective.needs_teacher:
        return "none"
    return "full" if stored is None else "top_k"
