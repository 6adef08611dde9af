"""Benchmark results read back from their files, and several of them put together as one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .bench import BenchReport
from .bench_results import BenchRow


__all__ = ["merge_sweep", "read_bench_report"]


def read_bench_report(path: str | Path) -> BenchReport:
    """
    Read what `adaflash bench` wrote.

    Args:
        path (`str` or `Path`):
            The JSON file.
    """
    data = json.loads(Path(path).read_text(encoding="utf-8"))
    return BenchReport(
        data["environment"], data["settings"], [BenchRow(**row) for row in data["results"]], data["skipped"]
    )


def merge_sweep(reports: Mapping[str, BenchReport]) -> BenchReport:
    """
    One report of several, in which each workload is named after its setting, too.

    Args:
        reports (`Mapping[str, BenchReport]`):
            By label of the setting, such as `"512 tokens"`.

    Returns:
        `BenchReport`: with the settings of all under `sweep`, by label
    """
    first = next(iter(reports.values()))
    settings: dict[str, Any] = {"sweep": {label: report.settings for label, report in reports.items()}}
    merged = BenchReport(first.environment, settings)
    for label, report in reports.items():
        for row in report.rows:
            row.workload = f"{row.workload}, {label}"
        merged.rows += report.rows
        merged.skipped += [{**entry, "workload": f"{entry['workload']}, {label}"} for entry in report.skipped]
    return merged
