"""Prompt files of the usual public data sets, and their way into token ids.

Scope: JSON (one array) and JSON lines, one conversation start per record. A record's reference answer, if it has one,
is ignored: the response must be the target's own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..atomic_files import written_aside
from ..errors import InvalidInputError
from ..output_places import writing_to


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


__all__ = ["Prompt", "encode_prompts", "prompt_of_record", "read_prompt_file", "read_records", "write_prompt_file"]

_SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
_ENCODING_BATCH = 256


@dataclass(frozen=True)
class Prompt:
    """
    The start of a conversation that the target will continue.

    Attributes:
        messages: Pairs of role and content; the last one is the user's.
        domain: Free label under which acceptance is reported, for example `"math"`.
    """

    messages: tuple[tuple[str, str], ...]
    domain: str


def read_prompt_file(path: str | Path, domain: str | None = None) -> list[Prompt]:
    """
    Read the prompts of one file.

    The first of these fields that a record has is used: `messages`, `conversations` (ShareGPT), `turns` (the first),
    `instruction` (with `input`, or the input of the first of `instances`), `question`, `prompt`, `text`.

    Args:
        path (`str` or `Path`):
            A `.json` file with an array of records, or a file with one record per line.
        domain (`str`, *optional*):
            Domain of all prompts; by default each record's own field `domain`, or the name of the file.

    Returns:
        `list[Prompt]`: in the order of the file.
    """
    path = Path(path)
    prompts = []
    for place, record in read_records(path):
        prompts.append(prompt_of_record(record, place, domain, default_domain=path.stem))
    if not prompts:
        raise InvalidInputError(f"`prompts` is {str(path)!r}, which holds no record; give a file with prompts.")
    return prompts


def read_records(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """
    Read records as they are, whatever their fields.

    Args:
        path (`str` or `Path`):
            See [`read_prompt_file`].

    Returns:
        `Iterator[tuple[str, dict[str, Any]]]`: pairs of a place to name in errors and the record there.
    """
    path = Path(path)
    text = _read_text(path)
    if text.lstrip().startswith("["):
        entries = [(f"record {i}", record) for i, record in enumerate(_parsed(text, path), start=1)]
    else:
        # Not `splitlines`, which also breaks at characters that stand unescaped in strings, as U+2028.
        lines = enumerate(text.split("\n"), start=1)
        entries = [(f"line {i}", _parsed(line, path, i)) for i, line in lines if line.strip()]
    for place, record in entries:
        if not isinstance(record, dict):
            raise InvalidInputError(
                f"`prompts`: {place} of {path} is a {type(record).__name__}; each record must be a JSON object."
            )
        yield f"{place} of {path}", record


def prompt_of_record(
    record: dict[str, Any], place: str, domain: str | None = None, *, default_domain: str, column: str | None = None
) -> Prompt:
    """
    The prompt in one record.

    Args:
        record (`dict[str, Any]`):
            Fields and values.
        place (`str`):
            Where it is, for errors.
        domain (`str`, *optional*):
            Domain of the prompt; by default the record's own field `domain`.
        default_domain (`str`):
            Domain of a record that has none.
        column (`str`, *optional*):
            Field with the prompt: messages, ShareGPT's conversations, a list of turns, or text. By default the first
            one with a known name, see [`read_prompt_file`].
    """
    own_domain = record.get("domain")
    default = own_domain if isinstance(own_domain, str) and own_domain else default_domain
    return Prompt(_messages(record, place, column), domain or default)


def encode_prompts(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]) -> list[list[int]]:
    """
    Token ids of each prompt: through the chat template where the tokenizer has one, else the contents as they are.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            The target's tokenizer.
        prompts (`Sequence[Prompt]`):
            What to encode.
    """
    has_template = getattr(tokenizer, "chat_template", None) is not None
    encoded: list[list[int]] = []
    for begin in range(0, len(prompts), _ENCODING_BATCH):
        batch = prompts[begin : begin + _ENCODING_BATCH]
        if has_template:
            chats = [[{"role": role, "content": content} for role, content in prompt.messages] for prompt in batch]
            ids = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)
        else:
            ids = tokenizer(["\n\n".join(content for _, content in prompt.messages) for prompt in batch])["input_ids"]
        encoded += [list(row) for row in ids]
    return encoded


def _read_text(path: Path) -> str:
    if path.is_dir():
        raise InvalidInputError(f"`prompts` is {str(path)!r}, which is a directory; give a file in it.")
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise InvalidInputError(f"`prompts` is {str(path)!r}, which is not there; give a file that is.") from error
    except OSError as error:
        raise InvalidInputError(
            f"`prompts` is {str(path)!r}, which cannot be read ({error.strerror}); give a file that can."
        ) from error
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"`prompts` is {str(path)!r}, which is not text in UTF-8 ({error}).") from error


def _parsed(text: str, path: Path, first_line: int = 1) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidInputError(
            f"`prompts`: line {first_line + error.lineno - 1} of {path} is not JSON ({error.msg}, column "
            f"{error.colno}); give a JSON array or one JSON object per line."
        ) from error


def _from_messages(value: Any, record: dict[str, Any]) -> list[tuple[str, Any]]:
    return _until_last_user([(str(entry["role"]), entry["content"]) for entry in value])


def _from_conversations(value: Any, record: dict[str, Any]) -> list[tuple[str, Any]]:
    return _until_last_user([(_SHAREGPT_ROLES[entry["from"]], entry["value"]) for entry in value])


def _until_last_user(messages: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """What stands before the last answer; it is the target that answers."""
    while messages and messages[-1][0] != "user":
        messages = messages[:-1]
    return messages


def _from_turns(value: Any, record: dict[str, Any]) -> list[tuple[str, Any]]:
    return [("user", value[0])]


def _from_instruction(value: Any, record: dict[str, Any]) -> list[tuple[str, Any]]:
    instances = record.get("instances")
    extra = record.get("input") or (instances[0].get("input") if instances else None)
    return [("user", f"{value}\n{extra}" if extra and isinstance(value, str) else value)]


def _from_text(value: Any, record: dict[str, Any]) -> list[tuple[str, Any]]:
    # Some data sets keep a list of messages under `prompt`.
    return _from_messages(value, record) if isinstance(value, list) else [("user", value)]


def _text_of(content: Any, field_and_place: str) -> str:
    """Of a message, whose content may also be a list of parts, as OpenAI's interface takes it."""
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text":
            raise InvalidInputError(
                f"`prompts`: {field_and_place} has content with a part of the type {kind!r}; only parts of the type "
                "'text' are read. Remove the record."
            )
        if not isinstance(part.get("text"), str):
            raise InvalidInputError(
                f"`prompts`: {field_and_place} has {part.get('text')!r} where text is expected; give a string."
            )
    text = "".join(part["text"] for part in parts)
    try:
        text.encode()
    except UnicodeEncodeError as error:  # only exists escaped, as "\\ud83d"
        raise InvalidInputError(
            f"`prompts`: {field_and_place} has half of a character at position {error.start} "
            f"({text[error.start]!r}, a surrogate without its other half). Correct or remove the record."
        ) from error
    return text


