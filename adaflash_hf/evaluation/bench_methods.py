"""The ways of decoding that a benchmark compares, each behind the same call."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig

from ..errors import InvalidInputError
from ..generation.engine import AdaFlashEngine
from ..generation.length_policies import LengthPolicy
from ..generation.oracle_policy import OraclePolicy
from ..generation.statistics import GenerationStats
from ..training.batched_decoding import eos_token_ids_of
from .bench_results import Latency, MethodRun, merge_statistics
from .bench_timing import StepTimer, synchronize
from .bench_turns import EngineRun
from .lossless import left_padded, until_end
from .peak_memory import PeakMemory


if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..modeling_confidence_head import ConfidenceHeadModel
    from ..modeling_dflash_drafter import DFlashDrafterModel


__all__ = [
    "BenchMethod",
    "BenchModels",
    "ContinuousBatchingMethod",
    "EngineMethod",
    "GenerateMethod",
    "Sampling",
    "stats_of_steps",
]


@dataclass(frozen=True)
class Sampling:
    """
    How tokens are chosen.

    Attributes:
        temperature: 0 is greedy.
        draft_proposal: `"argmax"` or `"sample"`, how drafts are chosen above 0.
    """

    temperature: float = 0.0
    draft_proposal: str = "argmax"

    @property
    def generate_kwargs(self) -> dict[str, Any]:
        """Arguments of `generate()`: the target's own distribution, whatever its generation config cuts off."""
        if not self.temperature:
            return {"do_sample": False}
        return {"do_sample": True, "temperature": self.temperature, "top_k": 0, "top_p": 1.0}


@dataclass(frozen=True)
class BenchModels:
    """
    What methods decode with.

    Attributes:
        target: The target.
        drafter: Its drafter; None if no method drafts.
        assistant: A small model of the same vocabulary; None if no method uses one.
        confidence_head: In place of the drafter's own probabilities, for `confidence` and `cost_aware`.
        pad_token_id: Fills up short prompts of a padded batch.
        osd_drafter: The drafter of the method `osd`.
    """

    target: PreTrainedModel
    drafter: DFlashDrafterModel | None = None
    assistant: PreTrainedModel | None = None
    confidence_head: ConfidenceHeadModel | None = None
    pad_token_id: int = 0
    osd_drafter: DFlashDrafterModel | None = None


class BenchMethod(ABC):
    """
    A way of decoding.

    Attributes:
        name: As it was asked for.
        sampling: Of all runs; greedy unless it is set.
    """

    sampling = Sampling()

    def __init__(self, name: str, models: BenchModels) -> None:
        self.name = name
        self._models = models
        self._device = models.target.device
        self._answers: list[list[int]] = []  # for the oracle

    def reason_to_skip(self, concurrency: int) -> str | None:
        """Why this method cannot be measured at a concurrency; None if it can."""
        return None

    def prepare(self, concurrency: int) -> None:  # noqa: B027 - a hook, most methods need nothing
        """Measures what the method needs to know, outside of all timing."""

    def learn_answers(self, token_ids: Sequence[Sequence[int]]) -> None:
        """Takes what plain decoding answers to the coming prompts."""
        self._answers = [list(ids) for ids in token_ids]

    def run(self, prompts: Sequence[list[int]], concurrency: int, max_new_tokens: int) -> MethodRun:
        """
        Answers all prompts.

        Args:
            prompts (`Sequence[list[int]]`):
                Token ids.
            concurrency (`int`):
                Requests in flight at once.
            max_new_tokens (`int`):
                Longest answer.
        """
        synchronize(self._device)
        peak = PeakMemory(self._device)
        with torch.no_grad():
            run = self._run(prompts, concurrency, max_new_tokens)
        return replace(run, peak_memory_bytes=peak.read_bytes())

    @abstractmethod
    def _run(self, prompts: Sequence[list[int]], concurrency: int, max_new_tokens: int) -> MethodRun: ...


