"""Runs a benchmark: methods x workloads x concurrency, interleaved and repeated in one process."""

from __future__ import annotations

import datetime
import math
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..embedded_target import default_dtype
from ..errors import AdaFlashError, InvalidInputError, UnsupportedGenerationError
from ..generation.prepacking import has_prepacked_layers
from ..generation.request_checks import context_limit
from ..training.prompts import encode_prompts
from ..weights_digest import weights_sha256
from .bench_method_builder import build_method
from .bench_method_names import REFERENCE_METHODS
from .bench_methods import BenchMethod, BenchModels, EngineMethod, Sampling
from .bench_results import PLAIN, Agreement, BenchRow, MethodRun, summarise
from .bench_turns import run_in_turns
from .comparison import find_first_difference
from .result_files import shown_name
from .workloads import Workload


__all__ = ["BenchReport", "BenchSettings", "describe_environment", "run_bench"]

_LEAST_NEW_TOKENS = 8
_LEAST_REQUESTS = 8
_TRANSFORMERS = "transformers"


@dataclass(frozen=True)
class BenchSettings:
    """
    What to measure.

    Attributes:
        methods: Names, see [`build_method`]; plain decoding is added, since all others are compared with it.
        concurrencies: Requests in flight at once.
        num_requests: Requests of each run; twice the concurrency, and eight at least, if None.
        max_new_tokens: Longest answer.
        repeats: Timed runs of each method.
        warm_up_tokens: Longest answer of the untimed runs before.
        ignore_eos: Whether every answer runs to its full length.
        via_generate: Whether our methods decode in `generate()` in place of the engine.
        temperature: 0 is greedy. Above, answers are drawn at random and cannot be compared.
        draft_proposal: `"argmax"` or `"sample"`, how drafts are chosen when sampling.
        in_turns: Whether the engines of all methods answer side by side, see [`run_in_turns`].

    Raises:
        InvalidInputError: If nothing could be concluded from the numbers.
    """

    methods: Sequence[str] = (PLAIN, "dflash")
    concurrencies: Sequence[int] = (1, 8)
    num_requests: int | None = None
    max_new_tokens: int = 128
    repeats: int = 3
    warm_up_tokens: int = 8
    ignore_eos: bool = False
    via_generate: bool = False
    temperature: float = 0.0
    draft_proposal: str = "argmax"
    in_turns: bool = False

    def __post_init__(self) -> None:
        if not self.methods or not self.concurrencies:
            raise InvalidInputError(
                "`methods` (--method) and `concurrencies` (--concurrency) must name at least one each."
            )
        if len(set(self.methods)) < len(self.methods) or len(set(self.concurrencies)) < len(self.concurrencies):
            raise InvalidInputError(
                f"`methods` (--method) {list(self.methods)} or `concurrencies` (--concurrency) "
                f"{list(self.concurrencies)} names one twice; name each once, and raise `repeats` (--repeats) to "
                "measure more often."
            )
        if min(self.concurrencies) < 1:
            raise InvalidInputError(
                f"`concurrencies` (--concurrency) is {list(self.concurrencies)}; at least one request runs."
            )
        if not 0 <= self.temperature < math.inf:
            raise InvalidInputError(f"`temperature` is {self.temperature}; it must be 0 (greedy) or a number above.")
        if self.in_turns and self.via_generate:
            raise InvalidInputError(
                "`in_turns` (--in-turns) and `via_generate` (--via generate) exclude each other: a call of "
                "`generate()` does not wait for others between its rounds. Leave one of them out."
            )
        if self.repeats < 1:
            raise InvalidInputError(f"`repeats` is {self.repeats}; it must be at least 1.")
        if self.max_new_tokens < _LEAST_NEW_TOKENS:
            raise InvalidInputError(
                f"`max_new_tokens` is {self.max_new_tokens}; answers of fewer than {_LEAST_NEW_TOKENS} tokens measure "
                "the prefill and not the decoding. Raise it."
            )
        if self.num_requests is not None and self.num_requests < max(self.concurrencies):
            raise InvalidInputError(
                f"`num_requests` (--requests) is {self.num_requests}, but `concurrencies` (--concurrency) goes up to "
                f"{max(self.concurrencies)}: that many would never be in flight. Raise the first or lower the second."
            )

    def requests_at(self, concurrency: int) -> int:
        """Requests of a run."""
        return self.num_requests or max(2 * concurrency, _LEAST_REQUESTS)


@dataclass
class BenchReport:
    """
    Everything measured.

    Attributes:
        environment: Machine, versions and models.
        settings: How it was measured.
        rows: Results.
        skipped: What could not be measured, and why.
    """

    environment: dict[str, Any]
    settings: dict[str, Any]
    rows: list[BenchRow] = field(default_factory=list)
    skipped: list[dict[str, Any]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "environment": self.environment,
            "settings": self.settings,
            "results": [row.as_dict() for row in self.rows],
            "skipped": self.skipped,
        }


