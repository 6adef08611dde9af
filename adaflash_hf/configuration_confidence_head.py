"""Configuration of the confidence head."""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from .errors import InvalidInputError


@strict
class ConfidenceHeadConfig(PreTrainedConfig):
    r"""
    Configuration of a [`ConfidenceHeadModel`], which estimates for every drafted slot of a block whether the target
    will accept it.

    Args:
        hidden_size (`int`, defaults to 4096):
            Width of the drafter's hidden states.
        draft_length (`int`, defaults to 15):
            Tokens one block drafts: `draft_length` of the drafter's configuration. They come from the last rows of
            the block.
        initializer_range (`float`, defaults to 0.02):
            Standard deviation of the initial weights.
    """

    model_type = "adaflash_confidence_head"

    hidden_size: int = 4096
    draft_length: int = 15
    initializer_range: float = 0.02

    def __post_init__(self, **kwargs: Any) -> None:
        for name in ("hidden_size", "draft_length"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise InvalidInputError(f"`{name}` is {value!r}; it must be a positive integer. Correct the config.")
        super().__post_init__(**kwargs)


ConfidenceHeadConfig.register_for_auto_class()

__all__ = ["ConfidenceHeadConfig"]
