"""What a model card says about measurements: result files of `adaflash bench` as tables and entries of the index."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import InvalidInputError
from .evaluation.result_files import markdown_table


if TYPE_CHECKING:
    from huggingface_hub import EvalResult

    from .configuration_dflash_drafter import DFlashDrafterConfig


__all__ = ["BenchFile", "read_bench_file"]

_PLAIN = "plain"
_HEADER = ("method", "requests at once", "tok/s", "speedup", "tau", "rows verified", "same tokens")
_DATASET_IDS = {"gsm8k": "openai/gsm8k", "humaneval": "openai/openai_humaneval"}


class BenchFile:
    """
    Results of `adaflash bench`.

    Args:
        environment (`Mapping[str, Any]`):
            Machine, versions and models.
        settings (`Mapping[str, Any]`):
            How it was measured.
        rows (`list[dict[str, Any]]`):
            See [`BenchRow`].
    """

    def __init__(
        self, environment: Mapping[str, Any], settings: Mapping[str, Any], rows: list[dict[str, Any]]
    ) -> None:
        self.environment, self.settings, self.rows = environment, settings, rows

    @property
    def place(self) -> str:
        """Where it was measured, in a few words."""
        known = self.environment
        device = known.get("device", "cpu")
        where = known.get("processor") if device == "cpu" else device
        threads = f", {known['threads']} threads" if device == "cpu" and "threads" in known else ""
        return f"{where or device}{threads}, {known.get('dtype', 'unknown dtype')}"

    def tables(self) -> list[tuple[str, str]]:
        """Title and Markdown for each workload."""
        return [
            (f"Speed on {workload}, {self.place}", self._table(rows)) for workload, rows in self._by_workload().items()
        ]

    def _by_workload(self) -> dict[str, list[dict[str, Any]]]:
        names = dict.fromkeys(row["workload"] for row in self.rows)
        return {name: [row for row in self.rows if row["workload"] == name] for name in names}

    def _table(self, rows: Iterable[Mapping[str, Any]]) -> str:
        table = markdown_table(_HEADER, [_cells(row) for row in rows])
        versions = ", ".join(
            f"{name} {self.environment[key]}"
            for name, key in (("torch", "torch"), ("transformers", "transformers"), ("adaflash-hf", "adaflash_hf"))
            if key in self.environment
        )
        tokens, repeats = self.settings.get("max_new_tokens"), self.settings.get("repeats")
        how = (
            f"Medians of {repeats} runs, answers of up to {tokens} tokens, {versions}, "
            f"{str(self.environment.get('date', 'undated'))[:10]}. Speedup is against plain decoding of the same "
            "requests in the same run; tau is the number of tokens committed per verification."
        )
        return f"{table}\n\n{how}\n\n```bash\n{self.command()}\n```"

    def command(self) -> str:
        """The command that measures this again."""
        options: list[tuple[str, Any]] = [
            ("--target", self.environment.get("target")),
            ("--drafter", _name(self.environment.get("drafter"))),
            ("--method", ",".join(self.settings.get("methods", ()))),
            ("--workload", ",".join(map(_name, self.settings.get("workloads", ())))),
            ("--concurrency", ",".join(map(str, self.settings.get("concurrencies", ())))),
            ("--requests", self.settings.get("num_requests")),
            ("--max-new-tokens", self.settings.get("max_new_tokens")),
            ("--repeats", self.settings.get("repeats")),
            ("--dtype", self.environment.get("dtype")),
        ]
        flags = ["--ignore-eos"] if self.settings.get("ignore_eos") else []
        flags += ["--via", "generate"] if self.settings.get("via_generate") else []
        given = [str(part) for name, value in options if value for part in (name, value)]
        return shlex.join(["adaflash", "bench", *given, *flags])

    def results(self) -> list[EvalResult]:
        """Speedup and tau of every method, for the model index."""
        from huggingface_hub import EvalResult

        found = []
        for row in self.rows:
            if row["method"] == _PLAIN or row.get("speedup") is None:
                continue
            labels = {
                "task_type": "text-generation",
                "task_name": "Speculative decoding",
                "dataset_type": _DATASET_IDS.get(row["workload"], row["workload"]),
                "dataset_name": row["workload"],
                "dataset_config": f"{row['method']}, {row['concurrency']} requests at once, {self.place}",
            }
            found.append(
                EvalResult(
                    metric_type="speedup",
                    metric_name="speedup over plain decoding",
                    metric_value=round(row["speedup"], 3),
                    **labels,
                )
            )
            if row.get("acceptance_length") is not None:
                tau = round(row["acceptance_length"], 3)
                found.append(
                    EvalResult(metric_type="acceptance_length", metric_name="tau", metric_value=tau, **labels)
                )
        return found


def read_bench_file(path: str | Path, config: DFlashDrafterConfig) -> BenchFile:
    """
    Read results of `adaflash bench`.

    Args:
        path (`str` or `Path`):
            The JSON file.
        config (`DFlashDrafterConfig`):
            The drafter that the card is about.

    Raises:
        InvalidInputError: The file is none, measured servers, or another drafter.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        environment, settings, rows = data["environment"], data["settings"], data["results"]
        complete = all({"workload", "method", "concurrency", "tokens_per_second"} <= row.keys() for row in rows)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidInputError(
            f"`bench` is {str(path)!r}, which is not a result file of `adaflash bench` "
            f"({type(error).__name__}: {error}); give the .json that it wrote."
        ) from error
    if not rows or not complete:
        raise InvalidInputError(f"`bench` is {str(path)!r}, which holds no results; let `adaflash bench` finish.")
    if environment.get("block_size") != config.block_size:
        raise InvalidInputError(
            f"`bench` is {str(path)!r}, measured with {environment.get('drafter', 'no drafter')!r} of block size "
            f"{environment.get('block_size')}, but this drafter's is {config.block_size}; measure this one."
        )
    return BenchFile(environment, settings, rows)


def _cells(row: Mapping[str, Any]) -> tuple[Any, ...]:
    def number(name: str, digits: int) -> str | None:
        value = row.get(name)
        return None if value is None else f"{value:.{digits}f}"

    same = None
    if row.get("identical") is not None:
        same = "yes" if row["identical"] else f"{row.get('identical_requests')} of {row.get('requests')}"
    return (
        row["method"],
        row["concurrency"],
        number("tokens_per_second", 1),
        None if row.get("speedup") is None else f"{row['speedup']:.2f}x",
        number("acceptance_length", 2),
        number("mean_verify_length", 2),
        same,
    )


def _name(place: Any) -> str:
    """A Hub id as it is, a path on this machine by its last part."""
    text = str(place or "")
    return text if text.count("/") <= 1 and not text.startswith((".", "/", "~")) else Path(text).name
