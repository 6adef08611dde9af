"""Greedy responses of many prompts against those of plain `generate()`: the reference and the differences."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from ..training.batched_decoding import eos_token_ids_of
from .comparison import FirstDifference, find_first_difference


__all__ = ["LosslessTally", "generate_batch", "left_padded", "until_end"]


def left_padded(prompts: Sequence[Sequence[int]], pad_token_id: int) -> dict[str, torch.Tensor]:
    """
    A batch of prompts padded on the left.

    Args:
        prompts (`Sequence[Sequence[int]]`):
            Token ids of each prompt.
        pad_token_id (`int`):
            Fills shorter rows; masked.

    Returns:
        `dict[str, torch.Tensor]`: `input_ids` and `attention_mask`, both `(num_prompts, longest)`.
    """
    longest = max(map(len, prompts))
    rows = [[pad_token_id] * (longest - len(ids)) + list(ids) for ids in prompts]
    mask = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask)}


def generate_batch(
    target_model: PreTrainedModel, prompts: Sequence[Sequence[int]], max_new_tokens: int, **kwargs: Any
) -> list[tuple[int, ...]]:
    """
    Greedy responses of one padded batch, each up to and including its first EOS.

    Args:
        target_model (`PreTrainedModel`):
            The target.
        prompts (`Sequence[Sequence[int]]`):
            Token ids of each prompt.
        max_new_tokens (`int`):
            Tokens to add at most.
        **kwargs:
            Passed to `generate()`, `assistant_model` for example.
    """
    ends, pad = eos_token_ids_of(target_model), target_model.generation_config.pad_token_id
    pad = min(ends, default=0) if pad is None else pad
    inputs = {name: tensor.to(target_model.device) for name, tensor in left_padded(prompts, pad).items()}
    output_ids = target_model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False, **kwargs)
    return [tuple(until_end(row, ends)) for row in output_ids[:, inputs["input_ids"].shape[1] :].tolist()]


def until_end(token_ids: list[int], eos_token_ids: Collection[int]) -> list[int]:
    """
    A row of a padded batch without its padding on the right.

    Args:
        token_ids (`list[int]`):
            New tokens.
        eos_token_ids (`Collection[int]`):
            The first of these is the last token kept.
    """
    end = next((place for place, token in enumerate(token_ids) if token in eos_token_ids), len(token_ids) - 1)
    return token_ids[: end + 1]


@dataclass
class LosslessTally:
    """
    How many responses were those of plain decoding.

    Attributes:
        identical: The same tokens.
        near_ties: They part where the target's two best tokens are within rounding of each other.
        different: They part elsewhere: a defect.
        differences: Where each of the last two kinds parted.
    """

    identical: int = 0
    near_ties: int = 0
    different: int = 0
    differences: list[FirstDifference] = field(default_factory=list)

    def add(
        self, target_model: PreTrainedModel, prompt_ids: Sequence[int], expected: Sequence[int], actual: Sequence[int]
    ) -> FirstDifference | None:
        """
        Compares one response.

        Args:
            target_model (`PreTrainedModel`):
                The target; looked into only if the responses differ.
            prompt_ids (`Sequence[int]`):
                The prompt.
            expected (`Sequence[int]`):
                What plain decoding says.
            actual (`Sequence[int]`):
                What is to be compared with it.

        Returns:
            `FirstDifference`, *optional*: Where they part.
        """
        difference = find_first_difference(
            target_model, torch.tensor([list(prompt_ids)]), tuple(expected), tuple(actual)
        )
        if difference is None:
            self.identical += 1
            return None
        self.differences.append(difference)
        if difference.is_near_tie:
            self.near_ties += 1
        else:
            self.different += 1
        return difference

    def __str__(self) -> str:
        total = self.identical + self.near_ties + self.different
        return f"{self.identical} of {total} identical, {self.near_ties} near-ties, {self.different} different"
