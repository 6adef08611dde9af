"""Pictures of results as PNG files; matplotlib is asked for when the first is drawn."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ..error_text import first_line, install_hint
from ..errors import MissingDependencyError
from ..output_places import writing_to


if TYPE_CHECKING:
    from matplotlib.figure import Figure


__all__ = ["matplotlib_figure", "save_pictures"]

_DPI = 130


def matplotlib_figure() -> type[Figure]:
    """
    matplotlib's `Figure`, which draws without a screen.

    Raises:
        MissingDependencyError: matplotlib is not installed, or cannot be loaded.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError(
            f"Plots need matplotlib, which is not installed. Run: {install_hint('bench')}, or pass --no-plots."
        ) from error
    except Exception as error:  # of its configuration, or of a numpy it was not built for
        raise MissingDependencyError(
            f"Plots need matplotlib, which is installed but cannot be loaded ({first_line(error)}). Reinstall it, see "
            "what MATPLOTLIBRC and MPLBACKEND name, or pass --no-plots."
        ) from error
    return Figure


def save_pictures(figures: Mapping[str, Figure | None], path: str | Path) -> list[Path]:
    """
    Write figures beside each other.

    Args:
        figures (`Mapping[str, Figure | None]`):
            By kind; None where there was nothing to draw.
        path (`str` or `Path`):
            Where to, without a suffix; the kind and `.png` are added.

    Returns:
        `list[Path]`: the files written
    """
    written = []
    for kind, figure in figures.items():
        if figure is not None:
            file = Path(f"{path}-{kind}.png")
            with writing_to(file):
                figure.savefig(file, dpi=_DPI)
            written.append(file)
    return written
