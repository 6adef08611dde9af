"""Results as a JSON file for programs and a Markdown file for people, written together from the same data."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..atomic_files import written_aside
from ..errors import OutputError
from ..output_places import check_writable, writing_to


__all__ = [
    "check_results_place",
    "markdown_table",
    "mean_and_spread",
    "result_files",
    "shown_name",
    "write_results",
]

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


def result_files(path: Path) -> tuple[Path, Path]:
    """The file for programs and the one for people that [`write_results`] writes for `path`, without a suffix."""
    return path.with_name(path.name + ".json"), path.with_name(path.name + ".md")


def check_results_place(path: str | Path) -> None:
    """
    Refuse a place where [`write_results`] could not write, before anything slow begins.

    Args:
        path (`str` or `Path`):
            Where to, without a suffix.

    Raises:
        OutputError: its directory cannot be written to, or a directory has the name of a file.
    """
    path = Path(path)
    check_writable(path.parent)
    for file in result_files(path):
        if file.is_dir():
            raise OutputError(
                f"`out` would have results in {str(file)!r}, which is a directory. Move it away, or pass another "
                "place; nothing was done yet."
            )


def shown_name(name_or_path: str | Path) -> str:
    """
    Of a model, as results have it: where a directory lies means nothing elsewhere.

    Args:
        name_or_path (`str` or `Path`):
            A directory, or a Hub id.
    """
    path = Path(name_or_path)
    return path.resolve().name if path.is_dir() else str(name_or_path)


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
    texts = [json.dumps(data, indent=2), "\n\n".join([f"# {title}", *sections])]
    with writing_to(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        for file, text in zip(result_files(path), texts, strict=True):
            with written_aside(file) as partial:
                partial.write_text(text + "\n", encoding="utf-8")


def _cell(value: Any) -> str:
    if value is None:
        return _MISSING
    return f"{value:.3f}" if isinstance(value, float) else str(value)
