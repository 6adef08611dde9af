"""The ways of decoding that a benchmark compares, each behind the same call."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig

from ..errors import InvalidInputError
from ..generation.confidence_policy import ConfidencePolicy
from ..generation.cost_aware_policy import CostAwarePolicy
from ..generation.engine import AdaFlashEngine
from ..generation.length_policies import (
    ENGINE_ACTIVATION_CONCURRENCY,
    FixedLengthPolicy,
    LengthHeadPolicy,
    LengthPolicy,
)
from ..generation.oracle_policy import OraclePolicy
from ..generation.statistics import GenerationStats
from ..training.batched_decoding import eos_token_ids_of
from .bench_results import PLAIN, Latency, MethodRun, merge_statistics
from .bench_timing import StepTimer, synchronize
from .bench_turns import EngineRun
from .lossless import left_padded, until_end
from .peak_memory import PeakMemory


if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..modeling_confidence_head import ConfidenceHeadModel
    from ..modeling_dflash_drafter import DFlashDrafterModel


__all__ = [
    "DRAFTING_METHODS",
    "METHODS",
    "OSD",
    "REFERENCE_METHODS",
    "TRANSFORMERS_MTP",
    "BenchMethod",
    "BenchModels",
    "EngineMethod",
    "GenerateMethod",
    "Sampling",
    "build_method",
    "check_models_of_method",
    "needs_drafter",
    "split_method_name",
    "stats_of_steps",
]

# By heads of the target's own, which not every target has.
TRANSFORMERS_MTP = "transformers_mtp"
DRAFTING_METHODS = ("dflash", "adaflash", "confidence", "cost_aware", "oracle")
REFERENCE_METHODS = (
    "transformers",
    "transformers_cb",
    "prompt_lookup",
    "transformers_dflash",
    TRANSFORMERS_MTP,
    "assistant",
)
# Whole blocks of another drafter, such as one that was adapted by online speculative decoding.
OSD = "osd"
METHODS = (PLAIN, *DRAFTING_METHODS, OSD, *REFERENCE_METHODS)
_PARAMETERS: dict[str, Callable[[str], Any]] = {
    "dflash": int,
    "adaflash": float,
    "confidence": float,
    OSD: int,
    "prompt_lookup": int,
}
_PROMPT_LOOKUP_TOKENS = 10


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


def build_method(name: str, models: BenchModels, via_generate: bool = False) -> BenchMethod:
    """
    Make a method.

    Args:
        name (`str`):
            One of `METHODS`. Some take a parameter after a colon: `dflash:4` verifies four rows, `adaflash:1.5` is a
            length scale, `confidence:0.8` a threshold, `prompt_lookup:5` a number of tokens.
        models (`BenchModels`):
            What to decode with.
        via_generate (`bool`, *optional*, defaults to `False`):
            Decode in `generate()`, on padded batches, in place of the engine. Needed for targets it cannot serve.
    """
    base, parameter = split_method_name(name)
    check_models_of_method(
        name,
        has_drafter=models.drafter is not None,
        has_length_head=models.drafter is not None and models.drafter.length_head is not None,
        has_osd_drafter=models.osd_drafter is not None,
        has_assistant=models.assistant is not None,
    )
    if base in REFERENCE_METHODS:
        return _build_reference(base, name, parameter, models)
    if base == OSD:
        base, models = "dflash", replace(models, drafter=models.osd_drafter)
    policy = None if base == PLAIN else _build_policy(base, parameter, models, via_generate)
    if not via_generate:
        return EngineMethod(name, models, policy)
    return GenerateMethod(name, models, {} if policy is None else {"assistant_model": models.drafter}, policy=policy)


def needs_drafter(name: str) -> bool:
    """Whether a method, given with or without its parameter, decodes with the drafter."""
    return split_method_name(name)[0] in (*DRAFTING_METHODS, "transformers_dflash")


def split_method_name(name: str) -> tuple[str, str | None]:
    """
    A method and its parameter.

    Args:
        name (`str`):
            Such as `"dflash"` or `"dflash:4"`.
    """
    base, _, parameter = name.partition(":")
    if base not in METHODS:
        raise InvalidInputError(f"`method` is {name!r}, expected one of {', '.join(METHODS)}.")
    if parameter and base not in _PARAMETERS:
        raise InvalidInputError(f"`method` is {name!r}, but {base} takes no parameter; write {base!r}.")
    if parameter:
        _parameter(base, parameter, _PARAMETERS[base], None)
    return base, parameter or None


def check_models_of_method(
    name: str, *, has_drafter: bool, has_length_head: bool, has_osd_drafter: bool, has_assistant: bool
) -> None:
    """
    Refuse a method that lacks a model, which need not be loaded for that.

    Args:
        name (`str`):
            With or without its parameter.
        has_drafter (`bool`), has_length_head (`bool`), has_osd_drafter (`bool`), has_assistant (`bool`):
            What there is, see [`BenchModels`].
    """
    base, _ = split_method_name(name)
    if needs_drafter(name) and not has_drafter:
        raise InvalidInputError(f"`method` is {name!r}, which needs a drafter; pass one.")
    if base == "adaflash" and not has_length_head:
        raise InvalidInputError(
            f"`method` is {name!r}, but the drafter has no length head; leave the method out, or train a head with "
            "`adaflash train --only length-head`."
        )
    if base == OSD and not has_osd_drafter:
        raise InvalidInputError(f"`method` is {name!r}, which needs a drafter of its own; pass --osd-drafter.")
    if base == "assistant" and not has_assistant:
        raise InvalidInputError("`method` is 'assistant', which needs a small model; pass --assistant.")


def _parameter(name: str, text: str | None, kind: Callable[[str], Any], default: Any) -> Any:
    try:
        return default if text is None else kind(text)
    except ValueError as error:
        raise InvalidInputError(f"`method` is '{name}:{text}', but {text!r} is not a number.") from error


def _build_policy(base: str, parameter: str | None, models: BenchModels, via_generate: bool) -> LengthPolicy:
    if base == "dflash":
        return FixedLengthPolicy(_parameter(base, parameter, int, None))
    if base == "adaflash":
        concurrency = 1 if via_generate else ENGINE_ACTIVATION_CONCURRENCY
        return LengthHeadPolicy(_parameter(base, parameter, float, 1.3), activation_concurrency=concurrency)
    if base == "confidence":
        threshold = _parameter(base, parameter, float, 0.94)
        return ConfidencePolicy(threshold, confidence_head=models.confidence_head)
    return CostAwarePolicy(confidence_head=models.confidence_head) if base == "cost_aware" else OraclePolicy()


def _build_reference(base: str, name: str, parameter: str | None, models: BenchModels) -> BenchMethod:
    if base == "transformers_cb":
        return ContinuousBatchingMethod(name, models)
    if base == TRANSFORMERS_MTP:
        from .mtp import MtpMethod  # it stands on a class of this module

        return MtpMethod(name, models)
    kwargs: dict[str, dict[str, Any]] = {
        "transformers": {},
        "prompt_lookup": {"prompt_lookup_num_tokens": _parameter(base, parameter, int, _PROMPT_LOOKUP_TOKENS)},
        "transformers_dflash": {"assistant_model": models.drafter, "speculation_type": "dflash"},
        "assistant": {"assistant_model": models.assistant},
    }
    return GenerateMethod(name, models, kwargs[base], single=base != "transformers")
