"""Who answers the requests of a domain shift: the engine, or a replay of what is known that the target says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from transformers import GenerationConfig

from ..errors import InvalidInputError
from ..generation.engine import AdaFlashEngine
from ..generation.engine_handles import RequestResult
from ..generation.length_policies import FixedLengthPolicy, LengthHeadPolicy, LengthPolicy
from ..training.batched_decoding import eos_token_ids_of
from .domain_traffic import DomainResponses
from .trajectory_replay import ReplayEngine


if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .domain_shift import DomainShiftSettings


__all__ = ["Server", "new_server"]


class Server:
    """
    Answers requests.

    Args:
        engine (`AdaFlashEngine` or `ReplayEngine`):
            What recorders and reloaders attach to.
        responses (`DomainResponses`):
            Prompts, and the limit of the responses.
    """

    def __init__(self, engine: AdaFlashEngine | ReplayEngine, responses: DomainResponses) -> None:
        self.engine, self._responses = engine, responses

    @property
    def drafter(self) -> Any:
        """Who drafts."""
        return self.engine.drafter

    @property
    def drafter_version(self) -> int:
        """Its version now."""
        return self.engine.drafter_version

    def serve(self, indices: Sequence[int], domain: str) -> list[RequestResult]:
        """
        Answer requests, greedily.

        Args:
            indices (`Sequence[int]`):
                Numbers of the prompts.
            domain (`str`):
                Tag of the traffic.

        Returns:
            `list[RequestResult]`: in the order of the prompts
        """
        if isinstance(self.engine, ReplayEngine):
            return self.engine.serve(indices, domain)
        config = _greedy(self.engine.target, self._responses.max_new_tokens)
        handles = [self.engine.submit(self._responses.prompt_ids(index), config, domain=domain) for index in indices]
        return [handle.result() for handle in handles]


def new_server(
    target: PreTrainedModel, drafter: Any, responses: DomainResponses, settings: DomainShiftSettings
) -> Server:
    """
    A server as the settings want it.

    Args:
        target (`PreTrainedModel`):
            The target.
        drafter (`DFlashDrafterModel`):
            Who drafts; its weights are exchanged in place.
        responses (`DomainResponses`):
            Prompts, and what the target says.
        settings (`DomainShiftSettings`):
            Live or replayed, and how much of a block is verified.
    """
    policy = _length_policy(settings)
    if not settings.is_live:
        return Server(ReplayEngine(target, drafter, responses, policy), responses)
    engine = AdaFlashEngine(
        target,
        drafter,
        length_policy=policy,
        max_concurrency=settings.concurrency,
        max_queue=max(len(responses), settings.concurrency),
    )
    return Server(engine, responses)


def _length_policy(settings: DomainShiftSettings) -> LengthPolicy:
    if settings.length_policy == "fixed":
        return FixedLengthPolicy()
    if settings.length_policy == "length_head":
        return LengthHeadPolicy(settings.length_scale)
    raise InvalidInputError(f"`length_policy` is {settings.length_policy!r}; it must be 'fixed' or 'length_head'.")


def _greedy(target: PreTrainedModel, max_new_tokens: int) -> GenerationConfig:
    """Greedy and nothing else: what is left open, the target's own generation configuration would fill in."""
    return GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=list(eos_token_ids_of(target)) or -1,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
    )
