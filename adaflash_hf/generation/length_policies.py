"""How many rows of a drafted block the target verifies (DESIGN: `fixed` and `length_head`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

from ..errors import InvalidInputError


if TYPE_CHECKING:
    from ..modeling_dflash_drafter import DFlashDrafterModel
    from ..modeling_length_head import LengthHeadModel


__all__ = ["FixedLengthPolicy", "LengthHeadPolicy", "LengthPolicy", "build_length_policy"]


class LengthPolicy(ABC):
    """Chooses the verify length of every sequence in a round.

    A policy may read the drafter's hidden states but never the drafted token ids or their probabilities: a choice
    that depends on sampled ids would bias the output distribution.
    """

    @abstractmethod
    def verify_lengths(self, drafter: DFlashDrafterModel, hidden_states: torch.Tensor, longest: int) -> list[int]:
        """Returns the verify length of each row.

        Args:
            drafter (`DFlashDrafterModel`): The unwrapped drafter, for its length head.
            hidden_states (`torch.Tensor` of shape `(batch_size, block_size, hidden_size)`):
                The drafter's final hidden states of the block.
            longest (`int`): Largest verify length allowed this round, the anchor row included.

        Returns:
            `list[int]`: One length per row, each in `1..longest`.
        """

    def observe(self, verify_length: int, accepted: int) -> None:  # noqa: B027 - a hook, most policies do not learn
        """Told after each row-round how many of the `verify_length - 1` drafts were accepted."""


class FixedLengthPolicy(LengthPolicy):
    """Verifies the same number of rows every round (plain DFlash).

    Args:
        verify_length (`int`, *optional*): Rows to verify, the anchor included. The whole block when not given.
    """

    def __init__(self, verify_length: int | None = None):
        if verify_length is not None and verify_length < 1:
            raise InvalidInputError(
                f"`verify_length` is {verify_length}, but the anchor row is always verified: pass 1 or more, or None "
                "for the whole block."
            )
        self.verify_length = verify_length

    def verify_lengths(self, drafter: DFlashDrafterModel, hidden_states: torch.Tensor, longest: int) -> list[int]:
        length = longest if self.verify_length is None else min(self.verify_length, longest)
        return [length] * hidden_states.shape[0]


class LengthHeadPolicy(LengthPolicy):
    """Verifies what the drafter's length head expects to be accepted (AdaFlash, arXiv 2607.19223).

    The verify length is `round(ratio * block_size * length_scale)`, with the head's ratio in (0, 1).

    Args:
        length_scale (`float`, defaults to 1.3): The paper's gamma. Above 1 verifies more rows than predicted.
        min_verify_length (`int`, defaults to 2): Least rows to verify, the anchor included.
        activation_concurrency (`int`, defaults to 1):
            Below this number of sequences the whole block is verified, because unused rows cost little there.
    """

    def __init__(self, length_scale: float = 1.3, min_verify_length: int = 2, activation_concurrency: int = 1):
        if length_scale <= 0:
            raise InvalidInputError(f"`length_scale` is {length_scale}, expected a positive number (1.3 is usual).")
        if min_verify_length < 1:
            raise InvalidInputError(f"`min_verify_length` is {min_verify_length}, expected 1 or more.")
        self.length_scale = length_scale
        self.min_verify_length = min_verify_length
        self.activation_concurrency = activation_concurrency

    def verify_lengths(self, drafter: DFlashDrafterModel, hidden_states: torch.Tensor, longest: int) -> list[int]:
        batch_size = hidden_states.shape[0]
        if batch_size < self.activation_concurrency:
            return [longest] * batch_size
        ratio = _length_head_of(drafter)(hidden_states).ratio.float()
        lengths = torch.round(ratio * drafter.config.block_size * self.length_scale)
        return [int(length) for length in lengths.clamp(min(self.min_verify_length, longest), longest).tolist()]


def _length_head_of(drafter: DFlashDrafterModel) -> LengthHeadModel:
    if drafter.length_head is None:
        raise InvalidInputError(
            "`length_policy` asks for a length head, but this drafter has none: no length head is configured "
            "(`config.length_head_config` is None). Use `length_policy='fixed'`, or train a head with "
            "`adaflash train --only length-head`."
        )
    return drafter.length_head


def build_length_policy(policy: str | LengthPolicy | None, drafter: DFlashDrafterModel) -> LengthPolicy:
    """Resolves the `length_policy` argument of `generate()`.

    Args:
        policy (`str` or `LengthPolicy`, *optional*):
            `"fixed"`, `"length_head"`, a policy object, or None for `"fixed"`.
        drafter (`DFlashDrafterModel`): The drafter, to check that it has the head the policy needs.

    Returns:
        `LengthPolicy`: The policy to use.

    Raises:
        InvalidInputError: If the name is unknown, or the drafter has no length head.
    """
    if isinstance(policy, LengthPolicy):
        resolved = policy
    elif policy is None or policy == "fixed":
        resolved = FixedLengthPolicy()
    elif policy == "length_head":
        resolved = LengthHeadPolicy()
    else:
        raise InvalidInputError(
            f"`length_policy` is {policy!r}, expected 'fixed', 'length_head' or a `LengthPolicy` object."
        )
    if isinstance(resolved, LengthHeadPolicy):
        _length_head_of(drafter)
    return resolved
