"""Serves known responses with the drafter alone: the same rounds as live greedy decoding, without the target's work.

A greedy response is the target's whatever drafts, so the target's verdict on any block is known beforehand: the drafts
that equal the tokens that followed. Blocks at all places of a response are drafted a chunk at a time, then walked
through as decoding would: from the anchor past what was accepted and the token after it. What depends on time, or on
other requests, cannot be replayed: speeds, and length policies that look at either.

In float32 the rounds equal those of the engine. In lower precision a draft may differ where the drafter's two best
tokens are nearly tied, because other matrix shapes round otherwise.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..errors import InvalidInputError
from ..generation.callbacks import Callbacks
from ..generation.compatibility import unwrap_model
from ..generation.engine_handles import RequestResult, RequestStats
from ..generation.length_policies import FixedLengthPolicy, LengthHeadPolicy, LengthPolicy, RoundContext
from ..training.anchors import label_positions
from ..training.draft_step import DraftStep
from ..training.features import compute_target_features
from ..training.objectives import IGNORED_LABEL, DraftObjective
from .domain_traffic import DomainResponses


if TYPE_CHECKING:
    from transformers import PreTrainedModel


__all__ = ["ReplayEngine", "replay_rounds"]

_HINDSIGHT = DraftObjective(hard_label_weight=1.0, labels="trajectory")
# Blocks drafted in one forward. About one in tau of them is needed; more would save calls and waste attention.
_BLOCKS_AT_ONCE = 48


class ReplayEngine:
    """
    Stands in for [`AdaFlashEngine`] where the responses are known; recorders and reloaders attach to it alike.

    Args:
        target (`PreTrainedModel`):
            The target; gives embeddings and LM head, and features where they are not stored.
        drafter (`DFlashDrafterModel`):
            The drafter.
        responses (`DomainResponses`):
            What the target says.
        length_policy (`LengthPolicy`, *optional*):
            A [`FixedLengthPolicy`] or [`LengthHeadPolicy`]; by default whole blocks are verified.

    Attributes:
        drafter: The drafter.
        drafter_version: Its version, which results carry.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: Any,
        responses: DomainResponses,
        length_policy: LengthPolicy | None = None,
    ) -> None:
        self.drafter, self.drafter_version = drafter, 0
        self._policy = length_policy or FixedLengthPolicy()
        if not isinstance(self._policy, (FixedLengthPolicy, LengthHeadPolicy)):
            raise InvalidInputError(
                f"`length_policy` is a {type(self._policy).__name__}, whose choices depend on more than the drafter; "
                "replay 'fixed' or 'length_head', or decode live."
            )
        self._responses = responses
        self._step = DraftStep(unwrap_model(drafter), target, _HINDSIGHT)
        self._ids = itertools.count()
        self._round_callbacks, self._finish_callbacks = Callbacks(), Callbacks()

    def between_rounds(self, callback: Callable[[], Any]) -> Callable[[], None]:
        """Has `callback()` called before each request, while no model is in use; call what it returns to end this."""
        return self._round_callbacks.register(callback)

    def on_finished(self, callback: Callable[[RequestResult], Any]) -> Callable[[], None]:
        """Has `callback(result)` called for every request; call what it returns to end this."""
        return self._finish_callbacks.register(callback)

    def serve(self, indices: Sequence[int], domain: str) -> list[RequestResult]:
        """
        Serve requests, one after the other.

        Args:
            indices (`Sequence[int]`):
                Numbers of the responses.
            domain (`str`):
                Tag of the traffic.
        """
        return [self._serve(index, domain) for index in indices]

    def _serve(self, index: int, domain: str) -> RequestResult:
        self._round_callbacks.call()
        limit = self._responses.max_new_tokens
        rounds = replay_rounds(self._step, self._responses[index], limit, self._policy)
        prompt, tokens = self._responses.prompt_ids(index), self._responses.response_ids(index)
        stats = RequestStats(
            prompt_tokens=len(prompt), generated_tokens=len(tokens), committed_tokens=max(len(tokens) - 1, 0)
        )
        stats.count_rounds(rounds)
        result = RequestResult(
            request_id=next(self._ids),
            prompt_ids=prompt,
            token_ids=tokens,
            finish_reason="stop" if self._responses.is_finished(index) else "length",
            domain=domain,
            drafter_version=self.drafter_version,
            rounds=rounds,
            stats=stats,
        )
        self._finish_callbacks.call(result)
        return result


@torch.no_grad()
def replay_rounds(
    step: DraftStep, example: dict[str, Any], max_new_tokens: int, policy: LengthPolicy | None = None
) -> list[tuple[int, int]]:
    """
    The rounds that greedy decoding would have taken.

    Args:
        step (`DraftStep`):
            Of the drafter and its target.
        example (`dict[str, Any]`):
            `input_ids` `[n]`, `prompt_length`, and `context_hidden_states` `[n - 1, layers * hidden]` if they are
            known. A response that did not end by itself must be `max_new_tokens` long.
        max_new_tokens (`int`):
            Limit that the response was made with.
        policy (`LengthPolicy`, *optional*):
            How much of a block is verified; by default all of it.

    Returns:
        `list[tuple[int, int]]`: rows verified, the anchor included, and drafts accepted in each round
    """
    policy = policy or FixedLengthPolicy()
    drafter = step.drafter.eval()
    batch = _context_of(step, example)
    ids, prompt_length = example["input_ids"].to(drafter.device), int(example["prompt_length"])
    num_response, longest_block = len(ids) - prompt_length, drafter.config.draft_length + 1
    rounds: list[tuple[int, int]] = []
    place = 0  # of the anchor, counted from the first response token
    while place < num_response - 1:
        places = range(place, min(place + _BLOCKS_AT_ONCE, num_response - 1))
        anchors = torch.arange(places.start, places.stop, device=ids.device) + prompt_length
        judged = step.judge(drafter, {**batch, **_blocks(ids, anchors, drafter.config.draft_length)})
        matches = judged.acceptance.accepted[0].tolist()
        longest = [min(longest_block, max_new_tokens - 1 - offset) for offset in places]
        lengths = policy.choose(drafter, judged.hidden_states[0], RoundContext(longest, num_active=1))
        while place < places.stop:
            length = lengths[place - places.start]
            accepted = min(matches[place - places.start], length - 1)
            rounds.append((length, accepted))
            place += accepted + 1
    return rounds


def _context_of(step: DraftStep, example: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What all chunks of a response share."""
    device = step.drafter.device
    ids = example["input_ids"].to(device)[None]
    context = example.get("context_hidden_states")
    if context is None:
        context = compute_target_features(step.target_model, ids, step.config.target_layer_ids).context[0, :-1]
    return {
        "input_ids": ids,
        "context_hidden_states": context.to(device)[None],
        "finished": torch.tensor([bool(example["finished"])], device=device),
    }


def _blocks(ids: torch.Tensor, anchors: torch.Tensor, draft_length: int) -> dict[str, torch.Tensor]:
    places = label_positions(anchors, draft_length)  # [blocks, draft_length]
    labels = ids[places.clamp(max=len(ids) - 1)].masked_fill(places >= len(ids), IGNORED_LABEL)
    return {"anchors": anchors[None], "labels": labels[None]}
