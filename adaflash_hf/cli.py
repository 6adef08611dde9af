"""The `adaflash` command. Its subcommands are in `adaflash_hf/commands/`, one file each."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Annotated

import typer

from .commands.ablate import app as ablate
from .commands.bench import bench
from .commands.card import card
from .commands.convert import convert
from .commands.demo import demo
from .commands.doctor import doctor
from .commands.evaluate import app as evaluate
from .commands.export import export
from .commands.generate import generate
from .commands.help_pages import SectionedCommand
from .commands.inspect import inspect
from .commands.online import app as online
from .commands.prompts import prompts
from .commands.serve import app as serve
from .commands.train import train
from .commands.trajectories import trajectories
from .errors import AdaFlashError
from .output_places import disk_error, is_disk_trouble


__all__ = ["app", "main"]

# Tracebacks of what is not an AdaFlashError stay Python's own: they belong into bug reports.
app = typer.Typer(
    name="adaflash",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Faster generation with the same output: block-diffusion drafts, verified by the target model.",
)
app.command(cls=SectionedCommand)(generate)
app.command(cls=SectionedCommand)(demo)
app.command(cls=SectionedCommand)(bench)
app.command(cls=SectionedCommand)(prompts)
app.command(cls=SectionedCommand)(trajectories)
app.command(cls=SectionedCommand)(train)
app.command(cls=SectionedCommand)(export)
app.command(cls=SectionedCommand)(convert)
app.command(cls=SectionedCommand)(inspect)
app.command(cls=SectionedCommand)(card)
app.command(cls=SectionedCommand)(doctor)
app.add_typer(ablate, name="ablate")
app.add_typer(evaluate, name="evaluate")
app.add_typer(online, name="online")
app.add_typer(serve, name="serve")


def main(argv: Sequence[str] | None = None) -> int:
    """
    Run the command line.

    Args:
        argv (`Sequence[str]`, *optional*):
            Arguments without the program name; those of the process by default.

    Returns:
        `int`: the exit code; 2 for wrong usage, and for every [`AdaFlashError`] and full or read-only disk, which are
        told in one line.
    """
    try:
        app(args=list(argv) if argv is not None else sys.argv[1:], prog_name="adaflash")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except AdaFlashError as error:
        typer.echo(f"adaflash: error: {error}", err=True)
        return 2
    except Exception as error:
        # In the middle of any command. Nothing in a traceback would help against it.
        trouble = disk_error(error)
        if trouble is None or not is_disk_trouble(trouble):
            raise
        reason = f"{trouble.strerror} ({trouble.filename})" if trouble.filename else trouble.strerror
        typer.echo(
            f"adaflash: error: {reason}. Make room or give the right to write, or pass another place.", err=True
        )
        return 2
    return 0


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"adaflash {metadata.version('adaflash-hf')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and stop.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    del version


if __name__ == "__main__":
    sys.exit(main())
