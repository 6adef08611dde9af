"""The confidence head: for every drafted slot, the probability that the target accepts it if it gets that far.

The baseline to the length head, after DSpark (arXiv 2607.05147): one linear layer on the hidden state of each slot.
Like the length head it reads hidden states only, so a verify length chosen from it does not bias sampled output.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from .checkpoint_loading import StrictCheckpointMixin
from .configuration_confidence_head import ConfidenceHeadConfig
from .errors import InvalidInputError


UNREACHED_LABEL = -1


@dataclass
class ConfidenceHeadOutput(ModelOutput):
    """
    Args:
        loss (`torch.Tensor` of shape `[]`, *optional*, returned when `labels` are given):
            Mean binary cross-entropy of the slots with a label, in nats.
        probabilities (`torch.Tensor` of shape `[batch_size, draft_length]`):
            Estimate, float32, that a slot is accepted given that all slots before it were.
        prefix_probabilities (`torch.Tensor` of shape `[batch_size, draft_length]`):
            Their running product: the estimate that a slot is accepted at all. Its sum over slots is the expected
            number of accepted drafts.
        logits (`torch.Tensor` of shape `[batch_size, draft_length]`):
            What the sigmoid makes the probabilities of.
    """

    loss: torch.Tensor | None = None
    probabilities: torch.Tensor | None = None
    prefix_probabilities: torch.Tensor | None = None
    logits: torch.Tensor | None = None


class ConfidenceHeadPreTrainedModel(StrictCheckpointMixin, PreTrainedModel):
    """Weight initialisation and loading of confidence heads."""

    config: ConfidenceHeadConfig
    config_class = ConfidenceHeadConfig
    base_model_prefix = "confidence_head"
    main_input_name = "hidden_states"
    input_modalities = ("text",)
    supports_gradient_checkpointing = False
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True


class ConfidenceHeadModel(ConfidenceHeadPreTrainedModel):
    """Estimates the acceptance of each drafted slot from a block's final hidden states."""

    def __init__(self, config: ConfidenceHeadConfig) -> None:
        super().__init__(config)
        self.proj = nn.Linear(config.hidden_size, 1)
        self.post_init()

    def forward(
        self, hidden_states: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: Any
    ) -> ConfidenceHeadOutput:
        """
        Args:
            hidden_states (`torch.Tensor` of shape `[batch_size, block_size, hidden_size]`):
                The drafter's hidden states after its final norm; the last `config.draft_length` rows are read.
            labels (`torch.Tensor` of shape `[batch_size, draft_length]`, *optional*):
                1 where a slot was accepted, 0 where it was not (or a probability), `UNREACHED_LABEL` where a slot
                before it was not, so that nothing is known.

        Returns:
            [`ConfidenceHeadOutput`]
        """
        wanted = (self.config.draft_length, self.config.hidden_size)
        shape = tuple(hidden_states.shape)
        if len(shape) < 2 or shape[-2] < wanted[0] or shape[-1] != wanted[1]:
            raise InvalidInputError(
                f"`hidden_states` has shape {shape}; expected [batch_size, block_size, {wanted[1]}] with a block of "
                f"at least {wanted[0]} rows. Pass the `last_hidden_state` of the drafter this head belongs to."
            )
        # The sigmoid in float32: in bfloat16 a product of probabilities near 1 would lose what tells them apart.
        logits = self.proj(hidden_states[..., -wanted[0] :, :]).squeeze(-1).float()  # [B, draft_length]
        probabilities = logits.sigmoid()
        loss = None
        if labels is not None:
            known = labels >= 0
            losses = nn.functional.binary_cross_entropy_with_logits(
                logits, labels.clamp(min=0).to(logits), reduction="none"
            )
            # A mean over no slot would be NaN.
            loss = (losses * known).sum() / known.sum().clamp(min=1)
        return ConfidenceHeadOutput(
            loss=loss, probabilities=probabilities, prefix_probabilities=probabilities.cumprod(dim=-1), logits=logits
        )


ConfidenceHeadModel.register_for_auto_class("AutoModel")

__all__ = ["UNREACHED_LABEL", "ConfidenceHeadModel", "ConfidenceHeadOutput", "ConfidenceHeadPreTrainedModel"]
