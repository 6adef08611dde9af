"""How the commands show their options."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import typer
from typer.core import TyperCommand


__all__ = ["SectionedCommand"]


class SectionedCommand(TyperCommand):
    """
    A command with plain help, one section for each `rich_help_panel`.

    Typer's own help puts names, types and explanations beside each other. With long names and many choices none of the
    three has room: on 80 columns, which is also what a pipe gets, names are cut.
    """

    def format_help(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        """Write usage, description and options."""
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        self.format_options(ctx, formatter)

    def format_options(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        """Write the options, section by section; those without one first."""
        sections: dict[str, list[tuple[str, str]]] = defaultdict(list, {"Arguments": [], "Options": []})
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
            sections[getattr(parameter, "rich_help_panel", None) or kind].append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)
