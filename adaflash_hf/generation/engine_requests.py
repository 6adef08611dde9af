"""Requests of the engine: what is asked for, how far it has come, and the handle its owner reads tokens from."""

from __future__ import annotations

import asyncio
import enum
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch

from .sequences import SequenceBatch
from .statistics import GenerationStats
from .stopping import StopRules
from .token_choice import TokenChooser


if TYPE_CHECKING:
    from transformers.generation.logits_process import LogitsProcessorList


__all__ = [
    "FinishReason",
    "GenerationRequest",
    "PreparedRequest",
    "RequestHandle",
    "RequestNoise",
    "RequestResult",
    "RequestState",
    "RequestStats",
]

FinishReason = Literal["stop", "length", "cancelled", "error"]


class RequestState(enum.Enum):
    """Where a request is."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    FINISHED = "finished"


class RequestNoise:
    """The random numbers of one request, addressed by the index of the generated token that they decide.

    So a token depends on the seed and on what precedes it, and on nothing else: not on neighbours, on how many rows
    were verified with it, or on whether the request was returned to the queue in between.

    Args:
        seed (`int`): Seed of the request's own generator.
    """

    BLOCK = 64  # tokens; drawn in equal pieces, so that the numbers do not depend on how many are asked for
    DRAFT, ACCEPTANCE, CHOICE = range(3)

    def __init__(self, seed: int):
        self._generator = torch.Generator().manual_seed(seed)
        self._first = 0
        self._numbers = torch.empty(0, 3, dtype=torch.float64)

    def take(self, first: int, count: int) -> torch.Tensor:
        """Numbers in [0, 1) for tokens `first` to `first + count - 1`; earlier ones are forgotten.

        Returns:
            `torch.Tensor` of shape `(count, 3)`: On the CPU, for the draft, its acceptance and the choice.
        """
        while self._first + len(self._numbers) < first + count:
            block = torch.rand(self.BLOCK, 3, dtype=torch.float64, generator=self._generator)
            self._numbers = torch.cat([self._numbers, block])
        self._numbers = self._numbers[first - self._first :]
        self._first = first
        return self._numbers[:count]


@dataclass
class RequestStats(GenerationStats):
    """
    Statistics of one request: those of `generate()`, without seconds that it shares with its neighbours, and more.

    Attributes:
        prompt_tokens (`int`): Tokens of the prompt.
        generated_tokens (`int`): Tokens generated, the one that the prefill predicts included.
        returns (`int`): How often it was sent back to the queue because memory was short.
        queue_s (`float`): Seconds from submission to the first admission.
        time_to_first_token_s (`float`, *optional*): Seconds from submission to the first token.
        token_latency_s (`float`, *optional*): Mean seconds per token after the first.
    """

    prompt_tokens: int = 0
    generated_tokens: int = 0
    returns: int = 0
    queue_s: float = 0.0
    time_to_first_token_s: float | None = None
    token_latency_s: float | None = None


@dataclass(frozen=True)
class RequestResult:
    """
    A request that has ended.

    Attributes:
        request_id (`int`): Number in order of submission.
        prompt_ids (`list[int]`): The prompt.
        token_ids (`list[int]`): Generated tokens, a final EOS included.
        finish_reason (`str`): `"stop"` (an EOS id, a stop string, a criterion), `"length"`, `"cancelled"`, `"error"`.
        seed (`int`, *optional*): Seed of a sampled request: submitting it again gives the same tokens.
        domain (`str`, *optional*): Tag given at submission.
        drafter_version (`int`): Version of the drafter when the request began to decode.
        rounds (`list[tuple[int, int]]`): Per round, rows verified (the anchor included) and drafts accepted.
        stats (`RequestStats`): Counts and times.
        error (`BaseException`, *optional*): What it failed with.
    """

    request_id: int
    prompt_ids: list[int]
    token_ids: list[int]
    finish_reason: FinishReason
    seed: int | None = None
    domain: str | None = None
    drafter_version: int = 0
    rounds: list[tuple[int, int]] = field(default_factory=list)
    stats: RequestStats = field(default_factory=RequestStats)
    error: BaseException | None = None

    @property
    def sequence_ids(self) -> list[int]:
        """Prompt and generated tokens, as `generate()` returns them."""
        return [*self.prompt_ids, *self.token_ids]


class RequestHandle:
    """What `AdaFlashEngine.submit` returns: tokens as they come, the result, and a way to give up.

        for token in handle: ...            # or: async for token in handle
        result = handle.result()            # or: await handle

    If the engine runs in no background thread, waiting for a token runs the engine's rounds. All methods may be called
    from any thread; several readers each see every token.

    Args:
        request_id (`int`): Number of the request.
        prompt_ids (`list[int]`): The prompt.
        wait (`Callable`): `wait(handle, is_ready, timeout)` waits or works until `is_ready()`.
        wake_engine (`Callable`): Tells the engine that there is something to do.
        check_background (`Callable`): Raises if nobody but the caller would run the engine.
    """

    def __init__(
        self,
        request_id: int,
        prompt_ids: list[int],
        wait: Callable[[RequestHandle, Callable[[], bool], float | None], None],
        wake_engine: Callable[[], None],
        check_background: Callable[[], None],
    ):
        self.request_id = request_id
        self.prompt_ids = prompt_ids
        self.changed = threading.Condition()
        self._wait = wait
        self._wake_engine = wake_engine
        self._check_background = check_background
        self._tokens: list[int] = []
        self._result: RequestResult | None = None
        self._is_cancelled = False
        self._listeners: set[Callable[[], None]] = set()

    # The owner's side

    @property
    def token_ids(self) -> list[int]:
        """A copy of the tokens so far."""
        with self.changed:
            return list(self._tokens)

    @property
    def is_done(self) -> bool:
        """Whether the request has ended, in whatever way."""
        return self._result is not None

    @property
    def is_cancelled(self) -> bool:
        """Whether `cancel` was called before the request ended."""
        return self._is_cancelled

    def cancel(self) -> bool:
        """Gives the request up, wherever it is. No token is added after this returns.

        Returns:
            `bool`: Whether it had not ended before.
        """
        with self.changed:
            if self._result is not None or self._is_cancelled:
                return False
            self._is_cancelled = True
        self._wake_engine()
        return True

    def result(self, timeout: float | None = None) -> RequestResult:
        """Waits for the end.

        Args:
            timeout (`float`, *optional*): Seconds to wait at most.

        Returns:
            `RequestResult`: All tokens; those that came before a cancellation too.

        Raises:
            TimeoutError: If it takes longer than `timeout`.
            BaseException: What the request failed with.
        """
        self._wait(self, lambda: self._result is not None, timeout)
        assert self._result is not None
        if self._result.error is not None:
            raise self._result.error
        return self._result

    def __iter__(self) -> Iterator[int]:
        """All tokens from the first on, each as soon as it is there; raises what the request failed with."""
        position = 0
        while True:
            self._wait(self, partial(self._has_news, position), None)
            for token in self._tokens[position:]:
                position += 1
                yield token
            if self._is_read(position):
                return

    def _has_news(self, position: int) -> bool:
        return len(self._tokens) > position or self._result is not None

    def _is_read(self, position: int) -> bool:
        with self.changed:
            result = self._result
            if result is None or position < len(self._tokens):
                return False
        if result.error is not None:
            raise result.error
        return True

    async def __aiter__(self) -> AsyncIterator[int]:
        """As iteration, without blocking the event loop; needs an engine that runs in the background."""
        position = 0
        while True:
            await self._until(position)
            for token in self._tokens[position:]:
                position += 1
                yield token
            if self._is_read(position):
                return

    def __await__(self) -> Generator[Any, None, RequestResult]:
        return self.wait_for_result().__await__()

    async def wait_for_result(self) -> RequestResult:
        """As `result`, without blocking the event loop."""
        await self._until(None)
        return self.result()

    async def _until(self, position: int | None) -> None:
        """Waits for a token beyond `position`, or for the end."""
        loop, event = asyncio.get_running_loop(), asyncio.Event()

        def listener() -> None:
            loop.call_soon_threadsafe(event.set)

        with self.changed:
            self._listeners.add(listener)
        try:
            while self._result is None and (position is None or len(self._tokens) <= position):
                self._check_background()
                event.clear()
                # Looked at again after clearing: what came in between would otherwise be waited for in vain.
                if self._result is None and (position is None or len(self._tokens) <= position):
                    await event.wait()
        finally:
            with self.changed:
                self._listeners.discard(listener)

    # The engine's side

    def add_tokens(self, tokens: list[int]) -> bool:
        """Shows new tokens to the owner; refused once the request was cancelled or has ended."""
        with self.changed:
            if self._is_cancelled or self._result is not None:
                return False
            self._tokens.extend(tokens)
            self._notify()
            return True

    def finish(self, result: RequestResult) -> None:
        """Ends the request; the first call counts."""
        with self.changed:
            if self._result is None:
                self._result = result
                self._notify()

    def _notify(self) -> None:
        self.changed.notify_all()
        for listener in list(self._listeners):
            try:
                listener()
            except RuntimeError:  # its event loop is closed: nobody waits there any more
                self._listeners.discard(listener)

    def __repr__(self) -> str:
        state = "running" if self._result is None else self._result.finish_reason
        return f"RequestHandle(request_id={self.request_id}, {state}, {len(self._tokens)} tokens)"


@dataclass
class PreparedRequest:
    """
    A request as transformers' own `generate()` prepares it.

    Attributes:
        prompt_ids (`list[int]`): The prompt.
        logits_processor (`LogitsProcessorList`): Processors of this request.
        stop_rules (`StopRules`): Its ends.
        do_sample (`bool`): Sample, or take the argmax.
        samples_drafts (`bool`): Whether drafts are sampled and corrected by rejection.
        seed (`int`, *optional*): Seed, if it samples.
        pad_token_id (`int`): For processors that see a padded batch; here there is one row, so it is never seen.
        settings (`tuple`, *optional*): Equal for requests whose rows may be processed together; None if they may not.
    """

    prompt_ids: list[int]
    logits_processor: LogitsProcessorList
    stop_rules: StopRules
    do_sample: bool
    samples_drafts: bool
    seed: int | None
    pad_token_id: int
    settings: tuple[Any, ...] | None


class GenerationRequest:
    """The engine's side of a request.

    Args:
        handle (`RequestHandle`): Its owner's side.
        prepared (`PreparedRequest`): What is asked for.
        domain (`str`, *optional*): A tag for whoever records finished requests.
    """

    def __init__(self, handle: RequestHandle, prepared: PreparedRequest, domain: str | None):
        self.handle = handle
        self.prepared = prepared
        self.domain = domain
        self.arrival = handle.request_id
        self.state = RequestState.WAITING
        self.tokens: list[int] = []
        self.chooser = TokenChooser(prepared.logits_processor, prepared.do_sample, 1)
        self._sequences: SequenceBatch | None = None
        self.noise = RequestNoise(prepared.seed) if prepared.seed is not None else None
        self.target_slot = self.drafter_slot = -1
        self.prefilled = 0
        self.drafter_version: int | None = None
        self.rounds: list[tuple[int, int]] = []
        self.returns = 0
        self.submitted_s = time.perf_counter()
        self.admitted_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None

    @property
    def prompt_ids(self) -> list[int]:
        """The prompt."""
        return self.handle.prompt_ids

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens."""
        return len(self.prompt_ids) + len(self.tokens)

    @property
    def prefill_target(self) -> int:
        """Tokens to have in the cache before decoding: all but the anchor, which the first verification brings."""
        return self.num_tokens - 1 if self.tokens else len(self.prompt_ids)

    @property
    def prefill_remaining(self) -> int:
        """Tokens still to be prefilled."""
        return 0 if self.state is RequestState.DECODING else self.prefill_target - self.prefilled

    @property
    def anchor_id(self) -> int:
        """The last committed token."""
        return self.tokens[-1]

    @property
    def remaining(self) -> int:
        """Tokens that it may still grow by."""
        return self.prepared.stop_rules.remaining(self.num_tokens)

    def next_chunk(self, count: int) -> list[int]:
        """The next `count` tokens to prefill."""
        prompt, begin, end = self.prompt_ids, self.prefilled, self.prefilled + count
        # After a return, generated tokens are prefilled too.
        return prompt[begin:end] + self.tokens[max(begin - len(prompt), 0) : max(end - len(prompt), 0)]

    def sequences_on(self, device: torch.device) -> SequenceBatch:
        """What processors and criteria read, made when the first of them asks."""
        if self._sequences is None:
            prompt = torch.tensor([self.prompt_ids], device=device)
            self._sequences = SequenceBatch(prompt, self.prepared.pad_token_id)
            self._sequences.append(0, self.tokens)
        return self._sequences

    def cut(self, tokens: list[int], device: torch.device) -> tuple[int, bool]:
        """How many of `tokens` the stop rules let through, and whether the request ends there."""

        def prefixes(length: int, pending: dict[int, list[int]]) -> torch.Tensor:
            return self.sequences_on(device).prefixes(length, pending)

        return self.prepared.stop_rules.cut(tokens, self.num_tokens, 0, prefixes)

    def commit(self, tokens: list[int]) -> float | None:
        """Appends tokens and shows them to the owner; says how many seconds after the last ones, if there are any."""
        if not self.handle.add_tokens(tokens):
            return None
        now, before = time.perf_counter(), self.last_token_s
        self.tokens.extend(tokens)
        if self._sequences is not None:
            self._sequences.append(0, tokens)
        self.last_token_s = now
        if before is None:
            self.first_token_s = now
            return None
        return now - before

    def build_result(self, reason: FinishReason, error: BaseException | None = None) -> RequestResult:
        """What is handed to the owner and to the recorder."""
        return RequestResult(
            request_id=self.handle.request_id,
            prompt_ids=self.prompt_ids,
            token_ids=list(self.tokens),
            finish_reason=reason,
            seed=self.prepared.seed,
            domain=self.domain,
            drafter_version=self.drafter_version or 0,
            rounds=self.rounds,
            stats=self._build_stats(),
            error=error,
        )

    def _build_stats(self) -> RequestStats:
        now = time.perf_counter()
        stats = RequestStats(
            prompt_tokens=len(self.prompt_ids),
            generated_tokens=len(self.tokens),
            returns=self.returns,
            committed_tokens=max(len(self.tokens) - 1, 0),
            queue_s=(self.admitted_s or now) - self.submitted_s,
            total_s=now - self.submitted_s,
        )
        stats.count_rounds(self.rounds)
        if self.first_token_s is not None and self.last_token_s is not None:
            stats.time_to_first_token_s = self.first_token_s - self.submitted_s
            if len(self.tokens) > 1:
                stats.token_latency_s = (self.last_token_s - self.first_token_s) / (len(self.tokens) - 1)
        return stats
