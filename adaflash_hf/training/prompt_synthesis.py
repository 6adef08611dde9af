"""Prompts written by the target itself: it is given a chat up to where the user speaks, and samples the user's turn.

The idea is Magpie's (arXiv 2406.08464): an aligned model has seen so many user turns that it can write them, and a
drafter trained on answers to these needs no data set. Only targets with a chat template can do it.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..errors import InvalidInputError
from ..output_places import check_writable, writing_to
from .batched_decoding import DecodedResponse, DecodingSettings, decode_batch, eos_token_ids_of


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


__all__ = [
    "SynthesisReport",
    "SynthesisSettings",
    "UserTurn",
    "check_prompts_can_be_added",
    "find_user_turn",
    "synthesize_prompts",
]

MINIMUM_CHARACTERS = 15
_MARKER = "ADAFLASHUSERTURN"
# How chat formats spell their tokens; a target that writes this as text did not write a user's question.
_CHAT_MARKUP = "<|"
# Batches without one prompt to keep after which the target is taken to be unable, or to have said all it has to say.
_PATIENCE_BATCHES = 8


@dataclass(frozen=True)
class SynthesisSettings:
    """
    What prompts to make.

    Attributes:
        count: Prompts of `domain` that the file shall hold.
        domain: Label of the prompts.
        prefixes: Beginnings of the user's turn, used in turn, such as `"def "` for code; one empty one by default.
        temperature: Of the sampling, above 0.
        max_new_tokens: A turn that has not ended by then is dropped.
        batch_size: Turns sampled at once.
        seed: Decides what is sampled.
    """

    count: int
    domain: str
    prefixes: tuple[str, ...] = ("",)
    temperature: float = 0.8
    max_new_tokens: int = 70
    batch_size: int = 96
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("count", "batch_size"):
            if getattr(self, name) < 1:
                raise InvalidInputError(f"`{name}` is {getattr(self, name)}; it must be at least 1.")
        if not 0 < self.temperature < math.inf:
            raise InvalidInputError(
                f"`temperature` is {self.temperature}; it must be a number above 0: greedy decoding would write the "
                "same prompt again and again."
            )
        if not self.domain or not self.prefixes:
            raise InvalidInputError(
                f"`domain` is {self.domain!r} and `prefixes` is {self.prefixes!r}; neither may be empty."
            )


@dataclass(frozen=True)
class SynthesisReport:
    """
    What [`synthesize_prompts`] tells after each batch, and of the whole run at its end.

    Attributes:
        held: Prompts of the domain now in the file.
        drawn: Turns sampled in this run.
        dropped: Of these, how many were left out for which reason.
    """

    held: int
    drawn: int = 0
    dropped: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class UserTurn:
    """
    Where the user speaks in a target's chat.

    Attributes:
        beginning: All of the chat template before the user's content, the default system prompt included.
        end_token_ids: Tokens that end the user's turn or the text.
    """

    beginning: str
    end_token_ids: tuple[int, ...]


def find_user_turn(target_model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> UserTurn:
    """
    Read the user's turn off a target's chat template.

    Args:
        target_model (`PreTrainedModel`):
            The target.
        tokenizer (`PreTrainedTokenizerBase`):
            Its tokenizer.

    Raises:
        InvalidInputError: there is no template, or it does not show the user's words as they are.
    """
    name = target_model.name_or_path or type(target_model).__name__
    if getattr(tokenizer, "chat_template", None) is None:
        raise InvalidInputError(
            f"`target` is {name!r}, whose tokenizer has no chat template, so it cannot be made to write a user's "
            "turn; use an instruction-tuned target, or give `adaflash trajectories` a file of prompts."
        )
    chat = [{"role": "user", "content": _MARKER}]
    text = str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
    beginning, marker, rest = text.partition(_MARKER)
    if not marker:
        raise InvalidInputError(
            f"`target` is {name!r}, whose chat template does not repeat the user's words; give `adaflash "
            "trajectories` a file of prompts."
        )
    ends = set(eos_token_ids_of(target_model))
    if tokenizer.eos_token_id is not None:
        ends.add(int(tokenizer.eos_token_id))
    following = tokenizer(rest.lstrip(), add_special_tokens=False)["input_ids"]
    if following and following[0] in _special_token_ids(tokenizer):
        ends.add(following[0])
    return UserTurn(beginning, tuple(sorted(ends)))


def synthesize_prompts(
    target_model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    path: str | Path,
    settings: SynthesisSettings,
    on_batch: Callable[[SynthesisReport], None] | None = None,
) -> SynthesisReport:
    """
    Append prompts to a file until it holds enough of the domain; a run that was killed goes on where it ended.

    Args:
        target_model (`PreTrainedModel`):
            The target, in evaluation mode.
        tokenizer (`PreTrainedTokenizerBase`):
            Its tokenizer.
        path (`str` or `Path`):
            JSON lines with `prompt` and `domain`, read by `adaflash trajectories`.
        settings (`SynthesisSettings`):
            What to make.
        on_batch (`Callable[[SynthesisReport], None]`, *optional*):
            Called at the beginning and after each batch.

    Raises:
        InvalidInputError: the target has no chat template, never ends a turn, or writes nothing new.
    """
    path = Path(path)
    check_prompts_can_be_added(path)
    turn = find_user_turn(target_model, tokenizer)
    # A space at the end belongs to the next token; given as a token of its own, it would be followed by odd words.
    texts = [turn.beginning + (prefix.rstrip(" ") or prefix) for prefix in settings.prefixes]
    beginnings = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    decoding = DecodingSettings(settings.max_new_tokens, turn.end_token_ids, temperature=settings.temperature)
    sieve = _Sieve(tokenizer)
    held = _read_own_file(path, settings.domain, sieve.seen)
    drawn, fruitless = 0, 0
    report = SynthesisReport(held)
    if on_batch is not None:
        on_batch(report)
    while held < settings.count:
        # What is in the file decides what comes next, so a run that continues does not repeat itself.
        generator = torch.Generator(target_model.device).manual_seed(_batch_seed(settings.seed, held, fruitless))
        rows = [index % len(beginnings) for index in range(settings.batch_size)]
        responses = decode_batch(target_model, [beginnings[row] for row in rows], decoding, generator)
        drawn += len(responses)
        prefixes = [settings.prefixes[row] for row in rows]
        kept = sieve.keep(responses, prefixes)[: settings.count - held]
        _append(path, kept, settings.domain)
        held, fruitless = held + len(kept), 0 if kept else fruitless + 1
        report = SynthesisReport(held, drawn, sieve.dropped.copy())
        if on_batch is not None:
            on_batch(report)
        if fruitless == _PATIENCE_BATCHES:
            _give_up(report, settings)
    return report


class _Sieve:
    """Keeps turns that are whole, long enough, new and free of chat markup, and counts the others by reason."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.special_ids = _special_token_ids(tokenizer)
        contents = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        self.markup = (_CHAT_MARKUP, *sorted(contents))
        self.seen: set[str] = set()
        self.dropped: Counter[str] = Counter()

    def keep(self, responses: Sequence[DecodedResponse], prefixes: Sequence[str]) -> list[str]:
        """The texts to keep, each with its prefix."""
        kept = []
        for response, prefix in zip(responses, prefixes, strict=True):
            ids = response.response_ids[:-1].tolist()
            text = (prefix.rstrip(" ") or prefix) + str(self.tokenizer.decode(ids))
            reason = "unfinished" if not response.finished else self._fault(ids, text, prefix)
            text = text.strip()
            if reason is None:
                self.seen.add(text)
                kept.append(text)
            else:
                self.dropped[reason] += 1
        return kept

    def _fault(self, ids: Sequence[int], text: str, prefix: str) -> str | None:
        if not text.startswith(prefix):
            return "other beginnings"
        text = text.strip()
        if not self.special_ids.isdisjoint(ids) or any(mark in text for mark in self.markup):
            return "special tokens"
        if len(text) < MINIMUM_CHARACTERS:
            return "too short"
        return "duplicate" if text in self.seen else None


