"""Configuration of the length head, alone or nested in a drafter's configuration."""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from .errors import InvalidInputError


HEAD_TYPES = ("mean_linear", "mean_last_residual")


@strict
class LengthHeadConfig(PreTrainedConfig):
    r"""
    Configuration of a [`LengthHeadModel`], which estimates from the drafter's final hidden states of one block how
    much of that block the target will accept.

    Args:
        hidden_size (`int`, defaults to 4096):
            Width of the drafter's hidden states. Filled in by the drafter's configuration when nested in one.
        bottleneck_size (`int`, defaults to 256):
            Width of the head's hidden layer.
        head_type (`str`, defaults to `"mean_linear"`):
            `"mean_linear"`: a linear layer and SiLU on every row, the mean over the block, a linear layer, a sigmoid.
            `"mean_last_residual"`: the block mean and the last row side by side, reduced by a linear layer and SiLU,
            one residual layer, a linear layer, a sigmoid (the layout of the AdaFlash authors' checkpoints).
        initializer_range (`float`, defaults to 0.02):
            Standard deviation of the initial weights.
    """

    model_type = "adaflash_length_head"

    hidden_size: int = 4096
    bottleneck_size: int = 256
    head_type: str = "mean_linear"
    initializer_range: float = 0.02

    def __post_init__(self, **kwargs: Any) -> None:
        for name in ("hidden_size", "bottleneck_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise InvalidInputError(f"`{name}` is {value!r}; it must be a positive integer. Correct the config.")
        if self.head_type not in HEAD_TYPES:
            raise InvalidInputError(
                f"`head_type` is {self.head_type!r}; known types are {', '.join(map(repr, HEAD_TYPES))}. Choose one."
            )
        super().__post_init__(**kwargs)


LengthHeadConfig.register_for_auto_class()

__all__ = ["HEAD_TYPES", "LengthHeadConfig"]
