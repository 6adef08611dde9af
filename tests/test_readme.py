from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from adaflash_hf import cli
from adaflash_hf.commands.options import DraftProposal, LengthPolicy


ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def adaflash_commands() -> list[list[str]]:
    lines = [line.split("|")[-1].strip() for block in blocks("bash") for line in block.splitlines()]
    return [shlex.split(line) for line in lines if line.startswith("adaflash ")]


@pytest.mark.parametrize("command", adaflash_commands(), ids=" ".join)
def test_commands_are_accepted(command, capsys):
    # A --help at the end parses everything before it, without running anything.
    assert cli.main([*command[1:], "--help"]) == 0
    assert f"adaflash {command[1]}" in capsys.readouterr().out


def test_there_are_commands_to_check():
    assert {command[1] for command in adaflash_commands()} == {
        "bench",
        "convert",
        "demo",
        "export",
        "generate",
        "inspect",
        "prompts",
        "train",
        "trajectories",
    }


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^make (\w+)", "\n".join(blocks("bash")), flags=re.MULTILINE)
    assert {"demo", "test"} <= set(targets)
    assert all(re.search(rf"^{target}:", makefile, flags=re.MULTILINE) for target in targets)


def test_python_compiles():
    assert blocks("python")
    compile("\n".join(blocks("python")), "README.md", "exec")


@pytest.mark.parametrize("choices", [LengthPolicy, DraftProposal])
def test_choices_are_listed(choices):
    assert all(f'`"{choice.value}"`' in README for choice in choices)
