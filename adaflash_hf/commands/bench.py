"""`adaflash bench`: methods, workloads and concurrencies measured against plain decoding, or running servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import InvalidInputError, OutputError
from .bench_options import (
    ApiKeyOption,
    AssistantOption,
    BaseUrlsOption,
    ConcurrenciesOption,
    ConfidenceHeadOption,
    DataDirOption,
    IgnoreEosOption,
    InTurnsOption,
    MaxNewTokensOption,
    MethodsOption,
    ModelOption,
    OsdDrafterOption,
    OutOption,
    PlotsOption,
    RepeatsOption,
    RequestsOption,
    TemperatureOption,
    Via,
    ViaOption,
    WarmUpTokensOption,
    WorkloadsOption,
    settle_plots,
)
from .interruption import telling_what_is_kept
from .options import (
    DeviceOption,
    DrafterOption,
    DraftProposal,
    DraftProposalOption,
    Dtype,
    DtypeOption,
    PrepackOption,
    TargetOption,
    warn_if_idle,
)


if TYPE_CHECKING:
    from rich.console import Console

    from ..evaluation.bench import BenchReport, BenchSettings
    from ..evaluation.bench_methods import BenchModels
    from ..evaluation.workloads import Workload


__all__ = ["bench"]

_DEFAULT_METHODS = ["plain", "dflash", "adaflash", "cost_aware"]


def bench(
    methods: MethodsOption = None,
    workloads: WorkloadsOption = None,
    concurrencies: ConcurrenciesOption = None,
    requests: RequestsOption = None,
    max_new_tokens: MaxNewTokensOption = 128,
    repeats: RepeatsOption = 3,
    warm_up_tokens: WarmUpTokensOption = 8,
    ignore_eos: IgnoreEosOption = False,
    in_turns: InTurnsOption = False,
    via: ViaOption = Via.ENGINE,
    temperature: TemperatureOption = 0.0,
    draft_proposal: DraftProposalOption = None,
    target: TargetOption = "smollm2-135m",
    drafter: DrafterOption = None,
    assistant: AssistantOption = None,
    confidence_head: ConfidenceHeadOption = None,
    osd_drafter: OsdDrafterOption = None,
    dtype: DtypeOption = Dtype.AUTO,
    device: DeviceOption = None,
    prepack: PrepackOption = True,
    data_dir: DataDirOption = None,
    out: OutOption = Path("adaflash-bench"),
    plots: PlotsOption = True,
    base_urls: BaseUrlsOption = None,
    model: ModelOption = None,
    api_key: ApiKeyOption = None,
) -> None:
    """Measure speed, acceptance, latency and memory against plain decoding of the same target."""
    from rich.console import Console

    from ..evaluation.bench import BenchSettings
    from ..evaluation.bench_report import build_bench_table
    from ..evaluation.result_files import check_results_place
    from ..evaluation.workloads import load_workload

    settings = BenchSettings(
        methods=_names(methods, _DEFAULT_METHODS),
        concurrencies=_numbers(_names(concurrencies, ["1", "8"])),
        num_requests=requests,
        max_new_tokens=max_new_tokens,
        repeats=repeats,
        warm_up_tokens=warm_up_tokens,
        ignore_eos=ignore_eos,
        in_turns=in_turns,
        via_generate=via is Via.GENERATE,
        temperature=temperature,
        draft_proposal=(draft_proposal or DraftProposal.ARGMAX).value,
    )
    asked = [load_workload(name, data_dir) for name in _names(workloads, ["blend"])]
    plots = settle_plots(plots)
    check_results_place(out)
    messages = Console(stderr=True)
    _refuse_same_names(asked)
    _tell_repeats(asked, settings, messages)
    writer = _Writer(out)
    if base_urls:
        if methods:
            raise InvalidInputError("`--method` and `--base-url` exclude each other: a server decodes as it does.")
        if in_turns:
            raise InvalidInputError("`--in-turns` and `--base-url` exclude each other: servers do not wait.")
        if temperature:
            raise InvalidInputError(
                f"`--temperature` is {temperature:g}, but servers are asked for greedy answers only."
            )
        with telling_what_is_kept(writer.describe):
            report = _bench_servers(base_urls, model, api_key, asked, settings, messages, writer)
    else:
        _check_methods(settings.methods)
        warn_if_idle(draft_proposal, is_greedy=not temperature)
        extra = _Extra(assistant, confidence_head, osd_drafter)
        models, tokenizer, environment = _load(
            settings.methods, target, drafter, extra, dtype.value, device, prepack, messages
        )
        with telling_what_is_kept(writer.describe):
            report = _bench_models(models, tokenizer, environment, asked, settings, messages, writer)
    console = Console()
    console.print(build_bench_table(report.rows, console.width))
    _tell_skipped(report, messages)
    if writer.failure is not None:
        raise writer.failure
    for file in [*writer.files, *(_plot(report, out) if plots else [])]:
        messages.print(f"Wrote {file}", highlight=False, markup=False)


def _names(given: Sequence[str] | None, default: list[str]) -> list[str]:
    """What was listed, by repeating an option or by commas."""
    if not given:
        return default
    return [name.strip() for part in given for name in part.split(",") if name.strip()]


def _numbers(texts: Sequence[str]) -> list[int]:
    try:
        return [int(text) for text in texts]
    except ValueError as error:
        raise InvalidInputError(f"`--concurrency` is {', '.join(texts)}; expected whole numbers.") from error


def _refuse_same_names(workloads: Sequence[Workload]) -> None:
    """Results tell workloads apart by their names, which of files are those without folders."""
    names = [workload.name for workload in workloads]
    for name in names:
        if names.count(name) > 1:
            raise InvalidInputError(
                f"`--workload` names two that would both be {name!r} in the results; name each once, or rename a file."
            )


def _tell_repeats(workloads: Sequence[Workload], settings: BenchSettings, console: Console) -> None:
    """Answers to one prompt are alike: numbers say less of other prompts the fewer there are."""
    most = max(settings.requests_at(concurrency) for concurrency in settings.concurrencies)
    for workload in workloads:
        if len(workload.prompts) < most:
            console.print(
                f"{workload.name}: {len(workload.prompts)} prompts, {most} requests: prompts are used more than once.",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )


def _check_methods(methods: Sequence[str]) -> None:
    """Before anything is loaded."""
    from ..evaluation.bench_method_builder import check_method

    for name in methods:
        check_method(name)


def _tell_skipped(report: BenchReport, console: Console) -> None:
    """Why rows are missing that were asked for."""
    places: dict[tuple[str, str], list[str]] = {}
    for entry in report.skipped:
        place = f"{entry['workload']} at concurrency {entry['concurrency']}"
        places.setdefault((entry["method"], entry["reason"]), []).append(place)
    for (method, reason), where in places.items():
        console.print(
            f"Not measured: {method} on {', '.join(where)}: {reason}",
            style="yellow",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )


def _plot(report: BenchReport, out: Path) -> list[Path]:
    from ..evaluation.bench_plots import plot_report

    return plot_report(report.rows, out)


class _Writer:
    """
    Writes all results so far, so that a run that is cut short was not for nothing. Where that fails, the next time it
    may not: measuring goes on, and `failure` is what the last time said.
    """

    def __init__(self, out: Path) -> None:
        self._out = out
        self.files: list[Path] = []
        self.failure: OutputError | None = None
        self._rows = 0

    def __call__(self, report: BenchReport) -> None:
        from ..evaluation.bench_report import report_sections
        from ..evaluation.result_files import result_files, write_results

        try:
            write_results(self._out, report.as_dict(), "Benchmark", report_sections(report))
        except OutputError as error:
            self.failure = error
            return
        self.failure = None
        self._rows = len(report.rows)
        self.files = [*result_files(self._out)]

    def describe(self) -> str:
        """What there is if measuring ends here."""
        return f"Results so far ({self._rows} rows) are in {' and '.join(map(str, self.files))}." if self.files else ""


class _Extra(NamedTuple):
    """Models that only some methods need."""

    assistant: str | None
    confidence_head: str | None
    osd_drafter: str | None


def _load(
    methods: Sequence[str],
    target: str,
    drafter: str | None,
    extra: _Extra,
    dtype: str,
    device: str | None,
    prepack: bool,
    console: Console,
) -> tuple[BenchModels, Any, dict[str, Any]]:
    """The models that the methods need, their tokenizer, and what numbers depend on."""
    from transformers import AutoModel

    from ..embedded_target import load_target
    from ..evaluation.bench import describe_environment
    from ..evaluation.bench_method_names import needs_drafter
    from ..evaluation.bench_methods import BenchModels
    from ..generation.prepacking import settle_prepacking
    from .loading import load_beside, load_drafter, load_models

    _check_models(methods, target, drafter, extra)
    drafter_model: Any = None
    if any(needs_drafter(name) for name in methods):
        target_model, tokenizer, drafter_model = load_models(target, drafter, dtype, device, prepack, console)
    else:
        target_model, tokenizer = load_target(target, dtype, device=device)
        settle_prepacking(target_model, prepack)
    assistant_model: Any = None
    if extra.assistant is not None:
        assistant_model = load_target(extra.assistant, target_model.dtype, device=target_model.device).model
        settle_prepacking(assistant_model, prepack)
    head: Any = None
    if extra.confidence_head is not None:
        head = load_beside(AutoModel, extra.confidence_head, target_model, "--confidence-head")
    pad = tokenizer.pad_token_id
    osd = None if extra.osd_drafter is None else load_drafter(extra.osd_drafter, target_model, "--osd-drafter")
    if osd is not None:
        settle_prepacking(osd, prepack, allow_rounding=True)
    models = BenchModels(target_model, drafter_model, assistant_model, head, 0 if pad is None else pad, osd)
    environment = describe_environment(target_model, drafter_model, prepacked=prepack, assistant=extra.assistant)
    return models, tokenizer, environment


def _check_models(methods: Sequence[str], target: str, drafter: str | None, extra: _Extra) -> None:
    """Before any of them is loaded."""
    from ..evaluation.bench_method_names import (
        OSD,
        TRANSFORMERS_MTP,
        check_models_of_method,
        check_rows_of_method,
        needs_drafter,
        split_method_name,
    )
    from ..evaluation.mtp import check_mtp_heads
    from ..modeling_confidence_head import ConfidenceHeadModel
    from .loading import check_checkpoint, check_target, find_drafter

    config: Any = None
    osd_config: Any = None
    if any(needs_drafter(name) for name in methods):
        config = check_checkpoint(find_drafter(target, drafter), target=target)
    if extra.osd_drafter is not None:
        osd_config = check_checkpoint(extra.osd_drafter, "--osd-drafter", target=target)
    for name in methods:
        check_models_of_method(
            name,
            has_drafter=config is not None,
            has_length_head=config is not None and config.length_head_config is not None,
            has_osd_drafter=extra.osd_drafter is not None,
            has_assistant=extra.assistant is not None,
        )
        own = osd_config if split_method_name(name)[0] == OSD else config
        if own is not None:
            check_rows_of_method(name, own)
    if TRANSFORMERS_MTP in methods:
        check_mtp_heads(target)
    if extra.confidence_head is not None:
        check_checkpoint(extra.confidence_head, "--confidence-head", ConfidenceHeadModel)
    if extra.assistant is not None:
        check_target(extra.assistant, "--assistant")


def _bench_models(
    models: BenchModels,
    tokenizer: Any,
    environment: dict[str, Any],
    workloads: Sequence[Workload],
    settings: BenchSettings,
    console: Console,
    on_cell: Callable[[BenchReport], None],
) -> BenchReport:
    from ..evaluation.bench import run_bench

    with console.status("Measuring") as status:
        return run_bench(
            models,
            tokenizer,
            workloads,
            settings,
            environment=environment,
            on_step=_reporter(console, status),
            on_cell=on_cell,
            on_warning=lambda text: console.print(f"Warning: {text}", style="yellow", highlight=False, markup=False),
        )


def _bench_servers(
    base_urls: Sequence[str],
    model: str | None,
    api_key: str | None,
    workloads: Sequence[Workload],
    settings: BenchSettings,
    console: Console,
    on_cell: Callable[[BenchReport], None],
) -> BenchReport:
    from ..evaluation.bench import describe_environment
    from ..evaluation.bench_server import bench_servers, parse_server

    servers = [parse_server(text, model, api_key) for text in base_urls]
    with console.status("Measuring") as status:
        return bench_servers(
            servers,
            workloads,
            settings,
            environment=describe_environment(),
            on_step=_reporter(console, status),
            on_cell=on_cell,
        )


def _reporter(console: Console, status: Any) -> Callable[[str], None]:
    """A line that changes on a terminal, lines elsewhere."""
    if console.is_terminal:
        return lambda text: status.update(text)
    return lambda text: console.print(text, highlight=False, markup=False)
