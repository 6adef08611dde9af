"""The length head: one number per drafted block, the share of it that the target is expected to commit.

It reads hidden states only, never drafted token ids or their probabilities. A verify length chosen from the ids would
bias sampled output, one chosen from hidden states does not.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.utils import ModelOutput

from .checkpoint_loading import StrictCheckpointMixin
from .configuration_length_head import LengthHeadConfig
from .errors import InvalidInputError


@dataclass
class LengthHeadOutput(ModelOutput):
    """
    Args:
        loss (`torch.Tensor` of shape `[]`, *optional*, returned when `labels` are given):
            Mean squared error between `ratio` and `labels`.
        ratio (`torch.Tensor` of shape `[batch_size]`):
            Estimate, in (0, 1) and float32, of (accepted drafts + 1) / block_size.
    """

    loss: torch.Tensor | None = None
    ratio: torch.Tensor | None = None


class LengthHeadResidualLayer(nn.Linear):
    """`x + silu(Wx + b)`, as one module so that its tensors are named `res.{i}.weight` and `res.{i}.bias`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input + nn.functional.silu(super().forward(input))


class LengthHeadPreTrainedModel(StrictCheckpointMixin, PreTrainedModel):
    """Weight initialisation and loading shared by length heads."""

    config: LengthHeadConfig
    config_class = LengthHeadConfig
    base_model_prefix = "length_head"
    main_input_name = "hidden_states"
    input_modalities = ("text",)
    supports_gradient_checkpointing = False
    # It runs after the drafter's forward pass, so FSDP must gather its weights on their own.
    _no_split_modules = ["LengthHeadModel"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True


class LengthHeadModel(LengthHeadPreTrainedModel):
    """Estimates (accepted drafts + 1) / block_size from a block's final hidden states."""

    def __init__(self, config: LengthHeadConfig) -> None:
        super().__init__(config)
        is_residual = config.head_type == "mean_last_residual"
        self.down = nn.Linear(config.hidden_size * (2 if is_residual else 1), config.bottleneck_size)
        if is_residual:
            self.res = nn.ModuleList([LengthHeadResidualLayer(config.bottleneck_size, config.bottleneck_size)])
        self.out = nn.Linear(config.bottleneck_size, 1)
        self.activation = ACT2FN["silu"]
        self.post_init()

    def forward(
        self, hidden_states: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: Any
    ) -> LengthHeadOutput:
        """
        Args:
            hidden_states (`torch.Tensor` of shape `[batch_size, block_size, hidden_size]`):
                The drafter's hidden states after its final norm, every row of the block, the anchor's included.
            labels (`torch.Tensor` of shape `[batch_size]`, *optional*):
                (accepted drafts + 1) / block_size, in [0, 1].

        Returns:
            [`LengthHeadOutput`]
        """
        if hidden_states.dim() < 2 or hidden_states.shape[-1] != self.config.hidden_size:
            raise InvalidInputError(
                f"`hidden_states` has shape {tuple(hidden_states.shape)}; expected [batch_size, block_size, "
                f"{self.config.hidden_size}]. Pass the drafter's `last_hidden_state`."
            )
        if self.config.head_type == "mean_last_residual":
            pooled = torch.cat([hidden_states.mean(dim=-2), hidden_states[..., -1, :]], dim=-1)  # [B, 2H]
            features = self.activation(self.down(pooled))  # [B, bottleneck]
            for layer in self.res:
                features = layer(features)
        else:
            features = self.activation(self.down(hidden_states)).mean(dim=-2)  # [B, bottleneck]
        # The sigmoid in float32: in bfloat16 neighbouring ratios near 1 are 1/256 apart, coarser than one draft of 16.
        ratio = self.out(features).squeeze(-1).float().sigmoid()  # [B]
        loss = None if labels is None else nn.functional.mse_loss(ratio, labels.to(ratio))
        return LengthHeadOutput(loss=loss, ratio=ratio)


LengthHeadModel.register_for_auto_class("AutoModel")

__all__ = ["LengthHeadModel", "LengthHeadOutput", "LengthHeadPreTrainedModel"]
