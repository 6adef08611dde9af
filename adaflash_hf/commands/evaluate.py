"""`adaflash evaluate`: the paper's experiments in small, each an existing command with certain settings.

A subcommand takes the options of the command it stands on, with other defaults, measures with it, and puts what others
have published beside the results.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import InvalidInputError
from ..evaluation.experiments import EXPERIMENTS, Experiment
from .ablate import Compare, objectives
from .bench import bench
from .bench_options import PlotsOption, settle_plots
from .evaluate_shift import cross_domain, online
from .evaluate_speed import speed
from .help_pages import SectionedCommand


__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True, help="Repeat the papers' experiments in small, on a real model of your choice."
)

# Each experiment has a directory with these files and pictures beside them.
RESULTS = "results"
# Ignored by git in a clone of this repository, whose `results/` are what the README shows.
OUT = Path("runs/evaluation")
OutOption = Annotated[
    Path, typer.Option("--out", "-o", help="Directory of all results; those of this experiment go to NAME in it.")
]


@app.command("list", cls=SectionedCommand)
def list_experiments() -> None:
    """Say what each experiment asks, how long it takes, and which workloads have names."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from ..evaluation.workloads import describe_workloads

    console = Console()
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True)
    table.add_column("experiment", no_wrap=True)
    table.add_column("question")
    table.add_column("needs", max_width=16)
    table.add_column("about", no_wrap=True)
    for experiment in EXPERIMENTS.values():
        table.add_row(experiment.name, experiment.question, experiment.needs, _duration(experiment.minutes))
    console.print(table)
    console.print(
        "Times are for the embedded SmolLM2-135M on two cores without bfloat16 instructions, with the defaults; they "
        "grow with targets, requests, repeats and seeds.\n",
        highlight=False,
    )
    names = Table(box=box.SIMPLE_HEAD)
    for title in ("workload", "prompts"):
        names.add_column(title, no_wrap=title == "workload")
    for name, where in describe_workloads():
        names.add_row(name, where)
    console.print(names)


def _duration(minutes: int) -> str:
    return f"{minutes} min" if minutes < 120 else f"{round(minutes / 30) / 2:g} h"


def _evaluate(experiment: Experiment, given: dict[str, Any]) -> None:
    """Measure, then add what is this experiment's own."""
    from ..evaluation.result_files import check_results_place

    directory = given.pop("out") / experiment.name
    given["plots"] = settle_plots(given["plots"])
    check_results_place(directory / RESULTS)
    if experiment.sweep:
        _measure_sweep(experiment, given, directory)
    else:
        _KINDS[experiment.kind].measure(directory, **given)
    files = _finish(experiment, directory, given["plots"])
    typer.echo("\n".join(f"Wrote {file}" for file in files), err=True)


def _measure_sweep(experiment: Experiment, given: Mapping[str, Any], directory: Path) -> None:
    """The same benchmark with one setting after the other; the first results are there before the last run."""
    from ..evaluation.bench_files import merge_sweep, read_bench_report
    from ..evaluation.bench_plots import plot_report
    from ..evaluation.bench_report import report_sections
    from ..evaluation.result_files import write_results

    done: list[str] = []
    for label, settings in experiment.sweep.items():
        bench(**{**given, **_options(settings), "plots": False, "out": directory / label.replace(" ", "-")})
        done.append(label)
        merged = merge_sweep({name: read_bench_report(directory / f"{name.replace(' ', '-')}.json") for name in done})
        write_results(directory / RESULTS, merged.as_dict(), "Benchmark", report_sections(merged))
    if given["plots"]:
        plot_report(merged.rows, directory / RESULTS)


def _finish(experiment: Experiment, directory: Path, plots: bool) -> list[Path]:
    """Adds the question, tables of its own and published figures to the results, and draws them."""
    import json

    from ..evaluation.experiment_report import experiment_sections, plot_experiment
    from ..evaluation.published_comparison import published_data
    from ..evaluation.result_files import write_results

    path = directory / RESULTS
    data = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    _, _, body = path.with_suffix(".md").read_text(encoding="utf-8").partition("\n")
    title = f"{experiment.name}: {experiment.question}"
    sections = [body.strip(), *experiment_sections(experiment, data)]
    data = {
        "experiment": {"name": experiment.name, "question": experiment.question},
        **data,
        "published": published_data(experiment),
    }
    write_results(path, data, title, sections)
    pictures = plot_experiment(experiment, data, path) if plots else []
    return [path.with_suffix(".json"), path.with_suffix(".md"), *pictures]


