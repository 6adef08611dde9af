from __future__ import annotations

import errno
import importlib.metadata
import subprocess
import sys

import pytest

from adaflash_hf import cli
from adaflash_hf.errors import DrafterCheckpointError


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"], ["demo", "--help"]])
def test_help(arguments, capsys):
    assert cli.main(arguments) == 0
    assert "Usage" in capsys.readouterr().out


def test_no_arguments_show_the_help(capsys):
    assert cli.main([]) == 2
    captured = capsys.readouterr()
    assert "generate" in captured.out + captured.err


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"adaflash {importlib.metadata.version('adaflash-hf')}"


@pytest.mark.parametrize(
    "arguments",
    [
        ["nothing"],
        ["generate", "hello", "--no-such-option"],
        ["generate", "hello", "--max-new-tokens", "0"],
        ["generate", "hello", "--dtype", "int8"],
        ["generate", "hello", "--length-policy", "longest"],
    ],
)
def test_wrong_usage_exits_with_2(arguments, capsys):
    assert cli.main(arguments) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_errors_of_the_package_are_one_line(monkeypatch, capsys):
    def fail(*args, **kwargs):
        raise DrafterCheckpointError("`fc.weight` is missing")

    monkeypatch.setattr(cli, "app", fail)
    assert cli.main([]) == 2
    assert capsys.readouterr().err == "adaflash: error: `fc.weight` is missing\n"


def test_a_full_disk_is_one_line(monkeypatch, capsys):
    def fail(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device", "/out/model.safetensors")

    monkeypatch.setattr(cli, "app", fail)
    assert cli.main([]) == 2
    error = capsys.readouterr().err
    assert error.startswith("adaflash: error: No space left on device (/out/model.safetensors). Make room")


def test_other_errors_keep_their_traceback(monkeypatch):
    def fail(*args, **kwargs):
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(ZeroDivisionError):
        cli.main([])


def test_exit_code_reaches_the_shell():
    result = subprocess.run(
        [sys.executable, "-m", "adaflash_hf.cli", "generate", "hello", "--target", "org/target"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert result.stderr.startswith("adaflash: error: `--target` is 'org/target'")
    assert len(result.stderr.splitlines()) == 1
