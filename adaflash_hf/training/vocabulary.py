"""A loss over the tokens that occur: a small softmax in training, while decoding keeps the full vocabulary.

What is left out can still be drafted, since its LM head rows are the target's own; it is only never trained on.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from ..errors import InvalidInputError
from ..generation.draft_head import has_plain_rows, select_head_rows
from .objectives import IGNORED_LABEL


if TYPE_CHECKING:
    from .trajectory_dataset import TrajectoryDataset


__all__ = ["RestrictedVocabulary", "build_restricted_vocabulary", "count_tokens"]

# A token that was said weighs as much as this much probability of having been likely.
_RESPONSE_WEIGHT = 10.0


class RestrictedVocabulary(nn.Module):
    """
    A subset of the target's tokens, and its rows of the LM head.

    Args:
        token_ids (`torch.Tensor` of shape `[size]`):
            The tokens, in ascending order.
        vocab_size (`int`):
            Rows of the target's LM head.
    """

    token_ids: torch.Tensor
    lookup: torch.Tensor

    def __init__(self, token_ids: torch.Tensor, vocab_size: int) -> None:
        super().__init__()
        lookup = torch.full((vocab_size,), -1, dtype=torch.long)
        lookup[token_ids] = torch.arange(len(token_ids))
        self.register_buffer("token_ids", token_ids)
        self.register_buffer("lookup", lookup)

    def __len__(self) -> int:
        return len(self.token_ids)

    def labels(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Positions in this vocabulary of tokens of any shape; `IGNORED_LABEL` where it does not have them."""
        places = self.places(token_ids)
        return places.masked_fill(places < 0, IGNORED_LABEL)

    def places(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Positions in this vocabulary of tokens of any shape; -1 where it does not have them."""
        places = self.lookup[token_ids.clamp(min=0).long()]
        return places.masked_fill(token_ids < 0, -1)

    def head(self, output_embeddings: nn.Module) -> nn.Linear:
        """
        A linear layer with this vocabulary's rows of an LM head.

        Args:
            output_embeddings (`nn.Module`):
                The target's LM head, with an ordinary floating-point `weight`.
        """
        if not has_plain_rows(output_embeddings) or output_embeddings.weight.shape[0] != len(self.lookup):
            raise InvalidInputError(
                f"`vocabulary_size` needs rows of the target's LM head, but that is a "
                f"{type(output_embeddings).__name__} without a weight of {len(self.lookup)} floating-point rows; "
                "leave `vocabulary_size` out."
            )
        return select_head_rows(output_embeddings, self.token_ids)


def count_tokens(dataset: TrajectoryDataset, indices: Iterable[int], vocab_size: int) -> np.ndarray:
    """
    How often each token was said or likely.

    Args:
        dataset (`TrajectoryDataset`):
            The trajectories.
        indices (`Iterable[int]`):
            Rows to count.
        vocab_size (`int`):
            Rows of the target's LM head.

    Returns:
        `np.ndarray` of shape `[vocab_size]`: ten times the occurrences in responses, plus the teacher's stored
        probabilities.
    """
    counts = np.zeros(vocab_size)
    for index in indices:
        response = dataset.response_ids(index)
        counts += _RESPONSE_WEIGHT * np.bincount(response, minlength=vocab_size)
        if dataset.teacher_top_k:
            ids, log_probs = dataset.teacher(index)
            np.add.at(counts, ids.reshape(-1), np.exp(log_probs.astype(np.float32)).reshape(-1))
    return counts


def build_restricted_vocabulary(counts: np.ndarray, max_size: int) -> RestrictedVocabulary:
    """
    The tokens with the highest counts.

    Args:
        counts (`np.ndarray` of shape `[vocab_size]`):
            See [`count_tokens`].
        max_size (`int`):
            At most this many; fewer if fewer occur.
    """
    if max_size < 2:
        raise InvalidInputError(f"`vocabulary_size` is {max_size}; it must be at least 2, or None for all tokens.")
    size = min(max_size, int((counts > 0).sum()))
    # A stable sort: equal counts are ranked by token id, the same on every machine and after every restart.
    chosen = np.sort(np.argsort(-counts, kind="stable")[:size])
    return RestrictedVocabulary(torch.from_numpy(chosen), len(counts))