def _bench(directory: Path, **options: Any) -> None:
    bench(**options, out=directory / RESULTS)


def _servers(directory: Path, **options: Any) -> None:
    if not options["base_urls"]:
        raise InvalidInputError(
            "`--base-url` is not given; name each server, such as eagle3=http://localhost:8001/v1."
        )
    _bench(directory, **options)


def _speed(directory: Path, *, plots: bool, **options: Any) -> None:
    del plots  # drawn with the rest
    speed(**options, out=directory / RESULTS)


def _ablation(directory: Path, *, plots: bool, **options: Any) -> None:
    """Heads are compared on the drafter that is there, drafters from scratch unless one is given to start from."""
    from .loading import find_drafter

    del plots
    if options["compare"] == [Compare.HEADS] and options["init"] is None:
        options["init"] = options["head_drafter"] or find_drafter(options["target"], None)
    objectives(**options, from_scratch=options["init"] is None, out=directory)


def _online(directory: Path, **options: Any) -> None:
    online(**options, out=directory)


def _cross_domain(directory: Path, **options: Any) -> None:
    cross_domain(**options, out=directory)


class _Command:
    """
    The command that experiments of one kind stand on.

    Args:
        function (`Callable`):
            Has the options.
        measure (`Callable`):
            Runs it, given a directory and its options.
        hidden (`Iterable[str]`):
            Options that these experiments do not have.
    """

    def __init__(
        self, function: Callable[..., None], measure: Callable[..., None], hidden: Iterable[str] = ()
    ) -> None:
        self.function, self.measure, self.hidden = function, measure, frozenset(hidden)


_SERVER_OPTIONS = ("base_urls", "model", "api_key")
_MODEL_OPTIONS = (
    "methods", "via", "temperature", "draft_proposal", "target", "drafter", "assistant", "confidence_head",
    "osd_drafter", "dtype", "device", "prepack",
)  # fmt: skip
_KINDS: dict[str, _Command] = {
    "speed": _Command(speed, _speed),
    "bench": _Command(bench, _bench, _SERVER_OPTIONS),
    "servers": _Command(bench, _servers, _MODEL_OPTIONS),
    "ablation": _Command(objectives, _ablation, ["from_scratch"]),
    "shift": _Command(online, _online),
    "cross": _Command(cross_domain, _cross_domain),
}


def _options(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Values as the options of a command have them."""
    from .options import DraftProposal

    kinds: dict[str, Callable[[Any], Any]] = {
        "compare": lambda names: [Compare(name) for name in names],
        "draft_proposal": DraftProposal,
    }
    return {name: kinds.get(name, lambda value: value)(value) for name, value in settings.items()}


def _subcommand(experiment: Experiment) -> Callable[..., None]:
    """A function that typer reads the options of the underlying command from, with this experiment's defaults."""
    command = _KINDS[experiment.kind]
    swept = {name for settings in experiment.sweep.values() for name in settings}
    defaults = _options(experiment.settings)
    parameters = []
    for parameter in inspect.signature(command.function, eval_str=True).parameters.values():
        if parameter.name in command.hidden | swept | {"out", "plots"}:
            continue
        default = defaults.get(parameter.name, parameter.default)
        parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, default=default))
    for name, annotation, default in (("out", OutOption, OUT), ("plots", PlotsOption, True)):
        parameters.append(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        )

    def subcommand(**given: Any) -> None:
        _evaluate(experiment, given)

    subcommand.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    subcommand.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return subcommand


for _experiment in EXPERIMENTS.values():
    _help = f"{_experiment.question} About {_duration(_experiment.minutes)}; see `adaflash evaluate list`."
    app.command(_experiment.name, cls=SectionedCommand, help=_help)(_subcommand(_experiment))
