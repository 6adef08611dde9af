"""What a model card says about measurements: result files of benchmarks as tables and entries of the index."""

from __future__ import annotations

import json
import shlex
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import InvalidInputError
from .evaluation.result_files import markdown_table


if TYPE_CHECKING:
    from huggingface_hub import EvalResult

    from .evaluation.bench_results import BenchRow


__all__ = ["BenchFile", "ResultFile", "SpeedFile", "read_result_file"]

_HEADER = ("method", "requests at once", "tok/s", "speedup", "tau", "rows verified", "same tokens")
_DATASET_IDS = {"gsm8k": "openai/gsm8k", "humaneval": "openai/openai_humaneval"}
# What the names in the tables mean, for those who do not know the command.
_MEANINGS = {
    "transformers": "is plain `generate()` on padded batches",
    "dflash": "verifies whole blocks",
    "confidence": "verifies as far as the drafter trusts itself",
    "adaflash": "verifies what the length head keeps",
    "cost_aware": "verifies what pays on this machine",
}


class ResultFile(ABC):
    """
    Measured results of a drafter.

    Args:
        environment (`Mapping[str, Any]`):
            Machine, versions and models.
        settings (`Mapping[str, Any]`):
            How it was measured.
        drafter (`str`):
            Name of the drafter in commands.
    """

    def __init__(self, environment: Mapping[str, Any], settings: Mapping[str, Any], drafter: str) -> None:
        self.environment, self.settings, self._drafter = environment, settings, drafter

    @property
    def place(self) -> str:
        """Where it was measured, in a few words."""
        known = self.environment
        device = known.get("device", "cpu")
        where = known.get("processor") if device == "cpu" else device
        threads = f", {known['threads']} threads" if device == "cpu" and "threads" in known else ""
        return f"{where or device}{threads}, {known.get('dtype', 'unknown dtype')}"

    @property
    def date(self) -> str:
        """The day it was measured."""
        return str(self.environment.get("date", "undated"))[:10]

    @property
    @abstractmethod
    def table(self) -> tuple[str, str]:
        """Title, and Markdown with the numbers, how they came about and the command."""

    @property
    @abstractmethod
    def command(self) -> str:
        """The command that measures this again."""

    @abstractmethod
    def results(self) -> list[EvalResult]:
        """What was measured with the drafter, for the model index."""

    def _command(self, command: str, options: Iterable[tuple[str, Any]], flags: Iterable[str] = ()) -> str:
        models = [("--target", self.environment.get("target")), ("--drafter", self._drafter)]
        given = [*models, *options, ("--dtype", self.environment.get("dtype"))]
        return shlex.join([*command.split(), *(str(part) for pair in given if pair[1] for part in pair), *flags])

    def _entries(
        self, workload: str, how: str, speedup: float | None, acceptance_length: float | None
    ) -> list[EvalResult]:
        from huggingface_hub import EvalResult

        measured = {
            "speedup": ("speedup over plain decoding", speedup),
            "acceptance_length": ("tau", acceptance_length),
        }
        return [
            EvalResult(
                task_type="text-generation",
                task_name="Speculative decoding",
                dataset_type=_DATASET_IDS.get(workload, workload),
                dataset_name=workload,
                # Entries of one data set and configuration are taken for the same measurement.
                dataset_config=f"{how}, {self.place}",
                metric_type=metric,
                metric_name=name,
                metric_value=round(value, 3),
            )
            for metric, (name, value) in measured.items()
            if value is not None
        ]


class BenchFile(ResultFile):
    """
    Results of `adaflash bench`, or of an experiment of `adaflash evaluate` that stands on it.

    Args:
        environment, settings, drafter:
            See [`ResultFile`].
        rows (`list[BenchRow]`):
            One for each method, workload and concurrency.
    """

    def __init__(
        self, environment: Mapping[str, Any], settings: Mapping[str, Any], drafter: str, rows: list[BenchRow]
    ) -> None:
        super().__init__(environment, settings, drafter)
        self._rows = rows

    @property
    def table(self) -> tuple[str, str]:
        """Title, and one table of all workloads."""
        workloads = list(dict.fromkeys(row.workload for row in self._rows))
        # A column that says the same in every line is left to the title.
        has_column = len(workloads) > 1
        header = ("workload", *_HEADER) if has_column else _HEADER
        table = markdown_table(header, [(row.workload, *_cells(row))[not has_column :] for row in self._rows])
        versions = ", ".join(
            f"{name} {self.environment[key]}"
            for name, key in (("torch", "torch"), ("transformers", "transformers"), ("adaflash-hf", "adaflash_hf"))
            if key in self.environment
        )
        tokens, repeats = self.settings.get("max_new_tokens"), self.settings.get("repeats")
        measured = "Measured once" if repeats == 1 else f"Medians of {repeats} runs"
        methods = dict.fromkeys(row.method.partition(":")[0] for row in self._rows)
        meanings = ", ".join(f"`{name}` {_MEANINGS[name]}" for name in methods if name in _MEANINGS)
        how = (
            f"{measured}, answers of up to {tokens} tokens, {versions}, {self.date}. Speedup is against plain "
            "decoding of the same requests in the same run; tau is the number of tokens committed per verification."
            f"{f' Of the methods, {meanings}.' if meanings else ''}"
        )
        title = f"Speed and tau on {', '.join(workloads)}, {self.place}"
        return title, f"{table}\n\n{how}\n\n```bash\n{self.command}\n```"

    @property
    def command(self) -> str:
        """The `adaflash bench` that measures this again."""
        options = [
            ("--method", ",".join(self.settings.get("methods", ()))),
            ("--workload", ",".join(map(_name, self.settings.get("workloads", ())))),
            ("--concurrency", ",".join(map(str, self.settings.get("concurrencies", ())))),
            ("--requests", self.settings.get("num_requests")),
            ("--max-new-tokens", self.settings.get("max_new_tokens")),
            ("--repeats", self.settings.get("repeats")),
            ("--temperature", self.settings.get("temperature")),
            ("--draft-proposal", self.settings.get("temperature") and self.settings.get("draft_proposal")),
        ]
        flags = ["--ignore-eos"] if self.settings.get("ignore_eos") else []
        flags += ["--via", "generate"] if self.settings.get("via_generate") else []
        return self._command("adaflash bench", options, flags)

    def results(self) -> list[EvalResult]:
        """Speedup and tau of every method that drafts."""
        from .evaluation.bench_method_names import needs_drafter

        repeats = self.settings.get("repeats", 1)
        # The same method may be in several files, measured once here and three times there.
        times = "one run" if repeats == 1 else f"median of {repeats} runs"
        return [
            entry
            for row in self._rows
            if row.speedup is not None and needs_drafter(row.method)
            for entry in self._entries(
                row.workload,
                f"{row.method}, {row.concurrency} of {row.requests} requests at once, {times}",
                row.speedup,
                row.acceptance_length,
            )
        ]


