"""What the owner of a request holds: a handle to read tokens from and to give up with, and the result."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from .statistics import GenerationStats


__all__ = ["FinishReason", "RequestHandle", "RequestResult", "RequestStats"]

FinishReason = Literal["stop", "length", "cancelled", "error"]


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

    def nudge(self) -> None:
        """Lets whoever waits look again at how things stand."""
        with self.changed:
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
