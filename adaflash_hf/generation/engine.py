"""`AdaFlashEngine`: many requests at once, joining and leaving between rounds, each with its own settings."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers.generation import GenerationConfig
from transformers.modeling_utils import PreTrainedModel

from ..errors import EngineQueueFullError, EngineStoppedError, InvalidInputError
from ..openmp_workers import release_openmp_workers
from .automatic_prepacking import AutomaticPrepacking
from .callbacks import Callbacks
from .compatibility import check_drafter_fits_target, unwrap_model
from .engine_bench import EngineRoundBench
from .engine_fronts import BackgroundThread
from .engine_handles import FinishReason, RequestHandle, RequestResult
from .engine_preparation import RequestPreparation
from .engine_requests import GenerationRequest, RequestState
from .engine_rounds import EngineRounds
from .engine_statistics import EngineRecorder, EngineStats
from .fair_lock import FairLock
from .length_policies import LengthPolicy, build_length_policy
from .scheduler import Scheduler, SchedulerConfig


__all__ = ["AdaFlashEngine"]

logger = logging.getLogger(__name__)


class AdaFlashEngine:
    """Serves many requests on one target, with or without a drafter.

        engine = AdaFlashEngine(target, drafter)
        handles = [engine.submit(ids, max_new_tokens=100) for ids in prompts]
        for token in handles[0]: ...

    Rounds are run by whoever waits for a token, by [`step`], or by a background thread between [`start`] and [`stop`]
    (`with engine:` does both). Greedy tokens are those of plain decoding; sampled ones depend on prompt, settings and
    seed, and with argmax drafts on nothing else.

    Args:
        target (`PreTrainedModel`): A decoder of full and sliding-window attention layers, possibly wrapped.
        drafter (`PreTrainedModel`, *optional*): A DFlash drafter; without one this is plain decoding.
        length_policy (`str` or `LengthPolicy`, *optional*): As in `generate()`; `"fixed"` when not given.
        draft_proposal (`str`, defaults to `"argmax"`):
            As in `generate()`. With `"sample"`, what a request draws depends on its verify lengths too, and so on its
            neighbours if the policy looks at them.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): Finds the stop strings of requests that bring no tokenizer.
        max_concurrency (`int`, defaults to 64): Most requests that run at once.
        max_queue (`int`, defaults to 1024): Most requests that wait; further ones are refused.
        memory_limit_bytes (`int`, *optional*): Most bytes of the caches, activations not counted.
        prefill_chunk_tokens (`int`, *optional*):
            Most prompt tokens per round, which all others wait for; 256 on a CPU and 1024 elsewhere when not given.
        concurrency_ema_weight (`float`, defaults to 0.1): The paper's beta, see [`SchedulerConfig`].

    Raises:
        InvalidInputError: If an argument has a value that is not allowed.
        DrafterCompatibilityError: If the drafter does not fit the target.
        UnsupportedGenerationError: If packed batches cannot serve this target.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: PreTrainedModel | None = None,
        *,
        length_policy: str | LengthPolicy | None = None,
        draft_proposal: str = "argmax",
        tokenizer: Any = None,
        max_concurrency: int = 64,
        max_queue: int = 1024,
        memory_limit_bytes: int | None = None,
        prefill_chunk_tokens: int | None = None,
        concurrency_ema_weight: float = 0.1,
    ):
        if max_queue < 1:
            raise InvalidInputError(f"`max_queue` is {max_queue}, expected 1 or more.")
        if prefill_chunk_tokens is None:
            prefill_chunk_tokens = 256 if unwrap_model(target).device.type == "cpu" else 1024
        config = SchedulerConfig(max_concurrency, prefill_chunk_tokens, memory_limit_bytes, concurrency_ema_weight)
        self.policy: LengthPolicy | None = None
        if drafter is not None:
            check_drafter_fits_target(drafter, target)
            self.policy = build_length_policy(length_policy, unwrap_model(drafter), is_engine=True)
        elif length_policy is not None:
            raise InvalidInputError(
                f"`length_policy` is {length_policy!r} but there is no drafter. Pass one, or leave the policy out."
            )
        self.target, self.drafter = target, drafter
        self.max_queue = max_queue
        self._prepacking = AutomaticPrepacking(target, drafter)
        self._preparation = RequestPreparation(target, tokenizer, draft_proposal)
        self._recorder = EngineRecorder(unwrap_model(target).device)
        self._rounds = EngineRounds(
            target, drafter, self.policy, self._recorder, prefill_chunk_tokens, memory_limit_bytes is not None
        )
        self._scheduler: Scheduler[GenerationRequest] = Scheduler(config, self._rounds.gauge)
        self._ids = itertools.count()
        self._inbox: deque[GenerationRequest] = deque()
        self._inbox_lock = threading.Lock()
        self._step_lock = FairLock()  # others wait for the end of a round, not until there are none
        self._stepping: int | None = None  # thread that is in a round
        self._end: BaseException | None = None  # what the engine died of
        self._is_prepared = False
        self._round_callbacks, self._finish_callbacks = Callbacks(), Callbacks()
        self._thread = BackgroundThread(self)

    # Submitting

    def submit(
        self,
        input_ids: Sequence[int] | torch.Tensor,
        generation_config: GenerationConfig | None = None,
        *,
        seed: int | None = None,
        domain: str | None = None,
        **kwargs: Any,
    ) -> RequestHandle:
        """Takes a request. May be called from any thread, callbacks included.

        Args:
            input_ids (`Sequence[int]` or `torch.Tensor` of shape `(n,)` or `(1, n)`): One prompt, without padding.
            generation_config (`GenerationConfig`, *optional*): As in `generate()`.
            seed (`int`, *optional*): Seed of a sampled request; taken from torch's global generator when not given.
            domain (`str`, *optional*): A tag that its result carries.
            kwargs (`dict`):
                Further arguments of `generate()`: `max_new_tokens`, `do_sample`, `temperature`, `stop_strings`,
                `eos_token_id`, `logits_processor`, `stopping_criteria`, …

        Returns:
            `RequestHandle`: Tokens and result.

        Raises:
            InvalidInputError: If prompt, lengths or settings are not allowed, or it could never fit into memory.
            UnsupportedGenerationError: If an option cannot be honoured for one request among many.
            EngineQueueFullError: If `max_queue` requests wait already.
            EngineStoppedError: If the engine has failed.
        """
        self._check_alive()
        self._check_queue()
        prepared = self._preparation.prepare(input_ids, generation_config, seed, **kwargs)
        self._check_memory(len(prepared.prompt_ids), prepared.stop_rules.max_length)
        with self._inbox_lock:
            self._check_alive()
            self._check_queue()
            handle = RequestHandle(
                next(self._ids), prepared.prompt_ids, self._wait, self._thread.wake, self._check_background
            )
            self._inbox.append(GenerationRequest(handle, prepared, domain))
            self._recorder.submitted += 1
        self._thread.wake()
        return handle

    @property
    def has_requests(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._inbox or self._scheduler.waiting or self._scheduler.running)

    @property
    def queue_depth(self) -> int:
        """Requests that wait."""
        return len(self._inbox) + len(self._scheduler.waiting)

    def memory_bytes_for(self, num_tokens: int) -> int:
        """Bytes of cache that one request takes when it has `num_tokens` tokens, to choose a limit by."""
        return self._rounds.bytes_for(num_tokens)

    def _check_queue(self) -> None:
        if self.queue_depth >= self.max_queue:
            raise EngineQueueFullError(
                f"{self.queue_depth} requests wait already and `max_queue` is {self.max_queue}. Submit again when "
                "some have finished, or allow for a longer queue."
            )

    def _check_memory(self, prompt_tokens: int, max_length: int | None) -> None:
        limit = self._scheduler.config.memory_limit_bytes
        total = (max_length or prompt_tokens) + self._rounds.longest_verify_length
        needed = self._scheduler.largest_request_bytes(total)
        if limit is not None and needed > limit:
            raise InvalidInputError(
                f"With up to {max_length} tokens this request may need {needed} bytes of cache, and "
                f"`memory_limit_bytes` is {limit}, so that it might never finish. Lower `max_new_tokens`, or raise "
                "the limit."
            )

    # Running

    def step(self) -> bool:
        """Runs one round, unless there is nothing to do.

        Returns:
            `bool`: Whether there was.

        Raises:
            EngineStoppedError: If the engine has failed before.
            BaseException: What it fails with now; all its requests fail too.
        """
        if self._stepping == threading.get_ident():
            raise RuntimeError("A callback must not wait for tokens or call `step`: it runs between rounds itself.")
        with self._step_lock:
            self._check_alive()
            self._stepping = threading.get_ident()
            try:
                with torch.no_grad(), self._prepacking:
                    return self._step()
            except BaseException as error:
                self._die(error)
                raise
            finally:
                self._stepping = None

    def _step(self) -> bool:
        started_s = time.perf_counter()
        self._round_callbacks.call()
        self._take_inbox()
        has_dropped = self._drop_cancelled()
        queued = self.queue_depth
        has_returned = self._return_youngest()
        admitted = self._scheduler.admit(self._rounds.longest_verify_length)
        for request in admitted:
            self._rounds.open(request)
            request.admitted_s = request.admitted_s or time.perf_counter()
        running = self._scheduler.running
        if not running:
            return has_dropped
        if not self._is_prepared:
            self.prepare()
        self._rounds.follow(running)
        chunks = self._scheduler.plan_prefill()
        decoding = [request for request in running if request.state is RequestState.DECODING]
        is_typical = not (chunks or admitted or has_returned)
        num_running = len(running)
        try:
            report = self._rounds.run(decoding, chunks, started_s if is_typical else None)
        except torch.OutOfMemoryError as error:
            self._survive_out_of_memory(error)
            return True
        self._finish_ended()
        self._scheduler.observe(has_returned)
        self._recorder.count_step(report, started_s, num_running, queued, self._rounds.memory_bytes)
        return True

    def _finish_ended(self) -> None:
        for request in [request for request in self._scheduler.running if request.end is not None]:
            assert request.end is not None
            self._finish(request, request.end, request.failure)

    def _take_inbox(self) -> None:
        with self._inbox_lock:
            while self._inbox:
                self._scheduler.add(self._inbox.popleft())

    def _drop_cancelled(self) -> bool:
        everyone = [*self._scheduler.running, *self._scheduler.waiting]
        cancelled = [request for request in everyone if request.handle.is_cancelled]
        for request in cancelled:
            self._finish(request, "cancelled")
        return bool(cancelled)

    def _return_youngest(self) -> bool:
        """Sends requests back to the queue, their tokens kept, until the coming round fits into memory."""
        has_returned = False
        while (request := self._scheduler.overshoot(self._rounds.longest_verify_length)) is not None:
            self._return(request)
            has_returned = True
        return has_returned

    def _return(self, request: GenerationRequest) -> None:
        self._scheduler.take_back(request)
        self._rounds.close(request)
        request.state = RequestState.WAITING
        request.returns += 1
        self._recorder.returned += 1

    def _survive_out_of_memory(self, error: torch.OutOfMemoryError) -> None:
        """The device had less memory than was thought: begin again with half as many, or give up the only one."""
        self._finish_ended()  # some may have got through before it happened
        running = list(self._scheduler.running)
        logger.warning("Out of memory with %d requests; going on with fewer. %s", len(running), error)
        if len(running) == 1:
            self._finish(running[0], "error", error)
            return
        for request in running:
            self._return(request)
        self._scheduler.sustainable_concurrency = len(running) / 2
        torch.cuda.empty_cache()  # nothing where there is no GPU

    def _finish(self, request: GenerationRequest, reason: FinishReason, error: BaseException | None = None) -> None:
        self._scheduler.remove(request)
        self._rounds.close(request)
        self._tell_the_end(request, reason, error)

    def _tell_the_end(self, request: GenerationRequest, reason: FinishReason, error: BaseException | None) -> None:
        request.state = RequestState.FINISHED
        # An owner who gave up while the last tokens were on their way was promised that no more come.
        reason = "cancelled" if request.handle.is_cancelled else reason
        result = request.build_result(reason, error if reason == "error" else None)
        self._recorder.count_finished(result)
        request.handle.finish(result)
        self._finish_callbacks.call(result)

    def _die(self, error: BaseException) -> None:
        """Tells everyone who waits that nothing more will come."""
        with self._inbox_lock:
            self._end = error
            everyone = [*self._scheduler.running, *self._scheduler.waiting, *self._inbox]
        for requests in (self._inbox, self._scheduler.running, self._scheduler.waiting):
            requests.clear()
        for request in everyone:
            self._tell_the_end(request, "error", self._stopped_error())

    def _stopped_error(self) -> EngineStoppedError:
        error = EngineStoppedError(
            f"The engine failed with {type(self._end).__name__}: {self._end}. Make a new one; the cause of this error "
            "says where it happened."
        )
        error.__cause__ = self._end
        return error

    def _check_alive(self) -> None:
        if self._end is not None:
            raise self._stopped_error()

    def prepare(self) -> None:
        """Lets the length policy measure what it needs to know. Otherwise the first round does."""
        with self._step_lock, self._prepacking:
            self._is_prepared = True
            if self.policy is not None and self.drafter is not None:
                limits = self._scheduler.config.max_concurrency, self._scheduler.config.memory_limit_bytes
                self.policy.prepare(EngineRoundBench(self.target, self.drafter, *limits))

    # Waiting

    def _wait(self, handle: RequestHandle, is_ready: Callable[[], bool], timeout: float | None) -> None:
        """Waits until `is_ready`, running rounds if nobody else does."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not is_ready():
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError(f"Request {handle.request_id} is not ready after {timeout} seconds.")
            if self.is_running and self._stepping != threading.get_ident():
                release_openmp_workers()
                with handle.changed:
                    handle.changed.wait_for(is_ready, min(left or 0.5, 0.5))  # the thread may be stopped meanwhile
            elif not self.step() and not is_ready() and not self.is_running:
                raise RuntimeError(f"Request {handle.request_id} is neither queued nor finished.")

    def _check_background(self) -> None:
        if not self.is_running:
            raise InvalidInputError(
                "Nothing runs the engine while you `await` its tokens. Call `engine.start()` first, or use "
                "`AsyncEngine`."
            )

    # Background

    @property
    def is_running(self) -> bool:
        """Whether a background thread runs the rounds."""
        return self._thread.is_running

    def start(self) -> AdaFlashEngine:
        """Runs rounds in a background thread from now on."""
        self._check_alive()
        self._thread.start()
        return self

    def stop(self, drain: bool = True, timeout: float | None = None) -> None:
        """Ends the background thread. Requests may still be submitted, and [`start`] called again.

        Args:
            drain (`bool`, defaults to `True`): Finish all requests first; otherwise they are cancelled.
            timeout (`float`, *optional*): Seconds after which requests are cancelled even so.
        """
        if self._stepping == threading.get_ident():
            raise RuntimeError("A callback must not stop the engine that runs it: call `stop` from another thread.")
        if self._thread.stop(drain, timeout):
            # Requests that came too late to be drained stay; whoever waits for one must see that nobody works on it.
            for request in self.all_requests():
                request.handle.nudge()
        else:
            self.cancel_all()

    def all_requests(self) -> list[GenerationRequest]:
        """Those that wait or run between two rounds: within one, a request may be on its way from list to list."""
        with self._step_lock, self._inbox_lock:
            return [*self._inbox, *self._scheduler.running, *self._scheduler.waiting]

    def cancel_all(self) -> None:
        """Cancels every request that waits or runs."""
        with self._step_lock:
            for request in self.all_requests():
                request.handle.cancel()
            if self._end is None:
                self._take_inbox()
                self._drop_cancelled()

    def __enter__(self) -> AdaFlashEngine:
        return self.start()

    def __exit__(self, error_type: type[BaseException] | None, *exc: object) -> None:
        self.stop(drain=error_type is None)

    # Hooks and statistics

    @property
    def drafter_version(self) -> int:
        """Version of the drafter, which results carry; to be set by whoever exchanges its weights."""
        return self._rounds.drafter_version

    @drafter_version.setter
    def drafter_version(self, version: int) -> None:
        if version != self._rounds.drafter_version and self.policy is not None:
            self.policy.drafter_changed()
        self._rounds.drafter_version = version

    def between_rounds(self, callback: Callable[[], Any]) -> Callable[[], None]:
        """Has `callback()` called before every round, and about once a second by a background thread that has nothing
        to do, always while no model is in use.

        Returns:
            `Callable`: Call it to end this.
        """
        return self._round_callbacks.register(callback)

    def on_finished(self, callback: Callable[[RequestResult], Any]) -> Callable[[], None]:
        """Has `callback(result)` called for every request that ends, in whatever way: also if the engine fails.

        Returns:
            `Callable`: Call it to end this.
        """
        return self._finish_callbacks.register(callback)

    def statistics(self) -> EngineStats:
        """Counts and times since the engine was made or [`reset_statistics`] was called."""
        with self._step_lock:
            return self._recorder.snapshot(
                active=len(self._scheduler.running),
                queued=self.queue_depth,
                admission_target=self._scheduler.admission_target,
                memory_bytes=self._rounds.memory_bytes,
            )

    def reset_statistics(self) -> None:
        """Begins to count anew, after a warm-up for example."""
        with self._step_lock:
            self._recorder.reset()