def describe_environment(target: PreTrainedModel | None = None, drafter: Any = None, **more: Any) -> dict[str, Any]:
    """
    What numbers depend on.

    Args:
        target (`PreTrainedModel`, *optional*):
            The target.
        drafter (`DFlashDrafterModel`, *optional*):
            Its drafter.
        more:
            Further entries.
    """
    environment: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor_name(),
        "logical_cpus": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "adaflash_hf": metadata.version("adaflash-hf"),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    if target is not None:
        is_cuda = target.device.type == "cuda"
        environment |= {
            "device": torch.cuda.get_device_name(target.device) if is_cuda else str(target.device),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
            "dtype": str(target.dtype).removeprefix("torch."),
            "target": shown_name(target.name_or_path),
            "target_parameters": target.num_parameters(),
            "attention": target.config._attn_implementation,
        }
    if drafter is not None:
        environment |= {
            "drafter": shown_name(drafter.name_or_path),
            "drafter_parameters": drafter.num_parameters(),
            "drafter_sha256": weights_sha256(drafter.name_or_path),
            "block_size": drafter.config.block_size,
        }
    return environment | more


def _processor_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    except OSError:
        name = ""
    return name or platform.processor() or platform.machine()


def run_bench(
    models: BenchModels,
    tokenizer: PreTrainedTokenizerBase,
    workloads: Sequence[Workload],
    settings: BenchSettings,
    *,
    environment: dict[str, Any] | None = None,
    on_step: Callable[[str], None] | None = None,
    on_cell: Callable[[BenchReport], None] | None = None,
    on_warning: Callable[[str], None] | None = None,
) -> BenchReport:
    """
    Measure.

    Args:
        models (`BenchModels`):
            What to decode with.
        tokenizer (`PreTrainedTokenizerBase`):
            The target's.
        workloads (`Sequence[Workload]`):
            What to ask.
        settings (`BenchSettings`):
            How.
        environment (`dict[str, Any]`, *optional*):
            Recorded as it is; see [`describe_environment`].
        on_step (`Callable[[str], None]`, *optional*):
            Called before every run.
        on_cell (`Callable[[BenchReport], None]`, *optional*):
            Called with all results so far after every workload and concurrency.
        on_warning (`Callable[[str], None]`, *optional*):
            Called with what makes numbers doubtful.

    Returns:
        `BenchReport`: all results.
    """
    names = list(settings.methods) if PLAIN in settings.methods else [PLAIN, *settings.methods]
    methods = [build_method(name, models, settings.via_generate) for name in names]
    for method in methods:
        method.sampling = Sampling(settings.temperature, settings.draft_proposal)
    encoded = _encode(tokenizer, workloads, settings, models.target)
    report = BenchReport(
        environment or describe_environment(models.target, models.drafter),
        {**asdict(settings), "methods": names, "workloads": [workload.name for workload in workloads]},
    )
    for warning in _doubts(models.target):
        (on_warning or _ignore)(warning)
    with _without_eos(models.target, settings.ignore_eos):
        for workload in workloads:
            for concurrency in settings.concurrencies:
                prompts = encoded[workload.name][: settings.requests_at(concurrency)]
                _run_cell(models, methods, workload.name, concurrency, prompts, settings, report, on_step or _ignore)
                if on_cell is not None:
                    on_cell(report)
    return report


def _encode(
    tokenizer: PreTrainedTokenizerBase,
    workloads: Sequence[Workload],
    settings: BenchSettings,
    target: PreTrainedModel,
) -> dict[str, list[list[int]]]:
    """Prompts of each workload, as many as the largest run asks, all of which have room for their answers."""
    most = max(map(settings.requests_at, settings.concurrencies))
    encoded = {workload.name: encode_prompts(tokenizer, workload.take(most)) for workload in workloads}
    limit = context_limit(target.config.get_text_config(decoder=True))
    if limit is None or settings.via_generate:  # `generate()` goes on beyond it
        return encoded
    for name, prompts in encoded.items():
        longest = max(map(len, prompts))
        if longest + settings.max_new_tokens > limit:
            raise InvalidInputError(
                f"A prompt of {name} has {longest} tokens and `max_new_tokens` (--max-new-tokens) is "
                f"{settings.max_new_tokens}, but the target's context ends at {limit}. Leave out prompts as long as "
                "that, or ask for shorter answers."
            )
    return encoded


def _ignore(message: str) -> None:
    del message


def _doubts(target: PreTrainedModel) -> Iterator[str]:
    if target.device.type != "cpu":
        return
    is_prepacked = has_prepacked_layers(target)
    if target.dtype != torch.float32 and default_dtype("cpu") == torch.float32 and not is_prepacked:
        yield f"This processor emulates {target.dtype}: drafting cannot pay here. Use --prepack or float32."
    if os.getloadavg()[0] > 0.5 + torch.get_num_threads():
        yield f"The load average is {os.getloadavg()[0]:.1f}: other processes take part of the time measured."


@contextmanager
def _without_eos(target: PreTrainedModel, is_on: bool) -> Iterator[None]:
    """Lets every answer run to its full length, so that all methods do the same work."""
    eos = target.generation_config.eos_token_id
    if is_on:
        target.generation_config.eos_token_id = None
    try:
        yield
    finally:
        target.generation_config.eos_token_id = eos