class EngineMethod(BenchMethod):
    """
    `AdaFlashEngine`, with the drafter on or off.

    Args:
        name (`str`):
            Name of the method.
        models (`BenchModels`):
            Models.
        policy (`LengthPolicy`, *optional*):
            Who decides how much is verified; None decodes plainly. It goes on learning from run to run.
    """

    def __init__(self, name: str, models: BenchModels, policy: LengthPolicy | None) -> None:
        super().__init__(name, models)
        self._policy = policy

    def _engine(self, concurrency: int, max_queue: int = 1) -> AdaFlashEngine:
        drafter = None if self._policy is None else self._models.drafter
        return AdaFlashEngine(
            self._models.target,
            drafter,
            length_policy=self._policy,
            max_concurrency=concurrency,
            max_queue=max_queue,
            draft_proposal=self.sampling.draft_proposal,
        )

    def reason_to_skip(self, concurrency: int) -> str | None:
        if self.sampling.temperature and isinstance(self._policy, OraclePolicy):
            return "no oracle knows what will be sampled"
        return None

    def prepare(self, concurrency: int) -> None:
        self._engine(concurrency).prepare()

    def begin(self, prompts: Sequence[list[int]], concurrency: int, max_new_tokens: int) -> EngineRun:
        """
        Submits all prompts, without a round yet.

        Args:
            prompts (`Sequence[list[int]]`):
                Token ids.
            concurrency (`int`):
                Requests in flight at once.
            max_new_tokens (`int`):
                Longest answer.
        """
        engine = self._engine(concurrency, max_queue=len(prompts) + 1)
        engine.prepare()
        chosen = self.sampling.generate_kwargs
        handles = [
            engine.submit(ids, seed=number, max_new_tokens=max_new_tokens, **chosen)
            for number, ids in enumerate(prompts)
        ]
        if isinstance(self._policy, OraclePolicy):
            for handle, answer in zip(handles, self._answers, strict=True):
                self._policy.tell(handle.request_id, answer)
        return EngineRun(engine, handles)

    @property
    def takes_turns(self) -> bool:
        """Whether others may decode between its rounds. An oracle must know what plain decoding answered."""
        return not isinstance(self._policy, OraclePolicy)

    def _run(self, prompts: Sequence[list[int]], concurrency: int, max_new_tokens: int) -> MethodRun:
        run = self.begin(prompts, concurrency, max_new_tokens)
        while not run.is_over:
            run.step()
        return run.result()


class GenerateMethod(BenchMethod):
    """
    `generate()` on padded batches as wide as the concurrency, one after the other.

    Args:
        name (`str`):
            Name of the method.
        models (`BenchModels`):
            Models.
        generate_kwargs (`dict`):
            What makes `generate()` decode this way.
        single (`bool`):
            Whether it can only decode one prompt at a time.
        policy (`LengthPolicy`, *optional*):
            Of our own drafting.
    """

    def __init__(
        self,
        name: str,
        models: BenchModels,
        generate_kwargs: dict[str, Any],
        single: bool = False,
        policy: LengthPolicy | None = None,
    ) -> None:
        super().__init__(name, models)
        self._kwargs = generate_kwargs
        self._is_single = single
        self._policy = policy

    def reason_to_skip(self, concurrency: int) -> str | None:
        if self._is_single and concurrency > 1:
            return "transformers decodes one prompt at a time this way"
        if self.sampling.temperature and isinstance(self._policy, OraclePolicy):
            return "no oracle knows what will be sampled"
        return None

    def _run(self, prompts: Sequence[list[int]], concurrency: int, max_new_tokens: int) -> MethodRun:
        answers: list[list[int]] = []
        timers: list[StepTimer] = []
        parts: list[GenerationStats | None] = []
        begin_s = time.perf_counter()
        for first in range(0, len(prompts), concurrency):
            if isinstance(self._policy, OraclePolicy):
                for row, answer in enumerate(self._answers[first : first + concurrency]):
                    self._policy.tell(row, answer)
            timers.append(StepTimer())
            answers += self._generate(prompts[first : first + concurrency], max_new_tokens, timers[-1])
            parts.append(self._statistics(timers[-1]))
        synchronize(self._device)
        known = [part for part in parts if part is not None]
        return MethodRun(
            token_ids=answers,
            generated_tokens=sum(map(len, answers)),
            seconds=time.perf_counter() - begin_s,
            token_latency=Latency.of([seconds for timer in timers for seconds in timer.token_latency_s]),
            first_token=Latency.of([timer.first_token_s for timer in timers if timer.first_token_s is not None]),
            stats=merge_statistics(known) if known else None,
        )

    def _statistics(self, timer: StepTimer) -> GenerationStats | None:
        """Counters of the call of `generate()` that the timer streamed; None for plain decoding."""
        if self._policy is not None:
            assert self._models.drafter is not None
            return self._models.drafter.last_generation_stats
        return stats_of_steps(timer.step_tokens) if self._is_single else None

    def _generate(self, prompts: Sequence[list[int]], max_new_tokens: int, timer: StepTimer) -> list[list[int]]:
        pad = self._models.pad_token_id
        inputs = {name: tensor.to(self._device) for name, tensor in left_padded(prompts, pad).items()}
        policy: dict[str, Any] = {} if self._policy is None else {"length_policy": self._policy}
        if policy and self.sampling.temperature:
            policy["draft_proposal"] = self.sampling.draft_proposal
        output = self._models.target.generate(
            **inputs,
            **self.sampling.generate_kwargs,
            max_new_tokens=max_new_tokens,
            pad_token_id=pad,
            streamer=timer,
            **self._kwargs,
            **policy,
        )
        ends = eos_token_ids_of(self._models.target)
        return [until_end(row, ends) for row in output[:, inputs["input_ids"].shape[1] :].tolist()]


