"""Help of every command at 80 columns, which is also what a pipe gets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer

from adaflash_hf.cli import app, main


def leaves(command: Any, names: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    children = getattr(command, "commands", None)
    if children is None:
        yield names, command
    for name, child in (children or {}).items():
        yield from leaves(child, (*names, name))


COMMANDS = dict(leaves(typer.main.get_command(app)))


def shown(names, monkeypatch, capsys) -> str:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*names, "--help"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("names", COMMANDS, ids=" ".join)
def test_every_option_name_is_whole(names, monkeypatch, capsys):
    text = shown(names, monkeypatch, capsys)
    words = set(text.replace(",", " ").split())
    for parameter in COMMANDS[names].params:
        if parameter.param_type_name == "option" and not parameter.hidden:
            assert words.issuperset([*parameter.opts, *parameter.secondary_opts])


def test_options_are_in_sections_and_arguments_first(monkeypatch, capsys):
    text = shown(["train"], monkeypatch, capsys)
    titles = [line for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert titles == ["Options:", "What is trained:", "What is learned:", "How it runs:", "What becomes of it:"]
    text = shown(["generate"], monkeypatch, capsys)
    assert text.index("Arguments:") < text.index("Prompts, each in quotes") < text.index("Options:")


def test_defaults_told_in_the_text_are_shown(monkeypatch, capsys):
    """Square brackets would be markup in rich's help."""
    assert "Train this part alone.  [default: both]" in shown(["train"], monkeypatch, capsys)
