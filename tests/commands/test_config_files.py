from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from adaflash_hf.commands.config_files import config_file_callback, given_by_config_file, write_config_file
from adaflash_hf.errors import InvalidInputError


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


app = typer.Typer()
seen: dict[str, object] = {}


@app.command()
def paint(
    context: typer.Context,
    out: Annotated[Path, typer.Option("--out")],
    config: Annotated[Path | None, typer.Option("--config", is_eager=True, callback=config_file_callback)] = None,
    colour: Annotated[Colour, typer.Option("--colour")] = Colour.RED,
    layers: Annotated[int | None, typer.Option("--layers", min=1)] = None,
    rate: Annotated[float, typer.Option("--learning-rate", "--lr")] = 0.5,
    name: Annotated[list[str] | None, typer.Option("--name")] = None,
    layer_ids: Annotated[str | None, typer.Option("--layer-ids")] = None,
    dry: Annotated[bool, typer.Option("--dry/--wet")] = True,
) -> None:
    seen.clear()
    seen.update(context.params, from_file=[key for key in context.params if given_by_config_file(context, key)])


def run(path, *arguments):
    result = CliRunner().invoke(app, ["--config", str(path), *arguments])
    if isinstance(result.exception, InvalidInputError):
        raise result.exception
    return result


def test_the_file_stands_in_for_defaults_and_the_command_line_wins(tmp_path):
    path = tmp_path / "paint.yaml"
    path.write_text("out: here\ncolour: blue\nlayers: 3\nrate: 1e-3\nname: [a, b]\nlayer-ids: [1, 8]\ndry: false\n")
    assert run(path, "--layers", "4").exit_code == 0
    assert seen["out"] == Path("here") and seen["colour"] is Colour.BLUE and seen["layers"] == 4
    assert seen["rate"] == 1e-3 and seen["name"] == ["a", "b"] and seen["layer_ids"] == "1,8" and seen["dry"] is False
    assert set(seen["from_file"]) == {"out", "colour", "rate", "name", "layer_ids", "dry"}
    path.write_text("out: here\nname: one\nlayers: null\n")
    assert run(path).exit_code == 0
    assert seen["name"] == ["one"] and seen["layers"] is None and seen["rate"] == 0.5
    for spelling in ("lr", "learning-rate"):
        path.write_text(f"out: here\n{spelling}: 0.25\n")
        assert run(path).exit_code == 0 and seen["rate"] == 0.25


def test_values_in_a_file_are_checked_as_on_the_command_line(tmp_path):
    path = tmp_path / "paint.yaml"
    for text, message in (("layers: 0", "greater than or equal to 1"), ("colour: green", "'green'")):
        path.write_text(f"out: here\n{text}\n")
        result = run(path)
        assert result.exit_code == 2 and message in result.output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("colou: red", "key 'colou' .* did you mean `colour`"),
        ("zzzzzz: 1", "known keys are colour, dry"),
        ("config: other.yaml", "no option"),
        ("- red", "holds a list"),
        ("a: [1", "cannot be read"),
    ],
)
def test_files_that_say_something_else_are_refused(tmp_path, text, message):
    path = tmp_path / "paint.yaml"
    path.write_text(text)
    with pytest.raises(InvalidInputError, match=message):
        run(path)


def test_what_is_written_is_read_back(tmp_path):
    path = tmp_path / "new" / "paint.yaml"
    options = {
        "config": Path("old.yaml"),
        "out": Path("a b/c: d"),
        "colour": Colour.BLUE,
        "layers": None,
        "rate": 1e-5,
        "name": ["x", "no"],
        "layer_ids": "8",
        "dry": False,
    }
    write_config_file(path, options, {"rate": "a remark: with a colon", "name": "two"})
    text = path.read_text()
    assert "rate: 1.0e-05  # a remark: with a colon\n" in text and "name: [x, 'no']  # two\n" in text
    assert run(path).exit_code == 0
    for name, value in options.items():
        if name != "config":
            assert seen[name] == value, name
