"""Results as a JSON file for programs and a Markdown file for people, written together from the same data."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..atomic_files import written_aside
from ..output_places import writing_to


__all__ = ["markdown_table", "mean_and_spread", "write_results"]

_MISSING = "-"


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """
    A Markdown table; the first column is text, the others are numbers.

    Args:
        header (`Sequence[str]`):
            One title for each column.
        rows (`Iterable[Sequence[Any]]`):
            Cells; None shows as a dash, and floats with three decimals.
    """
    lines = [header, [":--"] + ["--:"] * (len(header) - 1), *([_cell(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def mean_and_spread(values: Sequence[float], digits: int = 3) -> str:
    """
    Mean and, of several values, their standard deviation, as text.

    Args:
        values (`Sequence[float]`):
            What repetitions gave.
        digits (`int`, *optional*, defaults to 3):
            Decimals.
    """
    if not values:
        return _MISSING
    mean = sum(values) / len(values)
    if len(values) == 1:
        return f"{mean:.{digits}f}"
    spread = (sum((value - mean) ** 2 for value in values) / (len(values) - 1)) ** 0.5
    return f"{mean:.{digits}f} ± {spread:.{digits}f}"


def write_results(path: str | Path, data: Mapping[str, Any], title: str, sections: Iterable[str]) -> None:
    """
    Write `<path>.json` and `<path>.md`; each appears whole.

    Args:
        path (`str` or `Path`):
            Where to, without a suffix.
        data (`Mapping[str, Any]`):
            Everything measured.
        title (`str`):
            Of the Markdown file.
        sections (`Iterable[str]`):
            Its paragraphs and tables.
    """
    path = Path(path)
    texts = {".json": json.dumps(data, indent=2), ".md": "\n\n".join([f"# {title}", *sections])}
    with writing_to(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        for suffix, text in texts.items():
            with written_aside(path.with_name(path.name + suffix)) as partial:
                partial.write_text(text + "\n", encoding="utf-8")


def _cell(value: Any) -> str:
    if value is None:
        return _MISSING
    return f"{value:.3f}" if isinstance(value, float) else str(value)