def stats_of_steps(step_tokens: Sequence[int]) -> GenerationStats:
    """
    What is known of a loop of transformers' own: what each step committed, and not what was drafted for it.

    Args:
        step_tokens (`Sequence[int]`):
            From a [`StepTimer`].
    """
    _, *committed = step_tokens  # the first is the prefill's
    return GenerationStats(
        rounds=len(committed),
        target_forwards=1 + len(committed),
        accepted_tokens=sum(committed) - len(committed),
        committed_tokens=sum(committed),
    )


class ContinuousBatchingMethod(BenchMethod):
    """transformers' own continuous batching, `generate_batch()`."""

    _PAGE_TOKENS = 256

    def _run(self, prompts: Sequence[list[int]], concurrency: int, max_new_tokens: int) -> MethodRun:
        from transformers import ContinuousBatchingConfig

        pages = -(-(max(map(len, prompts)) + max_new_tokens) // self._PAGE_TOKENS)
        # Without numbers of its own it takes most of the memory there is.
        sizes = ContinuousBatchingConfig(
            page_size=self._PAGE_TOKENS,
            num_blocks=(pages + 1) * concurrency,
            max_batch_tokens=max(self._PAGE_TOKENS, concurrency),
            max_requests_per_batch=concurrency,
        )
        config = GenerationConfig(
            max_new_tokens=max_new_tokens,
            **self.sampling.generate_kwargs,
            # It does not know what None means; no token has this id.
            eos_token_id=sorted(eos_token_ids_of(self._models.target)) or -1,
            pad_token_id=self._models.pad_token_id,
        )
        outputs = self._models.target.generate_batch(
            list(prompts), config, continuous_batching_config=sizes, record_timestamps=True, progress_bar=False
        )
        results = list(outputs.values())
        failed = next((result for result in results if result.error is not None), None)
        if len(results) != len(prompts) or failed is not None:
            raise InvalidInputError(
                f"transformers' continuous batching answered {len(results)} of {len(prompts)} requests"
                f"{'' if failed is None else f' ({failed.error})'}. Leave `transformers_cb` out."
            )
        stamps = [result.timestamps for result in results]
        # Its manager and cache are made anew for every call; neither that nor their end is decoding.
        begin_s = min(result.lifespan[0] for result in results)
        gaps = [after - before for times in stamps for before, after in zip(times, times[1:], strict=False)]
        waits = [times[0] - result.lifespan[0] for times, result in zip(stamps, results, strict=True) if times]
        return MethodRun(
            token_ids=[list(result.generated_tokens) for result in results],
            generated_tokens=sum(len(result.generated_tokens) for result in results),
            seconds=max(times[-1] for times in stamps if times) - begin_s,
            token_latency=Latency.of(gaps),
            first_token=Latency.of(waits),
        )
