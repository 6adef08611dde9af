"""Takes finished requests from `generate()` and from engines to the replay buffer, without ever holding one up.

Handing over is an append to a bounded queue; a thread does the rest. When the queue is full, or what is in it cannot
be written for long enough, trajectories are dropped and counted. What waits in the queue when the process is killed is
lost, at most a moment's traffic.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from ..errors import InvalidInputError, ReplayBufferError
from ..generation.drafter_hooks import hooks_of
from ..generation.engine_requests import RequestResult
from .recorded_trajectory import RecordedTrajectory
from .replay_buffer import BufferSettings, ReplayBuffer


__all__ = ["PendingTrajectory", "RecorderCounts", "TrajectoryRecorder"]

logger = logging.getLogger(__name__)

_BATCH = 64
_LONGEST_PAUSE_S = 30.0
_SILENCE_S = 60.0


@dataclass
class RecorderCounts:
    """
    What became of the requests a recorder was told of.

    Attributes:
        received: Requests that ended.
        written: Trajectories that are in the buffer.
        too_short: Requests that failed, or with too little response or too long a prompt to learn from.
        dropped: Requests that found the queue full.
        invalid: Requests that no buffer takes, such as empty prompts.
        lost: Trajectories still unwritten when the recorder was closed.
        write_failures: Attempts to write that failed; each is repeated.
        last_error: The last failure's message; empty once writing works again.
    """

    received: int = 0
    written: int = 0
    too_short: int = 0
    dropped: int = 0
    invalid: int = 0
    lost: int = 0
    write_failures: int = 0
    last_error: str = ""


class PendingTrajectory(Protocol):
    """A finished request of which the recorder's thread has yet to make a trajectory."""

    def trajectory(self) -> RecordedTrajectory | None:
        """The trajectory; None if there is nothing to learn from. What it raises is counted and logged."""


