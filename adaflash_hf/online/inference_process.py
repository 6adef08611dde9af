"""The inference process of `adaflash online`: an engine that serves prompts, records, and takes new versions.

It never waits for the trainer: what is served goes into a queue, and a new version is read beside decoding.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import DrafterCheckpointError, EngineStoppedError, InvalidInputError, PublishedVersionError
from ..generation.engine_requests import RequestResult
from .published_versions import PublishedVersions
from .recorded_trajectory import NO_DOMAIN
from .run_settings import InferenceSettings
from .run_status import StatusFile, read_status
from .side_process import SideProcess


if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..generation.engine import AdaFlashEngine
    from ..generation.engine_handles import RequestHandle
    from ..modeling_dflash_drafter import DFlashDrafterModel
    from .hot_reload import HotReloader
    from .recorder import TrajectoryRecorder


__all__ = ["PromptTraffic", "ServedPrompt", "load_served_drafter", "run_inference", "starting_position"]

logger = logging.getLogger(__name__)

STATUS_NAME = "server"
_STATUS_INTERVAL_S = 1.0
_LOOK_S = 0.25
# What is still running then is cancelled, and answered by the next process.
_DRAIN_S = 20.0


class ServedPrompt(NamedTuple):
    """
    One prompt to serve.

    Attributes:
        number: Its place in the traffic; grows also when the prompts begin again.
        token_ids: The prompt.
        domain: Its tag.
    """

    number: int
    token_ids: list[int]
    domain: str


class PromptTraffic:
    """
    Prompts as traffic.

    Args:
        prompts (`list[tuple[list[int], str]]`):
            Token ids and domain of each.
        is_once (`bool`):
            Whether to end after the last one.
        position (`int`, *optional*, defaults to 0):
            Number to begin with.
    """

    def __init__(self, prompts: list[tuple[list[int], str]], *, is_once: bool, position: int = 0) -> None:
        self._prompts, self._is_once = prompts, is_once
        self._next = position
        self._in_flight: set[int] = set()
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[ServedPrompt]:
        for number in itertools.count(self._next):
            if self._is_once and number >= len(self._prompts):
                return
            with self._lock:
                self._next = number + 1
                self._in_flight.add(number)
            yield ServedPrompt(number, *self._prompts[number % len(self._prompts)])

    def finish(self, number: int) -> None:
        """
        A prompt was answered.

        Args:
            number (`int`):
                Its number.
        """
        with self._lock:
            self._in_flight.discard(number)

    @property
    def position(self) -> int:
        """The first number that has not been answered: where to go on after a kill."""
        with self._lock:
            return min(self._in_flight, default=self._next)


def run_inference(settings: InferenceSettings) -> None:
    """
    Serve until SIGTERM, or until all prompts are answered.

    Args:
        settings (`InferenceSettings`):
            All settings.
    """
    process = SideProcess(STATUS_NAME, settings.side.publish_dir, settings.side.threads)
    with process.running():
        _Inference(settings, process).run()


def starting_position(before: Mapping[str, Any], settings: InferenceSettings) -> int:
    """
    The prompt to begin with: that at which a killed process, or an earlier run with the same prompts, was.

    Args:
        before (`Mapping[str, Any]`):
            Status of the process before; may be empty.
        settings (`InferenceSettings`):
            Settings of this one.
    """
    position = before.get("position", 0)
    if before.get("run_id") == settings.run_id:
        return position
    is_through = settings.is_once and position >= len(settings.prompts)
    return position if before.get("prompts_id") == settings.prompts_id and not is_through else 0


class _Inference:
    def __init__(self, settings: InferenceSettings, process: SideProcess) -> None:
        self._settings, self._process = settings, process
        self._counts: Counter[str] = Counter()
        self._tokens = 0
        self._rounds: Counter[str] = Counter()
        self._accepted: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._reported_s = time.monotonic()
        self._reported_tokens = 0
        self._position = 0
        self._positions: deque[tuple[int, int]] = deque()  # reported later, when the buffer has got so far

    def run(self) -> None:
        from ..generation.engine import AdaFlashEngine
        from .hot_reload import HotReloader
        from .recorder import TrajectoryRecorder

        settings, side = self._settings, self._settings.side
        before = read_status(side.publish_dir, STATUS_NAME)
        position = self._position = starting_position(before, settings)
        self._status = StatusFile(side.publish_dir, STATUS_NAME)
        self._status.fields |= {"run_id": settings.run_id, "prompts_id": settings.prompts_id, "position": position}
        self._status.update(phase="loading", error="")
        target, tokenizer, drafter, version = self._load()
        traffic = PromptTraffic(self._encode(tokenizer), is_once=settings.is_once, position=position)
        engine = AdaFlashEngine(
            target,
            drafter,
            tokenizer=tokenizer,
            length_policy=settings.length_policy,
            max_concurrency=settings.concurrency,
            max_queue=settings.concurrency + 1,
        )
        engine.drafter_version = version
        reloader = HotReloader(drafter, target, side.publish_dir, version=version)
        with TrajectoryRecorder(side.buffer, side.buffer_settings) as recorder:
            recorder.attach_engine(engine)
            reloader.attach_engine(engine)
            with reloader:
                self._serve(engine, traffic, reloader, recorder)
            recorder.flush()
            self._report("stopped", engine, traffic, reloader, recorder)

    def _load(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, DFlashDrafterModel, int]:
        from ..embedded_target import load_target, without_progress_bars
        from ..generation.prepacking import settle_prepacking

        side = self._settings.side
        with without_progress_bars():
            target, tokenizer = load_target(side.target, side.dtype, device=side.device)
            drafter, version = load_served_drafter(PublishedVersions(side.publish_dir), side.drafter, target.dtype)
        drafter = drafter.to(target.device).eval()
        settle_prepacking(target, self._settings.prepack)
        settle_prepacking(drafter, self._settings.prepack, allow_rounding=True)
        return target, tokenizer, drafter, version

    def _encode(self, tokenizer: PreTrainedTokenizerBase) -> list[tuple[list[int], str]]:
        from ..training.prompts import encode_prompts

        settings, prompts = self._settings, self._settings.prompts
        encoded = zip(encode_prompts(tokenizer, prompts), prompts, strict=True)
        short = [(ids, prompt.domain) for ids, prompt in encoded if len(ids) <= settings.max_prompt_tokens]
        if not short:
            raise InvalidInputError(
                f"`prompts` holds {len(prompts)} prompts, all longer than `max_prompt_tokens` = "
                f"{settings.max_prompt_tokens}; raise it, or give shorter ones."
            )
        if len(short) < len(prompts):
            logger.warning(
                "%d prompts are longer than %d tokens.", len(prompts) - len(short), settings.max_prompt_tokens
            )
        return short

    def _serve(
        self, engine: AdaFlashEngine, traffic: PromptTraffic, reloader: HotReloader, recorder: TrajectoryRecorder
    ) -> None:
        settings, stopping = self._settings, self._process.stopping
        slots, lock = threading.Semaphore(settings.concurrency), threading.Lock()
        numbers: dict[int, int] = {}

        def finished(result: RequestResult) -> None:
            self._count(result)
            with lock:
                number = numbers.pop(result.request_id)
            if result.finish_reason != "cancelled":  # else the next process answers it
                traffic.finish(number)
            slots.release()

        engine.on_finished(finished)
        engine.start()
        try:
            for prompt in traffic:
                while not slots.acquire(timeout=_LOOK_S):
                    self._tick(engine, traffic, reloader, recorder)
                    if stopping.is_set():
                        return
                if stopping.is_set():
                    return
                self._tick(engine, traffic, reloader, recorder)
                with lock:  # or it might be finished before its number is known
                    handle = self._submit(engine, prompt)
                    if handle is not None:
                        numbers[handle.request_id] = prompt.number
                if handle is None:
                    traffic.finish(prompt.number)
                    slots.release()
            while engine.has_requests and not stopping.wait(_LOOK_S):
                self._tick(engine, traffic, reloader, recorder)
        finally:
            engine.stop(drain=True, timeout=_DRAIN_S)

    def _submit(self, engine: AdaFlashEngine, prompt: ServedPrompt) -> RequestHandle | None:
        settings = self._settings
        sampling: dict[str, Any] = {"do_sample": False}
        if settings.temperature > 0:
            sampling = {
                "do_sample": True,
                "temperature": settings.temperature,
                "seed": settings.seed + prompt.number,
            }
        try:
            return engine.submit(
                prompt.token_ids, max_new_tokens=settings.max_new_tokens, domain=prompt.domain, **sampling
            )
        except InvalidInputError as error:
            self._counts["refused"] += 1
            # One prompt may be too long; if it is all of them, the settings are wrong.
            if set(self._counts) == {"refused"} and self._counts["refused"] >= len(settings.prompts):
                raise
            logger.warning("Prompt %d is left out: %s", prompt.number, error)
            return None

    def _tick(
        self, engine: AdaFlashEngine, traffic: PromptTraffic, reloader: HotReloader, recorder: TrajectoryRecorder
    ) -> None:
        if not engine.is_running:
            raise EngineStoppedError("The engine has failed; the log above says why.")
        if time.monotonic() - self._reported_s >= _STATUS_INTERVAL_S:
            self._report("serving", engine, traffic, reloader, recorder)

    def _count(self, result: RequestResult) -> None:
        domain = result.domain or NO_DOMAIN
        with self._lock:
            self._counts[result.finish_reason] += 1
            self._tokens += len(result.token_ids)
            self._rounds[domain] += len(result.rounds)
            self._accepted[domain] += sum(accepted for _, accepted in result.rounds)

    def _report(
        self,
        phase: str,
        engine: AdaFlashEngine,
        traffic: PromptTraffic,
        reloader: HotReloader,
        recorder: TrajectoryRecorder,
    ) -> None:
        now = time.monotonic()
        with self._lock:
            counts, tokens = dict(self._counts), self._tokens
            taus = {d: 1 + self._accepted[d] / n for d, n in sorted(self._rounds.items()) if n}
        statistics = engine.statistics()
        self._status.update(
            phase=phase,
            version=reloader.version,
            requests=counts,
            active_requests=statistics.active_requests,
            generated_tokens=tokens,
            tok_per_s=(tokens - self._reported_tokens) / max(now - self._reported_s, 1e-9),
            acceptance_length=taus,
            reload=asdict(reloader.status),
            recorder=asdict(recorder.counts),
            position=self._recorded_position(traffic, recorder),
        )
        self._reported_s, self._reported_tokens = now, tokens

    def _recorded_position(self, traffic: PromptTraffic, recorder: TrajectoryRecorder) -> int:
        """Where to go on after a kill so that no answer is missing in the buffer: some may be given once more."""
        self._positions.append((traffic.position, recorder.mark()))
        while self._positions and recorder.is_past(self._positions[0][1]):
            self._position = self._positions.popleft()[0]
        return self._position


def load_served_drafter(
    versions: PublishedVersions, drafter: str, dtype: torch.dtype
) -> tuple[DFlashDrafterModel, int]:
    """
    The version that is to be served, or, where there is none that can be, the drafter that adaptation begins with.

    Args:
        versions (`PublishedVersions`):
            What is published.
        drafter (`str`):
            Hub id or directory of the first drafter.
        dtype (`torch.dtype`):
            What to load it in.

    Returns:
        `tuple[DFlashDrafterModel, int]`: the drafter and its version.
    """
    from ..hub_connection import loading_checkpoint
    from ..modeling_dflash_drafter import DFlashDrafterModel

    try:
        latest = versions.latest()
        if latest is not None:
            latest.check_files()
            return DFlashDrafterModel.from_pretrained(latest.path, dtype=dtype), latest.version
    except (PublishedVersionError, DrafterCheckpointError, OSError) as error:
        logger.warning("The published version cannot be served (%s); beginning with %s.", error, drafter)
    with loading_checkpoint(drafter, "--drafter"):
        return DFlashDrafterModel.from_pretrained(drafter, dtype=dtype), 0
