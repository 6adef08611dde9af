"""One training step's computation: many anchors in one drafter forward, loss, hindsight acceptance, length head.

This is what offline and online training share; it knows models and batches, not trainers or optimizers.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from ..errors import InvalidInputError
from ..generation.acceptance import greedy_tokens
from ..generation.compatibility import check_drafter_fits_target
from ..modeling_dflash_drafter import DFlashDrafterModel
from .anchors import block_positions, drafter_masks, label_positions
from .chunked_loss import DraftLoss, default_logits_memory, draft_loss, rows_per_chunk
from .features import compute_target_features
from .head_labels import LENGTH_LABELS, hindsight_length_labels, truncated_length_labels
from .metrics import Acceptance, DraftMetrics, hindsight_acceptance
from .objectives import IGNORED_LABEL, DraftObjective, position_weights
from .teachers import DenseTeacher, Teacher, TopKTeacher
from .vocabulary import RestrictedVocabulary


if TYPE_CHECKING:
    from transformers import PreTrainedModel


__all__ = ["DraftStep", "HeadOutcome", "Judgement", "StepOutcome", "check_trainable"]

# Of a slot that was not drafted; no label has it.
_NOT_DRAFTED = -2


class Judgement(NamedTuple):
    """
    Hindsight verdict on the blocks of one batch.

    Attributes:
        acceptance: `[batch, num_anchors]`, the verdict.
        valid: `[batch, num_anchors]`, which anchors are real, not padding.
        hidden_states: `[batch, num_anchors, block, H]`, the drafter's.
    """

    acceptance: Acceptance
    valid: torch.Tensor
    hidden_states: torch.Tensor


class HeadOutcome(NamedTuple):
    """
    The length head on the blocks whose acceptance is known.

    Attributes:
        loss: `[]`, mean squared error to what it is trained on; its gradient stops at the drafter's hidden states.
        ratio: `[n]`, its estimates.
        labels: `[n]`, (accepted + 1) / block_size over the full block, whatever it is trained on.
    """

    loss: torch.Tensor
    ratio: torch.Tensor
    labels: torch.Tensor


class StepOutcome(NamedTuple):
    """
    What one batch gave.

    Attributes:
        draft: Loss of the drafted slots.
        weight: `[]`, weight of the slots `draft` is the mean of.
        acceptance: `[batch, num_anchors]`, hindsight verdict.
        valid: `[batch, num_anchors]`, which anchors are real, not padding.
        head: The length head's part; None without one.
        hidden_states: `[batch, num_anchors, block, H]`, the drafter's.
    """

    draft: DraftLoss
    weight: torch.Tensor
    acceptance: Acceptance
    valid: torch.Tensor
    head: HeadOutcome | None
    hidden_states: torch.Tensor

    def loss_of(self, part: str | None) -> torch.Tensor:
        """
        Loss of what is trained.

        Args:
            part (`str`, *optional*):
                `"drafter"` or `"length_head"`; both, as far as there are two, for anything else.
        """
        if part == "length_head":
            assert self.head is not None
            return self.head.loss
        if part == "drafter" or self.head is None:
            return self.draft.loss
        return self.draft.loss + self.head.loss

    def add_to(self, metrics: DraftMetrics, domain_ids: torch.Tensor) -> None:
        """
        Add this batch up.

        Args:
            metrics (`DraftMetrics`):
                Sums to add to.
            domain_ids (`torch.Tensor` of shape `[batch]`):
                Domain of each trajectory.
        """
        metrics.add_blocks(self.acceptance, domain_ids, self.valid)
        metrics.add_losses(self.draft[:4], self.weight)
        if self.head is not None:
            metrics.add_head(self.head.ratio.detach(), self.head.labels)


class DraftStep:
    """
    Computes losses and metrics of a batch from [`DrafterDataCollator`].

    Args:
        drafter (`DFlashDrafterModel`):
            Gives the configuration, logits and the length head; may be the inside of a wrapper.
        target_model (`PreTrainedModel`):
            Gives embeddings and LM head, and features and distributions where a batch does not bring them.
        objective (`DraftObjective`):
            Loss of a slot.
        position_decay (`float`, *optional*):
            See [`position_weights`].
        teacher (`str`, *optional*, defaults to `"none"`):
            `"top_k"`, `"full"` or `"none"`.
        vocabulary (`RestrictedVocabulary`, *optional*):
            Softmax in training; by default over the drafter's draft vocabulary, or all tokens if it has none.
        length_labels (`str`, *optional*, defaults to `"hindsight"`):
            What the length head is trained on, see [`LENGTH_LABELS`].
        length_scale (`float`, *optional*, defaults to 1.3):
            Of the decoding that `"truncated"` labels imitate.
        logits_memory_bytes (`int`, *optional*):
            See [`rows_per_chunk`]; by default what [`default_logits_memory`] says.
    """

    def __init__(
        self,
        drafter: DFlashDrafterModel,
        target_model: PreTrainedModel,
        objective: DraftObjective,
        *,
        position_decay: float | None = None,
        teacher: str = "none",
        vocabulary: RestrictedVocabulary | None = None,
        length_labels: str = "hindsight",
        length_scale: float = 1.3,
        logits_memory_bytes: int | None = None,
    ) -> None:
        if length_labels not in LENGTH_LABELS:
            raise InvalidInputError(
                f"`length_labels` is {length_labels!r}; choose one of {', '.join(map(repr, LENGTH_LABELS))}."
            )
        self.drafter, self.config, self.target_model = drafter, drafter.config, target_model
        self.objective, self.teacher = objective, teacher
        self.head: nn.Module = target_model.get_output_embeddings()
        self.weights = position_weights(self.config.draft_length, position_decay)
        self._length_labels, self._length_scale = length_labels, length_scale
        self._logits_memory_bytes = logits_memory_bytes or default_logits_memory(target_model.device)
        # Asked of the embedding: the weight of a quantised head has another shape and dtype.
        embedding = target_model.get_input_embeddings().weight
        self._vocab_size, self._head_dtype = embedding.shape[0], embedding.dtype
        self._target_scale, self._target_cap = _target_logit_rules(target_model)
        drafted = drafter.draft_token_ids
        decoding_vocabulary = None if drafted is None else RestrictedVocabulary(drafted.cpu(), self._vocab_size)
        self._decoding = self._projection(decoding_vocabulary)
        self._training = self._decoding if vocabulary is None else self._projection(vocabulary)

    def _projection(self, vocabulary: RestrictedVocabulary | None) -> tuple[RestrictedVocabulary | None, nn.Module]:
        return vocabulary, self.head if vocabulary is None else vocabulary.head(self.head)

    def run(self, model: nn.Module, batch: dict[str, torch.Tensor], *, as_decoding: bool = False) -> StepOutcome:
        """
        Draft all blocks of a batch and judge them.

        Args:
            model (`nn.Module`):
                The drafter, or what wraps it for training.
            batch (`dict[str, torch.Tensor]`):
                From [`DrafterDataCollator`].
            as_decoding (`bool`, *optional*, defaults to `False`):
                Draft from all tokens that decoding drafts from, even where training is restricted.
        """
        hidden, final = self._forward(model, batch)  # [batch, anchors, block, H]
        labels = batch["labels"]
        exists = labels != IGNORED_LABEL  # [batch, anchors, draft_length]
        # Slots beyond the end of a response cost nothing: they are gone before the vocabulary projection.
        rows = hidden[:, :, -self.config.draft_length :][exists]  # [n, H]
        vocabulary, head = self._decoding if as_decoding else self._training
        slot_labels, weights = labels[exists], self.weights.to(rows.device).expand_as(exists)[exists]
        if vocabulary is not None:
            vocabulary.to(rows.device)
            slot_labels = vocabulary.labels(slot_labels)
            weights = weights * (slot_labels != IGNORED_LABEL)
        draft = draft_loss(
            rows,
            slot_labels,
            weights,
            lambda chunk: self.drafter.compute_logits(chunk.to(self._head_dtype), head),
            self.objective,
            self._teacher_of(batch, exists, final, vocabulary, head),
            torch.arange(self.config.draft_length, device=rows.device).expand_as(exists)[exists],
            chunk_rows=rows_per_chunk(
                self._vocab_size if vocabulary is None else len(vocabulary), self._logits_memory_bytes
            ),
        )
        predicted_ids = draft.predicted_ids if vocabulary is None else vocabulary.token_ids[draft.predicted_ids]
        predicted = torch.full_like(labels, -1)
        predicted[exists] = predicted_ids
        acceptance = hindsight_acceptance(predicted, labels, batch["finished"][:, None])
        valid = exists[..., 0]  # every real anchor has a token after it
        head_outcome = self._length_head(hidden, acceptance, valid)
        return StepOutcome(draft, weights.sum(), acceptance, valid, head_outcome, hidden)

    @torch.no_grad()
    def judge(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> Judgement:
        """
        Draft all blocks of a batch as decoding does and count what is accepted, without any loss.

        A slot is drafted only where all before it are right: most of the work is the vocabulary projection, and on
        average no more than tau slots of a block need it.

        Args:
            model (`nn.Module`):
                The drafter, or what wraps it for training.
            batch (`dict[str, torch.Tensor]`):
                From [`DrafterDataCollator`].
        """
        hidden, _ = self._forward(model, batch)  # [batch, anchors, block, H]
        labels = batch["labels"]
        slots = hidden[:, :, -self.config.draft_length :]
        vocabulary, head = self._decoding
        if vocabulary is not None:
            vocabulary.to(hidden.device)
            labels = torch.where(labels == IGNORED_LABEL, labels, vocabulary.places(labels))
        predicted = torch.full_like(labels, _NOT_DRAFTED)
        is_right = torch.ones_like(labels[..., 0], dtype=torch.bool)
        for slot in range(self.config.draft_length):
            wanted = is_right & (labels[..., slot] != IGNORED_LABEL)
            if not bool(wanted.any()):
                break
            predicted[..., slot][wanted] = self._drafted(slots[..., slot, :][wanted], vocabulary, head)
            is_right = predicted[..., slot] == labels[..., slot]
        acceptance = hindsight_acceptance(predicted, labels, batch["finished"][:, None])
        return Judgement(acceptance, labels[..., 0] != IGNORED_LABEL, hidden)

    def _drafted(self, rows: torch.Tensor, vocabulary: RestrictedVocabulary | None, head: nn.Module) -> torch.Tensor:
        """The likeliest token of each row of hidden states; its place where there is a vocabulary."""
        chunk_rows = rows_per_chunk(
            self._vocab_size if vocabulary is None else len(vocabulary), self._logits_memory_bytes
        )
        tokens = [
            greedy_tokens(self.drafter.compute_logits(chunk.to(self._head_dtype), head))
            for chunk in rows.split(chunk_rows)
        ]
        return torch.cat(tokens)

    def _forward(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Hidden states of all block rows, and the target's final ones where the teacher needs them."""
        ids, anchors, config = batch["input_ids"], batch["anchors"], self.config
        context, final = batch.get("context_hidden_states"), None
        if context is None or self.teacher == "full":
            features = compute_target_features(
                self.target_model, ids, config.target_layer_ids, with_final=self.teacher == "full"
            )
            context, final = features.context[:, :-1] if context is None else context, features.final
        noise = self._noise_embeds(ids, anchors)
        positions = torch.arange(context.shape[1], device=ids.device).expand(len(ids), -1)
        hidden = model(
            noise_embeds=noise,
            context_hidden_states=context.to(noise.dtype),
            attention_mask=drafter_masks(config, anchors, context.shape[1], noise.dtype),
            position_ids=torch.cat([positions, block_positions(anchors, config.block_size)], dim=1),
        ).last_hidden_state
        return hidden.view(*anchors.shape, config.block_size, -1), final

    def _noise_embeds(self, ids: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        """Embeddings of anchors and masks, `[batch, anchors * block, H]`, in the drafter's dtype."""
        rows = torch.full((*anchors.shape, self.config.block_size), self.config.mask_token_id, device=ids.device)
        rows[..., 0] = ids.gather(1, anchors)
        # The raw rows: a scaled embedding layer of the target would apply its scale on top of the drafter's own.
        weight = self.target_model.get_input_embeddings().weight.detach()
        embeds = nn.functional.embedding(rows.flatten(1), weight) * self.config.input_embedding_scale
        return embeds.to(self.drafter.dtype)

    def _teacher_of(
        self,
        batch: dict[str, torch.Tensor],
        exists: torch.Tensor,
        final: torch.Tensor | None,
        vocabulary: RestrictedVocabulary | None,
        head: nn.Module,
    ) -> Teacher | None:
        if self.teacher == "none":
            return None
        if self.teacher == "top_k":
            if "teacher_ids" not in batch:
                raise InvalidInputError(
                    "`teacher` is 'top_k', but the trajectories were stored without the target's likeliest tokens; "
                    "make them with --teacher-top-k, or choose the teacher 'full'."
                )
            ids, log_probs = batch["teacher_ids"][exists], batch["teacher_log_probs"][exists]
            return TopKTeacher(ids if vocabulary is None else vocabulary.places(ids), log_probs)
        assert final is not None
        # The target's distribution of a token comes out one position before it.
        places = label_positions(batch["anchors"], self.config.draft_length) - 1
        row = torch.arange(len(places), device=places.device)[:, None, None].expand_as(places)
        return DenseTeacher(final[row[exists], places[exists]], lambda rows: self._target_logits(rows, head))

    def _target_logits(self, rows: torch.Tensor, head: nn.Module) -> torch.Tensor:
        logits = head(rows) * self._target_scale
        return logits if self._target_cap is None else torch.tanh(logits / self._target_cap) * self._target_cap

    def _length_head(self, hidden: torch.Tensor, acceptance: Acceptance, valid: torch.Tensor) -> HeadOutcome | None:
        if self.drafter.length_head is None:
            return None
        known = acceptance.is_known & valid
        accepted, block_size = acceptance.accepted[known], self.config.block_size
        labels = hindsight_length_labels(accepted, block_size)
        ratio = self.drafter.length_head(hidden.detach()[known]).ratio
        learned = labels
        if self._length_labels == "truncated":
            learned = truncated_length_labels(accepted, ratio.detach(), block_size, self._length_scale)
        # A mean over no block would be NaN.
        loss = (ratio - learned).square().sum() / max(len(labels), 1)
        return HeadOutcome(loss, ratio, labels)


def check_trainable(drafter: Any, target_model: PreTrainedModel) -> None:
    """
    All that decoding asks for but equal dtypes: float32 weights are trained for a bfloat16 target.

    Args:
        drafter (`DFlashDrafterModel`):
            The drafter, possibly wrapped.
        target_model (`PreTrainedModel`):
            The target.

    Raises:
        DrafterCompatibilityError: They do not fit.
    """
    dtype = target_model.get_input_embeddings().weight.dtype
    with torch.device("meta"):
        skeleton = DFlashDrafterModel(copy.deepcopy(drafter.config)).to(dtype)
    check_drafter_fits_target(skeleton, target_model)


def _target_logit_rules(target_model: Any) -> tuple[float, float | None]:
    """What the target does to the logits after its LM head: a factor and a soft cap."""
    config = target_model.config.get_text_config()
    return 1.0 / (getattr(config, "logits_scaling", None) or 1.0), getattr(config, "final_logit_softcapping", None)
