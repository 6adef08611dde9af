"""Two ways of running an engine besides calling `step`: a background thread, and asyncio."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import weakref
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..errors import EngineQueueFullError
from ..openmp_workers import release_openmp_workers
from .engine_handles import RequestHandle, RequestResult


if TYPE_CHECKING:
    from .engine import AdaFlashEngine


__all__ = ["AsyncEngine", "BackgroundThread"]

logger = logging.getLogger(__name__)

# How long a thread sleeps when there is nothing to do: those who want to be called between rounds are called then too.
IDLE_S = 1.0


class _Signals:
    """What a thread and its engine tell each other. Holds no reference to the engine, so that it can be collected."""

    def __init__(self) -> None:
        self.news = threading.Event()
        self.is_stopping = False


class BackgroundThread:
    """Runs an engine's rounds as long as there are any, and sleeps otherwise.

    The thread ends with `stop`, with the interpreter, or when nobody holds the engine or one of its handles any more.

    Args:
        engine (`AdaFlashEngine`): The engine.
    """

    def __init__(self, engine: AdaFlashEngine):
        self._engine = weakref.ref(engine)
        self._lock = threading.Lock()
        self._signals = _Signals()
        self._thread: threading.Thread | None = None
        self._finalizer: weakref.finalize | None = None

    @property
    def is_running(self) -> bool:
        """Whether the thread is there."""
        thread = self._thread
        return thread is not None and thread.is_alive()

    def wake(self) -> None:
        """Says that there is something to do."""
        self._signals.news.set()

    def start(self) -> None:
        """Starts the thread, unless it runs. After one that is being stopped, a new one goes on."""
        with self._lock:
            engine = self._engine()
            if engine is None or (self.is_running and not self._signals.is_stopping):
                return
            signals = self._signals = _Signals()
            self._thread = threading.Thread(
                target=_run_rounds, args=(self._engine, signals), name="adaflash-engine", daemon=True
            )
            # A daemon that is inside a matmul while the interpreter goes down would crash it.
            self._finalizer = weakref.finalize(engine, _end_thread, signals, self._thread)
            release_openmp_workers()
            self._thread.start()

    def stop(self, drain: bool, timeout: float | None) -> bool:
        """Ends the thread, see `AdaFlashEngine.stop`.

        Returns:
            `bool`: Whether all that was to be finished is finished.
        """
        with self._lock:
            thread, signals, finalizer, engine = self._thread, self._signals, self._finalizer, self._engine()
        assert engine is not None
        if thread is None:
            return drain
        # Without the lock: who starts or stops the engine meanwhile may be the thread itself, in a callback.
        is_drained = drain and _wait_until_idle(engine, thread, timeout)
        _end_thread(signals, thread)
        if finalizer is not None:
            finalizer.detach()
        with self._lock:
            if self._thread is thread:  # else another one was started meanwhile, and stays
                self._thread = self._finalizer = None
        return is_drained


def _wait_until_idle(engine: AdaFlashEngine, thread: threading.Thread, timeout: float | None) -> bool:
    deadline = None if timeout is None else time.monotonic() + timeout
    # A request on its way from list to list is in none, so emptiness is looked at again between two rounds.
    while thread.is_alive() and (engine.has_requests or engine.all_requests()):
        if deadline is not None and time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def _end_thread(signals: _Signals, thread: threading.Thread) -> None:
    signals.is_stopping = True
    signals.news.set()
    if thread is not threading.current_thread():
        thread.join()


def _run_rounds(engine_ref: weakref.ref[AdaFlashEngine], signals: _Signals) -> None:
    while not signals.is_stopping:
        signals.news.clear()
        engine = engine_ref()
        if engine is None:
            return
        try:
            is_busy = engine.step()
        except BaseException:
            # The requests were told; whoever submits the next one will be, too.
            logger.exception("The engine failed in its background thread.")
            return
        del engine
        if not is_busy:
            signals.news.wait(IDLE_S)


class AsyncEngine:
    """An engine for asyncio: `async with AsyncEngine(engine) as front: ...`.

    Submitting is done in a worker thread, rounds run in the engine's own, so that the event loop is never held up.

    Args:
        engine (`AdaFlashEngine`): The engine; started and stopped with the `async with` block.
    """

    def __init__(self, engine: AdaFlashEngine):
        self.engine = engine

    async def __aenter__(self) -> AsyncEngine:
        self.engine.start()
        return self

    async def __aexit__(self, error_type: type[BaseException] | None, *exc: object) -> None:
        await asyncio.to_thread(self.engine.stop, error_type is None)

    async def submit(
        self, input_ids: Sequence[int] | torch.Tensor, *args: Any, wait_for_queue: bool = False, **kwargs: Any
    ) -> RequestHandle:
        """As `AdaFlashEngine.submit`. Cancelling the awaiting task cancels the request.

        Args:
            input_ids (`Sequence[int]` or `torch.Tensor`): One prompt.
            args (`tuple`): Passed on.
            wait_for_queue (`bool`, defaults to `False`): Wait while the queue is full, rather than raise.
            kwargs (`dict`): Passed on.
        """
        handles: list[RequestHandle] = []
        is_abandoned = threading.Event()

        def submit() -> RequestHandle:
            handle = self.engine.submit(input_ids, *args, **kwargs)
            handles.append(handle)
            if is_abandoned.is_set():
                handle.cancel()
            return handle

        while True:
            try:
                return await asyncio.to_thread(submit)
            except asyncio.CancelledError:
                # The worker thread goes on, or is through already: nobody will ever see the handle.
                is_abandoned.set()
                for handle in handles:
                    handle.cancel()
                raise
            except EngineQueueFullError:
                if not wait_for_queue:
                    raise
                await asyncio.sleep(0.01)

    async def stream(self, input_ids: Sequence[int] | torch.Tensor, *args: Any, **kwargs: Any) -> AsyncIterator[int]:
        """Tokens of one request as they come. Leaving the loop early cancels the request."""
        handle = await self.submit(input_ids, *args, **kwargs)
        try:
            async for token in handle:
                yield token
        finally:
            handle.cancel()

    async def generate(self, input_ids: Sequence[int] | torch.Tensor, *args: Any, **kwargs: Any) -> RequestResult:
        """The result of one request. Cancelling the awaiting task cancels the request."""
        handle = await self.submit(input_ids, *args, **kwargs)
        try:
            return await handle
        finally:
            handle.cancel()
