"""YAML files with a command's options: read in place of its defaults, written with what a run came to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from typing import Any

import typer

from ..errors import InvalidInputError


__all__ = ["config_file_callback", "given_by_config_file", "write_config_file"]

# Options that say what to do with the command rather than what it does.
_NOT_IN_FILES = ("config", "help", "list_presets")
_END_OF_DOCUMENT = "...\n"


def config_file_callback(context: typer.Context, path: Path | None) -> Path | None:
    """
    Callback of an eager `--config` option: what the file says takes the place of the command's defaults.

    The options go through the same conversions and limits as on the command line, which wins where it says something.
    Keys are option names, with `-` or `_`.

    Args:
        context (`typer.Context`):
            Of the command.
        path (`Path`, *optional*):
            The file.
    """
    if path is not None:
        context.default_map = {**(context.default_map or {}), **_read(path, context)}
    return path


def given_by_config_file(context: typer.Context, name: str) -> bool:
    """Whether an option's value comes from the configuration file."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "DEFAULT_MAP"


def write_config_file(path: Path, options: Mapping[str, Any], comments: Mapping[str, str]) -> None:
    """
    Write options so that `--config` reads them again; those that are None are left out.

    Args:
        path (`Path`):
            File to write.
        options (`Mapping[str, Any]`):
            Values by parameter name.
        comments (`Mapping[str, str]`):
            A remark for some of them, put behind the value.
    """
    import yaml

    from ..atomic_files import written_aside
    from ..output_places import writing_to

    lines = []
    for name, value in options.items():
        if value is None or name in _NOT_IN_FILES:
            continue
        # On one line, also of lists, so that the remark can follow.
        text = yaml.safe_dump(_plain(value), default_flow_style=True, allow_unicode=True, width=math.inf)
        remark = f"  # {comments[name]}" if name in comments else ""
        lines.append(f"{name}: {text.removesuffix(_END_OF_DOCUMENT).rstrip()}{remark}")
    with writing_to(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_aside(path) as partial:
            partial.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return str(value) if isinstance(value, Path) else value


def _read(path: Path, context: typer.Context) -> dict[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise InvalidInputError(
            f"`--config` is {str(path)!r} and cannot be read ({reason}); give a YAML file."
        ) from error
    content = {} if content is None else content
    if not isinstance(content, dict):
        raise InvalidInputError(
            f"`--config` is {str(path)!r}, which holds a {type(content).__name__}; give one `option: value` per line."
        )
    parameters = {p.name: p for p in context.command.params if p.name is not None and p.name not in _NOT_IN_FILES}
    spellings = {_as_key(option): name for name, p in parameters.items() for option in (name, *p.opts)}
    values = {}
    for key, value in content.items():
        name = _option_name(str(key), spellings, path)
        if value is not None:
            values[name] = _as_given(value, getattr(parameters[name], "multiple", False))
    return values


def _as_key(option: str) -> str:
    return option.lstrip("-").replace("-", "_")


def _option_name(key: str, spellings: Mapping[str, str], path: Path) -> str:
    """The name of an option that may have several, such as `lr` of `learning_rate`."""
    if (name := spellings.get(_as_key(key))) is not None:
        return name
    close = get_close_matches(_as_key(key), spellings, n=1, cutoff=0.5)
    nearest = (
        f"did you mean `{close[0]}`?" if close else f"known keys are {', '.join(sorted(set(spellings.values())))}."
    )
    raise InvalidInputError(f"`--config` is {str(path)!r}, whose key {key!r} is no option of this command; {nearest}")


def _as_given(value: Any, multiple: bool) -> Any:
    """A value as the command line would give it: lists for options that may be repeated, else with commas."""
    if multiple:
        return value if isinstance(value, list) else [value]
    return ",".join(str(entry) for entry in value) if isinstance(value, list) else value
