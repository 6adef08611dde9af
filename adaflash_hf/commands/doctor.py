"""`adaflash doctor`: what is installed, what this machine can do, and whether it is fast."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from .checkpoint_options import JsonOption


if TYPE_CHECKING:
    from rich.console import Console

    from ..installation_checks import Check


__all__ = ["doctor"]

_MARKS = {"good": "[green]ok[/]", "note": "[yellow]note[/]", "problem": "[bold red]problem[/]"}


def doctor(
    speed: Annotated[
        bool, typer.Option("--speed/--no-speed", help="Decode a prompt with the embedded target, if it is installed.")
    ] = True,
    budget: Annotated[
        float, typer.Option("--budget", min=1.0, help="Seconds of decoding for the speed check.")
    ] = 10.0,
    as_json: JsonOption = False,
) -> None:
    """Check versions, devices, kernels, routing, cache, extras and speed. Exits with 1 on problems."""
    from rich.console import Console

    from ..installation_checks import Outcome, check_installation, check_speed

    console = Console(highlight=False)
    checks = []
    for check in check_installation():
        checks.append(check)
        if not as_json:
            _print(console, check)
    if speed and any(check.name == "embedded target" and check.outcome is Outcome.GOOD for check in checks):
        checks.append(check_speed(budget, Console(stderr=True)))
        if not as_json:
            _print(console, checks[-1])
    if as_json:
        typer.echo(json.dumps([check.as_dict() for check in checks]))
    if any(check.outcome is Outcome.PROBLEM for check in checks):
        raise typer.Exit(1)


def _print(console: Console, check: Check) -> None:
    from rich.markup import escape

    console.print(f"{_MARKS[check.outcome.value]} [bold]{check.name}[/]: {escape(check.found)}", soft_wrap=True)
    if check.hint:
        console.print(f"     {escape(check.hint)}", soft_wrap=True)