_READERS: dict[str, Callable[[Any, dict[str, Any]], list[tuple[str, Any]]]] = {
    "messages": _from_messages,
    "conversations": _from_conversations,
    "turns": _from_turns,
    "instruction": _from_instruction,
    "question": _from_text,
    "prompt": _from_text,
    "text": _from_text,
}


def _reader_of(value: Any) -> Callable[[Any, dict[str, Any]], list[tuple[str, Any]]]:
    """Who understands a value, whatever its field is called."""
    first = value[0] if isinstance(value, list) and value else None
    if isinstance(first, dict):
        return _from_conversations if "from" in first else _from_messages
    return _from_text if first is None else _from_turns


def _messages(record: dict[str, Any], place: str, column: str | None = None) -> tuple[tuple[str, str], ...]:
    field = next((name for name in _READERS if record.get(name)), None) if column is None else column
    if field is not None and not record.get(field):
        filled = sorted(name for name, value in record.items() if value)
        raise InvalidInputError(
            f"`prompts`: {place} has nothing in the field {field!r}, only in {filled}; name another one."
        )
    if field is None and (empty := next((name for name in _READERS if name in record), None)) is not None:
        raise InvalidInputError(
            f"`prompts`: `{empty}` in {place} is empty ({record[empty]!r}); fill it in, or remove the record."
        )
    if field is None:
        raise InvalidInputError(
            f"`prompts`: {place} has the fields {sorted(record)}, none of which is known to hold a prompt; rename one "
            f"to one of {', '.join(_READERS)}."
        )
    value = record[field]
    if isinstance(value, dict):  # how `datasets` gives lists of records of older data sets: a record of lists
        value = [dict(zip(value, row, strict=True)) for row in zip(*value.values(), strict=True)]
    try:
        reader = _READERS.get(field) or _reader_of(value)
        contents = reader(value, record)
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise InvalidInputError(
            f"`prompts`: `{field}` in {place} has an unexpected form ({type(error).__name__}: {error}); messages are "
            'objects with "role" and "content".'
        ) from error
    messages = [(role, _text_of(content, f"`{field}` in {place}")) for role, content in contents]
    if not messages or not messages[-1][1].strip():
        raise InvalidInputError(f"`prompts`: `{field}` in {place} holds no text of the user; remove the record.")
    return tuple(messages)


def write_prompt_file(path: Path, prompts: Sequence[str]) -> None:
    """
    Writes JSON lines that [`read_prompt_file`] reads, whole or not at all.

    Args:
        path (`Path`):
            The file; directories above it are made.
        prompts (`Sequence[str]`):
            What a user says, one line each.

    Raises:
        OutputError: It cannot be written.
    """
    lines = (json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
    with writing_to(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_aside(path) as partial:
            partial.write_text("".join(lines), encoding="utf-8")
