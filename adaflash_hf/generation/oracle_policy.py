"""What a perfect length head would bring: verifies exactly the drafts that will be accepted. For analysis only."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from ..errors import InvalidInputError
from .length_policies import LengthPolicy, RoundContext


if TYPE_CHECKING:
    from ..modeling_dflash_drafter import DFlashDrafterModel


__all__ = ["OraclePolicy"]


class OraclePolicy(LengthPolicy):
    """
    Is told what plain greedy decoding says, and verifies as many rows as there are right drafts, and the anchor.

    It compares drafted ids, which no honest policy may do: with sampling its output would be biased. With greedy
    decoding it changes nothing but the speed. It pays for the projection of whole blocks.

    Args:
        answers (`Mapping[Hashable, Sequence[int]]`, *optional*):
            Per request id, the new tokens of plain decoding; in `generate()` the id is the row of the batch.
    """

    def __init__(self, answers: Mapping[Hashable, Sequence[int]] | None = None):
        self._answers: dict[Hashable, list[int]] = {key: list(ids) for key, ids in (answers or {}).items()}

    def tell(self, request_id: Hashable, token_ids: Sequence[int]) -> None:
        """
        Args:
            request_id (`Hashable`): A request.
            token_ids (`Sequence[int]`): What plain decoding answers to it.
        """
        self._answers[request_id] = list(token_ids)

    def needs_likeliest(self, drafter: DFlashDrafterModel) -> bool:
        return True

    def choose_lengths(
        self, drafter: DFlashDrafterModel, hidden_states: torch.Tensor, context: RoundContext
    ) -> list[int]:
        if context.likeliest is None or len(context.request_ids) != len(context.longest):
            raise InvalidInputError(
                "`OraclePolicy` needs `context.likeliest` and `context.request_ids` of every drafted request."
            )
        drafts = context.likeliest.token_ids.tolist()
        lengths = []
        for request_id, done, draft, bound in zip(
            context.request_ids, context.num_generated, drafts, context.longest, strict=True
        ):
            if request_id not in self._answers:
                raise InvalidInputError(
                    f"`OraclePolicy` was not told the answer to request {request_id!r}; it knows "
                    f"{len(self._answers)}. Call `tell(request_id, token_ids)` first."
                )
            answer = self._answers[request_id][done:]
            right = 0
            while right < min(len(draft), len(answer)) and draft[right] == answer[right]:
                right += 1
            lengths.append(min(right + 1, bound))
        return lengths

    def verify_lengths(self, drafter: DFlashDrafterModel, hidden_states: torch.Tensor, longest: int) -> list[int]:
        raise InvalidInputError("`OraclePolicy` cannot choose without a `RoundContext`; call `choose`.")
