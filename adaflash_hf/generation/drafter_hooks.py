"""What others may hang on a drafter: a look-in between rounds of `generate()`, and news of each finished request.

Off unless somebody registers; `AdaFlashEngine` has methods of the same names of its own. Hooks are kept beside the
drafter, not in it, so that copying, saving and compiling it are what they were.
"""

from __future__ import annotations

import contextvars
import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .callbacks import Callbacks
from .compatibility import unwrap_model
from .engine_requests import FinishReason, RequestResult, RequestStats
from .sequences import SequenceBatch
from .stopping import StopRules


if TYPE_CHECKING:
    from .length_policies import LengthPolicy


__all__ = ["DrafterHooks", "RequestLog", "hooks_of", "traffic_domain"]

_HOOKS: weakref.WeakKeyDictionary[nn.Module, DrafterHooks] = weakref.WeakKeyDictionary()
_DOMAIN: contextvars.ContextVar[str | None] = contextvars.ContextVar("adaflash_traffic_domain", default=None)
_REQUEST_IDS = itertools.count()


@contextmanager
def traffic_domain(domain: str | None) -> Iterator[None]:
    """
    Tag the requests that `generate()` finishes within the block, in this thread or task.

    Args:
        domain (`str`, *optional*): The tag, such as `"math"`.
    """
    token = _DOMAIN.set(domain)
    try:
        yield
    finally:
        _DOMAIN.reset(token)


class DrafterHooks:
    """
    Callbacks of `generate()` calls that use one drafter. A callback that fails is logged and changes nothing else.
    """

    def __init__(self) -> None:
        self._drafter_version = 0
        self._policies: list[weakref.ref[LengthPolicy]] = []
        self._round_callbacks, self._finish_callbacks = Callbacks("a drafter"), Callbacks("a drafter")

    @property
    def drafter_version(self) -> int:
        """Version of the weights, which requests carry; to be set by whoever exchanges them."""
        return self._drafter_version

    @drafter_version.setter
    def drafter_version(self, version: int) -> None:
        if version != self._drafter_version:
            for reference in self._policies:
                if (policy := reference()) is not None:
                    policy.drafter_changed()
        self._drafter_version = version

    def add_policy(self, policy: LengthPolicy) -> None:
        """Has a length policy told of every other version of the drafter, as long as it lives.

        Args:
            policy (`LengthPolicy`): The policy of a call, which may serve later ones too.
        """
        known = [(reference, reference()) for reference in self._policies]
        others = [reference for reference, other in known if other is not None and other is not policy]
        self._policies = [*others, weakref.ref(policy)]

    def between_rounds(self, callback: Callable[[], Any]) -> Callable[[], None]:
        """Has `callback()` called before every round, while this thread uses no model.

        Returns:
            `Callable`: Call it to end this.
        """
        return self._round_callbacks.register(callback)

    def on_finished(self, callback: Callable[[RequestResult], Any]) -> Callable[[], None]:
        """Has `callback(result)` called for every sequence of every call, when the call ends.

        Returns:
            `Callable`: Call it to end this.
        """
        return self._finish_callbacks.register(callback)

    @property
    def is_used(self) -> bool:
        """Whether anybody has registered."""
        return bool(self._round_callbacks or self._finish_callbacks)

    def before_round(self) -> None:
        """Calls those who asked to be called between rounds."""
        self._round_callbacks.call()

    def finish(self, result: RequestResult) -> None:
        """Calls those who asked for finished requests."""
        self._finish_callbacks.call(result)


def hooks_of(drafter: Any) -> DrafterHooks:
    """
    The hooks of a drafter, made at the first call.

    Args:
        drafter (`PreTrainedModel`): The drafter, possibly wrapped.
    """
    return _HOOKS.setdefault(unwrap_model(drafter), DrafterHooks())


class RequestLog:
    """
    Rounds of one `generate()` call.

    Args:
        hooks (`DrafterHooks`): Whom to tell.
        batch_size (`int`): Sequences of the call.
    """

    def __init__(self, hooks: DrafterHooks, batch_size: int):
        self._hooks = hooks
        self._drafter_version = hooks.drafter_version
        self.before_round = hooks.before_round
        self.rounds: list[list[tuple[int, int]]] = [[] for _ in range(batch_size)]

    @classmethod
    def start(cls, drafter: Any, batch_size: int) -> RequestLog | None:
        """A log, or None if nobody has registered with this drafter."""
        hooks = _HOOKS.get(unwrap_model(drafter))
        return None if hooks is None or not hooks.is_used else cls(hooks, batch_size)

    def finish(self, input_ids: torch.Tensor, mask: Any, sequences: SequenceBatch, rules: StopRules) -> None:
        """Tells of all sequences.

        Args:
            input_ids (`torch.Tensor` of shape `(batch_size, prompt_length)`): Left-padded prompts.
            mask (`torch.Tensor` of shape `(batch_size, prompt_length)`, *optional*): 1 where a prompt has a token.
            sequences (`SequenceBatch`): Prompts and what was generated.
            rules (`StopRules`): Ends of a sequence.
        """
        # A prompt given as embeddings, or only in part, is not known here.
        if input_ids.shape[1] == 0 or (mask is not None and mask.shape != input_ids.shape):
            return
        prompts = input_ids.tolist()
        used = None if mask is None else mask.tolist()
        for row, rounds in enumerate(self.rounds):
            tokens = sequences.generated_ids(row)
            ends_by_itself = tokens[-1] in rules.eos_token_ids or rules.remaining(sequences.length(row)) > 0
            reason: FinishReason = "stop" if ends_by_itself else "length"
            stats = RequestStats(generated_tokens=len(tokens), committed_tokens=len(tokens) - 1)
            stats.count_rounds(rounds)
            prompt = (
                prompts[row]
                if used is None
                else [i for i, is_token in zip(prompts[row], used[row], strict=True) if is_token]
            )
            stats.prompt_tokens = len(prompt)
            self._hooks.finish(
                RequestResult(
                    request_id=next(_REQUEST_IDS),
                    prompt_ids=prompt,
                    token_ids=list(tokens),
                    finish_reason=reason,
                    domain=_DOMAIN.get(),
                    drafter_version=self._drafter_version,
                    rounds=rounds,
                    stats=stats,
                )
            )