def _special_token_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    added = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | set(tokenizer.all_special_ids)


def _batch_seed(seed: int, held: int, fruitless: int) -> int:
    return (seed * 1_000_003 + held) * (_PATIENCE_BATCHES + 1) + fruitless


def _read_own_file(path: Path, domain: str, seen: set[str]) -> int:
    """Note the prompts of an earlier run and count those of the domain; a line cut off by a kill is removed."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        return 0
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    held = 0
    # Not `splitlines`, which also breaks at characters that stand unescaped in prompts, as U+2028.
    for number, line in enumerate(whole.decode("utf-8", errors="replace").split("\n")[:-1], start=1):
        try:
            record = json.loads(line)
            seen.add(str(record["prompt"]))
            held += record["domain"] == domain
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidInputError(
                f"`out` is {str(path)!r}, whose line {number} is not a record of prompts ({type(error).__name__}: "
                f"{error}); prompts are only added to a file this command made. Give another name."
            ) from error
    if len(whole) < len(content):
        with path.open("r+b") as file:
            file.truncate(len(whole))
    return held


def check_prompts_can_be_added(path: Path) -> None:
    """
    Refuses a place where no file can be written, before anything slow begins; makes file and directory if they are not
    there.

    Args:
        path (`Path`): File to which prompts shall be added.

    Raises:
        InvalidInputError: it cannot be opened for writing.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
        check_writable(path.parent)
    except OSError as error:
        raise InvalidInputError(
            f"`out` is '{path}', which cannot be written ({error.strerror}). Pass a file in a directory that can "
            "be written to."
        ) from error


def _append(path: Path, prompts: Sequence[str], domain: str) -> None:
    lines = [json.dumps({"prompt": prompt, "domain": domain}, ensure_ascii=False) + "\n" for prompt in prompts]
    kept = "the prompts before are in it: repeat to go on"
    with writing_to(path, kept=kept), path.open("a", encoding="utf-8", newline="\n") as file:
        file.write("".join(lines))


def _give_up(report: SynthesisReport, settings: SynthesisSettings) -> None:
    reasons = ", ".join(f"{count} {reason}" for reason, count in report.dropped.most_common())
    if report.dropped.most_common(1)[0][0] == "unfinished":
        advice = (
            f"its turns do not end within `max_new_tokens` = {settings.max_new_tokens}. Raise that, or use an "
            "instruction-tuned target"
        )
    else:
        advice = "it writes nothing new any more. Lower `count`, or raise `temperature`"
    raise InvalidInputError(
        f"`target` gave no usable prompt in its last {_PATIENCE_BATCHES} batches of {settings.batch_size} (dropped in "
        f"this run: {reasons}): {advice}. The file holds {report.held} of `count` = {settings.count}."
    )