def _run_cell(
    models: BenchModels,
    methods: Sequence[BenchMethod],
    workload: str,
    concurrency: int,
    prompts: list[list[int]],
    settings: BenchSettings,
    report: BenchReport,
    on_step: Callable[[str], None],
) -> None:
    """All methods on one workload at one concurrency; what cannot run is put among `skipped`."""
    where = f"{workload}, concurrency {concurrency}"
    ready = []
    for method in methods:
        on_step(f"{where}: warming up {method.name}")
        reason = method.reason_to_skip(concurrency) or _warm_up(method, prompts, concurrency, settings)
        if reason is None:
            ready.append(method)
        else:
            report.skipped.append(
                {"method": method.name, "workload": workload, "concurrency": concurrency, "reason": reason}
            )
    runs: dict[str, list[MethodRun]] = {method.name: [] for method in ready}
    sharing = [m for m in ready if isinstance(m, EngineMethod) and m.takes_turns] if settings.in_turns else []
    alone = [method for method in ready if method not in sharing]
    for repeat in range(settings.repeats):
        if sharing:
            names = ", ".join(method.name for method in sharing)
            on_step(f"{where}: {names} in turns, {repeat + 1} of {settings.repeats}")
            begun = [method.begin(prompts, concurrency, settings.max_new_tokens) for method in sharing]
            for method, run in zip(sharing, run_in_turns(begun), strict=True):
                runs[method.name].append(run)
        for method in _in_order(alone, repeat):
            on_step(f"{where}: {method.name}, {repeat + 1} of {settings.repeats}")
            if runs[PLAIN]:
                method.learn_answers(runs[PLAIN][0].token_ids or [])
            runs[method.name].append(method.run(prompts, concurrency, settings.max_new_tokens))
    is_greedy = not settings.temperature
    judge = _Judge(models.target, prompts, runs[PLAIN][0].token_ids or [])
    for method in ready:
        if is_greedy:
            on_step(f"{where}: comparing the tokens of {method.name}")
        report.rows.append(
            summarise(
                method.name,
                workload,
                concurrency,
                runs[method.name],
                len(prompts),
                runs[PLAIN],
                runs.get(_TRANSFORMERS),
                judge.agreement([run.token_ids for run in runs[method.name]]) if is_greedy else None,
            )
        )


def _in_order(methods: Sequence[BenchMethod], repeat: int) -> list[BenchMethod]:
    """Plain decoding stays first: the oracle needs its answers. The others come early one after the other."""
    first = [method for method in methods if method.name == PLAIN]
    rest = [method for method in methods if method.name != PLAIN]
    turn = repeat % len(rest) if rest else 0
    return [*first, *rest[turn:], *rest[:turn]]


def _warm_up(method: BenchMethod, prompts: list[list[int]], concurrency: int, settings: BenchSettings) -> str | None:
    """Prepares a method and runs it briefly. What is not ours may refuse; then this says why."""
    try:
        method.prepare(concurrency)
        few = prompts[: max(concurrency, 1)]
        if settings.warm_up_tokens > 0 and method.name != "oracle":
            method.run(few, concurrency, settings.warm_up_tokens)
    except Exception as error:
        if method.name.partition(":")[0] not in REFERENCE_METHODS and not isinstance(error, AdaFlashError):
            raise
        if method.name == PLAIN:
            if isinstance(error, UnsupportedGenerationError) and isinstance(method, EngineMethod):
                raise UnsupportedGenerationError(f"{error} For a benchmark of it pass --via generate.") from error
            raise
        return str(error) if isinstance(error, AdaFlashError) else f"{type(error).__name__}: {error}"
    return None


class _Judge:
    """Compares answers with those of plain decoding; a difference is looked at once, however often it occurs."""

    def __init__(self, target: PreTrainedModel, prompts: list[list[int]], plain: list[list[int]]) -> None:
        self._target, self._prompts, self._plain = target, prompts, plain
        self._verdicts: dict[tuple[int, tuple[int, ...]], bool] = {}

    def agreement(self, repeats: Sequence[list[list[int]] | None]) -> Agreement | None:
        """Of the answers that a method gave in all its repeats."""
        answers = [answer for answer in repeats if answer is not None]
        if not answers:
            return None
        identical = near_ties = 0
        for index, plain in enumerate(self._plain):
            others = {tuple(answer[index]) for answer in answers} - {tuple(plain)}
            if not others:
                identical += 1
            elif all(self._is_near_tie(index, other) for other in others):
                near_ties += 1
        return Agreement(len(self._plain), identical, near_ties)

    def _is_near_tie(self, index: int, answer: tuple[int, ...]) -> bool:
        if (index, answer) not in self._verdicts:
            prompt = torch.tensor([self._prompts[index]])
            difference = find_first_difference(self._target, prompt, tuple(self._plain[index]), answer)
            self._verdicts[index, answer] = difference is None or difference.is_near_tie
        return self._verdicts[index, answer]
