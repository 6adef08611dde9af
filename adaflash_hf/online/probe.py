"""A quick judgement of a drafter's weights on the traffic just served: do they draft at all for this target?

A few finished requests are kept with the target's hidden states, so that any weights can be tried on them without the
target. Of each block only the first drafts are looked at: enough to tell weights that are broken or made for another
target from weights that are a little better or worse. Which of two sound versions is better, the trainer decides on
its held-out trajectories.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..errors import InvalidInputError
from ..generation.compatibility import unwrap_model
from ..generation.engine_requests import RequestResult
from ..training.collator import DrafterDataCollator
from ..training.draft_step import DraftStep
from ..training.features import compute_target_features
from ..training.objectives import IGNORED_LABEL, DraftObjective
from .recorded_trajectory import MIN_RESPONSE_TOKENS


if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..modeling_dflash_drafter import DFlashDrafterModel


__all__ = ["AcceptanceProbe", "ProbeScore"]

_CROSS_ENTROPY = DraftObjective(hard_label_weight=1.0, labels="trajectory")


class ProbeScore(NamedTuple):
    """
    How some weights did.

    Attributes:
        accepted: Leading drafts equal to the tokens that followed, over all blocks.
        blocks: Blocks tried.
    """

    accepted: int
    blocks: int

    @classmethod
    def total(cls, scores: Iterable[ProbeScore]) -> ProbeScore:
        """
        Several requests together.

        Args:
            scores (`Iterable[ProbeScore]`):
                One of each.
        """
        each = list(scores)
        return cls(sum(score.accepted for score in each), sum(score.blocks for score in each))


class AcceptanceProbe:
    """
    Recent requests to try weights on.

    Args:
        target (`PreTrainedModel`):
            The target; runs once per request kept, and only in [`refresh`].
        layer_ids (`list[int]`):
            The target's layers that the drafter reads.
        draft_length (`int`):
            Drafts of a block.
        max_requests (`int`, *optional*, defaults to 6):
            Requests kept.
        max_tokens (`int`, *optional*, defaults to 192):
            Tokens of each that are kept, the last ones.
        blocks_per_request (`int`, *optional*, defaults to 6):
            Blocks tried on each.
        depth (`int`, *optional*, defaults to 3):
            Drafts of a block that are looked at.
        refresh_interval_s (`float`, *optional*, defaults to 20.0):
            How often a kept request may be exchanged for a newer one.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        layer_ids: list[int],
        draft_length: int,
        *,
        max_requests: int = 6,
        max_tokens: int = 192,
        blocks_per_request: int = 6,
        depth: int = 3,
        refresh_interval_s: float = 20.0,
    ) -> None:
        for name, value in (("max_requests", max_requests), ("blocks_per_request", blocks_per_request)):
            if value < 1:
                raise InvalidInputError(f"`{name}` is {value}; it must be at least 1.")
        # Not what compiled it: these lengths would each be compiled anew.
        self._target, self._layer_ids = unwrap_model(target), layer_ids
        self._max_tokens, self._depth = max_tokens, min(depth, draft_length)
        self._refresh_interval_s = refresh_interval_s
        self._collator = DrafterDataCollator(draft_length, blocks_per_request)
        self._lock = threading.Lock()
        self._offered: deque[dict[str, Any]] = deque(maxlen=max_requests)
        self._kept: deque[dict[str, torch.Tensor]] = deque(maxlen=max_requests)
        self._num_offered = 0
        self._refreshed_s = float("-inf")
        self._step: DraftStep | None = None

    def offer(self, result: RequestResult) -> None:
        """
        A request that may be kept; takes microseconds.

        Args:
            result (`RequestResult`):
                The request.
        """
        ids = [*result.prompt_ids, *result.token_ids][-self._max_tokens :]
        prompt_length = max(len(ids) - len(result.token_ids), 0)
        if result.finish_reason == "error" or len(ids) - prompt_length < MIN_RESPONSE_TOKENS + self._depth:
            return
        self._num_offered += 1
        self._offered.append(
            {
                "index": self._num_offered,
                "input_ids": ids,
                # An anchor needs some context before it, even where the prompt did not fit.
                "prompt_length": max(prompt_length, 1),
                "finished": result.finish_reason == "stop",
                "domain_id": 0,
            }
        )

    def refresh(self) -> bool:
        """
        Take one offered request in, if it is time; to be called while nobody else uses the target.

        Returns:
            `bool`: whether the target ran.
        """
        is_full = len(self._kept) == self._kept.maxlen
        if not self._offered or (is_full and time.monotonic() - self._refreshed_s < self._refresh_interval_s):
            return False
        example = self._offered.pop()
        batch = self._collator([{**example, "input_ids": torch.tensor(example["input_ids"])}])
        batch["labels"][..., self._depth :] = IGNORED_LABEL
        batch = {name: tensor.to(self._target.device) for name, tensor in batch.items()}
        features = compute_target_features(self._target, batch["input_ids"], self._layer_ids)
        batch["context_hidden_states"] = features.context[:, :-1].clone()
        with self._lock:
            self._kept.append(batch)
        self._refreshed_s = time.monotonic()
        return True

    @property
    def num_blocks(self) -> int:
        """Blocks that weights are tried on now."""
        return sum(int(batch["anchors"].numel()) for batch in self.kept())

    def kept(self) -> list[dict[str, torch.Tensor]]:
        """The requests kept now, for [`measure`]: two scores compare only on the same ones."""
        with self._lock:
            return list(self._kept)

    @torch.no_grad()
    def measure(self, drafter: DFlashDrafterModel, request: dict[str, torch.Tensor]) -> ProbeScore:
        """
        Try weights on one request.

        Args:
            drafter (`DFlashDrafterModel`):
                A drafter that nobody else uses meanwhile.
            request (`dict[str, torch.Tensor]`):
                One of [`kept`].
        """
        if self._step is None or self._step.drafter is not drafter:
            self._step = DraftStep(drafter, self._target, _CROSS_ENTROPY)
        batch = {name: tensor.to(drafter.device) for name, tensor in request.items()}
        judged = self._step.judge(drafter, batch)
        return ProbeScore(int(judged.acceptance.accepted[judged.valid].sum()), int(judged.valid.sum()))