class SpeedFile(ResultFile):
    """
    Results of `adaflash evaluate speed`.

    Args:
        result (`Mapping[str, Any]`):
            What [`measure_speed`] measured, with `environment` and `settings`.
        drafter (`str`):
            See [`ResultFile`].
    """

    def __init__(self, result: Mapping[str, Any], drafter: str) -> None:
        super().__init__(result["environment"], result["settings"], drafter)
        self._result = result

    @property
    def table(self) -> tuple[str, str]:
        """Title, and the headline with its paragraph."""
        from .evaluation.speed import headline_table, headline_text

        title = f"`generate()` on {self.settings['prompts']}, one prompt at a time, {self.place}"
        how = f"{headline_text(self._result)} Measured on {self.date}."
        return title, f"{headline_table(self._result)}\n\n{how}\n\n```bash\n{self.command}\n```"

    @property
    def command(self) -> str:
        """The `adaflash evaluate speed` that measures this again."""
        options = [
            ("--workload", self.settings["prompts"]),
            ("--limit", self.settings["limit"]),
            ("--max-new-tokens", self.settings["max_new_tokens"]),
            ("--length-policy", self.settings["length_policy"]),
        ]
        return self._command("adaflash evaluate speed", options)

    def results(self) -> list[EvalResult]:
        """Speedup and tau."""
        how = f"generate(), one prompt at a time, length policy {self.settings['length_policy']}"
        result = self._result
        return self._entries(self.settings["prompts"], how, result["speedup_median"], result["acceptance_length"])


def read_result_file(path: str | Path, identity: Mapping[str, Any], drafter: str) -> ResultFile:
    """
    Read results of `adaflash bench` or `adaflash evaluate`.

    Args:
        path (`str` or `Path`):
            The JSON file.
        identity (`Mapping[str, Any]`):
            What `environment` says of the drafter that the card is about: `block_size`, `drafter_parameters` and
            `drafter_sha256`. What a file of an earlier version lacks is not compared.
        drafter (`str`):
            Its name in commands.

    Raises:
        InvalidInputError: The file is none, measured servers, or another drafter.
    """
    from .evaluation.bench_results import BenchRow

    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        environment, settings = data["environment"], data["settings"]
        rows = None if "speedup_median" in data else [BenchRow(**row) for row in data["results"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidInputError(
            f"`bench` is {str(path)!r}, which is not a result file of `adaflash bench` or `adaflash evaluate` "
            f"({type(error).__name__}: {error}); give the .json that it wrote."
        ) from error
    if rows == []:
        raise InvalidInputError(f"`bench` is {str(path)!r}, which holds no results; let `adaflash bench` finish.")
    if "sweep" in settings:
        raise InvalidInputError(
            f"`bench` is {str(path)!r}, which holds runs of several settings ({', '.join(settings['sweep'])}); "
            "give the files of single runs beside it."
        )
    for name, own in identity.items():
        measured = environment.get(name)
        if measured != own and (measured is not None or name == "block_size"):
            raise InvalidInputError(
                f"`bench` is {str(path)!r}, measured with {environment.get('drafter', 'no drafter')!r}, whose "
                f"`{name}` is {measured}, but this drafter's is {own}; measure this one."
            )
    return SpeedFile(data, drafter) if rows is None else BenchFile(environment, settings, drafter, rows)


def _cells(row: BenchRow) -> tuple[Any, ...]:
    def number(value: float | None, digits: int) -> str | None:
        return None if value is None else f"{value:.{digits}f}"

    return (
        row.method,
        row.concurrency,
        number(row.tokens_per_second, 1),
        None if row.speedup is None else f"{row.speedup:.2f}x",
        number(row.acceptance_length, 2),
        number(row.mean_verify_length, 2),
        row.agreement_text,
    )


def _name(place: Any) -> str:
    """A Hub id as it is, a path on this machine by its last part."""
    text = str(place or "")
    return text if text.count("/") <= 1 and not text.startswith((".", "/", "~")) else Path(text).name