class TrajectoryRecorder:
    """
    Records traffic.

        with TrajectoryRecorder("buffer.sqlite") as recorder:
            recorder.attach(drafter)            # generate(assistant_model=drafter)
            recorder.attach_engine(engine)      # AdaFlashEngine

    Args:
        buffer (`str` or `Path`):
            File of the replay buffer.
        settings (`BufferSettings`, *optional*):
            Limits of a new buffer, and the target.
        max_tokens (`int`, *optional*, defaults to 2048):
            Longer trajectories are cut at the end.
        max_queue (`int`, *optional*, defaults to 1024):
            Requests that may wait to be written.
        flush_interval_s (`float`, *optional*, defaults to 0.2):
            How long a request may wait for others to be written together with.
        decode_text (`Callable[[list[int]], str]`, *optional*):
            Makes text of response tokens, which is then kept as well; by default no text is stored.

    Raises:
        InvalidInputError: The buffer belongs to another target. A buffer that cannot be opened is no error here; it is
            tried again as long as the recorder lives.
    """

    def __init__(
        self,
        buffer: str | Path,
        settings: BufferSettings | None = None,
        *,
        max_tokens: int = 2048,
        max_queue: int = 1024,
        flush_interval_s: float = 0.2,
        decode_text: Callable[[list[int]], str] | None = None,
    ) -> None:
        self._path, self._settings = Path(buffer), settings
        self._max_tokens, self._flush_interval_s, self._decode_text = max_tokens, flush_interval_s, decode_text
        self._queue: queue.Queue[RequestResult | PendingTrajectory] = queue.Queue(max_queue)
        self._counts = RecorderCounts()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._thread_pid = 0
        self._starting = threading.Lock()
        self._done = 0  # of those that came into the queue, in their order
        self._detach: list[Callable[[], None]] = []
        self._buffer: ReplayBuffer | None = None
        self._logged_s = -_SILENCE_S
        try:
            self._buffer = ReplayBuffer(self._path, settings)
        except ReplayBufferError as error:
            self._note_failure(error)
        atexit.register(self.close)

    @property
    def counts(self) -> RecorderCounts:
        """Counts so far."""
        return replace(self._counts)

    def attach(self, drafter: Any) -> Callable[[], None]:
        """
        Record the `generate()` calls that use a drafter.

        Args:
            drafter (`PreTrainedModel`):
                The drafter, possibly wrapped.

        Returns:
            `Callable`: Call it to end this.
        """
        return self._attached(hooks_of(drafter).on_finished(self.record))

    def attach_engine(self, engine: Any) -> Callable[[], None]:
        """
        Record the requests of an engine.

        Args:
            engine (`AdaFlashEngine`):
                The engine.

        Returns:
            `Callable`: Call it to end this.
        """
        return self._attached(engine.on_finished(self.record))

    def record(self, result: RequestResult | PendingTrajectory) -> None:
        """
        Hand over a finished request; takes microseconds and never fails.

        Args:
            result (`RequestResult` or `PendingTrajectory`):
                The request.
        """
        counts = self._counts
        counts.received += 1
        if self._thread_pid != os.getpid():
            self._start_thread()
        try:
            self._queue.put_nowait(result)
        except queue.Full:
            counts.dropped += 1

    def mark(self) -> int:
        """A mark behind all that has been handed over so far, for [`is_past`]."""
        return self._counts.received - self._counts.dropped

    def is_past(self, mark: int) -> bool:
        """
        Whether all before a mark is written, or was found to be nothing to write.

        Args:
            mark (`int`):
                From [`mark`].
        """
        return self._done >= mark

    def flush(self, timeout_s: float = 10.0) -> bool:
        """
        Wait until all that was handed over is written.

        Args:
            timeout_s (`float`, *optional*, defaults to 10.0):
                How long.

        Returns:
            `bool`: whether it is.
        """
        if self._thread_pid != os.getpid():  # nothing was handed over in this process
            return True
        waiting = self._queue
        with waiting.all_tasks_done:
            return waiting.all_tasks_done.wait_for(lambda: not waiting.unfinished_tasks, timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """
        Write what waits, and stop.

        Args:
            timeout_s (`float`, *optional*, defaults to 5.0):
                Give up after this long.
        """
        atexit.unregister(self.close)
        for detach in self._detach:
            detach()
        self._detach.clear()
        if self._thread is not None and self._thread_pid == os.getpid():
            self.flush(timeout_s)
            self._closing.set()
            self._thread.join(timeout_s)
        if self._buffer is not None:
            self._buffer.close()

    def __enter__(self) -> TrajectoryRecorder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _attached(self, detach: Callable[[], None]) -> Callable[[], None]:
        self._detach.append(detach)
        return detach

    def _start_thread(self) -> None:
        """At the first request, and again in a process that was forked: threads do not come along."""
        with self._starting:
            if self._thread_pid == os.getpid():
                return
            if self._thread_pid:  # what waits is written by the process that was forked
                self._queue = queue.Queue(self._queue.maxsize)
                self._done = self.mark() - 1  # all but the one that is being handed over
            self._thread_pid = os.getpid()
            self._thread = threading.Thread(target=self._run, name="adaflash-recorder", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        waiting: list[RecordedTrajectory] = []
        taken, pause_s = 0, 0.0
        while not self._closing.is_set():
            found = self._take(_BATCH - len(waiting))
            taken += len(found)
            waiting += [one for one in found if one is not None]
            if not waiting or self._write(waiting):
                # Those with nothing to write, too, only now: a mark behind them is behind what came before them.
                for _ in range(taken):
                    self._task_done()
                waiting, taken, pause_s = [], 0, 0.0
            else:
                pause_s = min(max(2 * pause_s, 0.1), _LONGEST_PAUSE_S)
                self._closing.wait(pause_s)
        self._counts.lost += len(waiting) + self._queue.qsize()

    def _take(self, count: int) -> list[RecordedTrajectory | None]:
        """What has come in, waiting a moment for the first of it and for others to join; None is nothing to write."""
        taken: list[RecordedTrajectory | None] = []
        deadline = time.monotonic() + self._flush_interval_s
        while len(taken) < count:
            try:
                result = self._queue.get(timeout=max(deadline - time.monotonic(), 0.001))
            except queue.Empty:
                break
            taken.append(self._trajectory_of(result))
        return taken

    def _task_done(self) -> None:
        self._done += 1
        self._queue.task_done()

    def _trajectory_of(self, result: RequestResult | PendingTrajectory) -> RecordedTrajectory | None:
        try:
            trajectory = (
                self._trajectory_of_result(result) if isinstance(result, RequestResult) else result.trajectory()
            )
            if trajectory is None:
                self._counts.too_short += 1
                return None
            trajectory.check()
        except Exception as error:  # a decoder of the user's own may raise anything
            self._counts.invalid += 1
            self._log(f"a request cannot be recorded: {error}")
            return None
        trimmed = trajectory.cut(self._max_tokens)
        self._counts.too_short += trimmed is None
        return trimmed

    def _trajectory_of_result(self, result: RequestResult) -> RecordedTrajectory | None:
        if result.finish_reason == "error":
            return None
        return RecordedTrajectory.from_lists(
            result.prompt_ids,
            result.token_ids,
            result.rounds,
            domain=result.domain,
            drafter_version=result.drafter_version,
            finished=result.finish_reason == "stop",
            text=None if self._decode_text is None else self._decode_text(result.token_ids),
        )

    def _write(self, trajectories: list[RecordedTrajectory]) -> bool:
        try:
            if self._buffer is None:
                self._buffer = ReplayBuffer(self._path, self._settings)
            limit = self._buffer.settings.max_bytes
            fitting = [one for one in trajectories if one.num_bytes <= limit]
            self._counts.written += self._buffer.append(fitting)
            self._counts.invalid += len(trajectories) - len(fitting)
        except (ReplayBufferError, InvalidInputError) as error:
            self._note_failure(error)
            return False
        self._counts.last_error = ""
        return True

    def _note_failure(self, error: Exception) -> None:
        self._counts.write_failures += 1
        self._counts.last_error = str(error)
        self._log(f"{error} Traffic is served on; what cannot be kept is dropped.")

    def _log(self, message: str) -> None:
        """At most once a minute: a full disk would otherwise fill the log as well."""
        if time.monotonic() - self._logged_s >= _SILENCE_S:
            self._logged_s = time.monotonic()
            logger.warning("Recorder: %s", message)
