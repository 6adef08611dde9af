"""What a benchmark asks: the shipped test-set prompts, whole test sets from a directory, or a file of the user's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path

from ..errors import InvalidInputError
from ..training.prompts import Prompt, read_prompt_file
from .prompts import load_test_set_prompts


__all__ = ["WORKLOADS", "Workload", "load_workload"]

_DOMAINS = {"gsm8k": "maths", "humaneval": "code", "vicuna": "chat"}
_FILES = {
    "gsm8k": "gsm8k_test.jsonl",
    "humaneval": "humaneval.jsonl",
    "vicuna": "vicuna_bench_question.jsonl",
}
WORKLOADS = (*_DOMAINS, "blend")


@dataclass(frozen=True)
class Workload:
    """
    A named list of prompts.

    Attributes:
        name: As it appears in results.
        prompts: In a fixed order.
    """

    name: str
    prompts: tuple[Prompt, ...]

    def take(self, count: int) -> list[Prompt]:
        """The first `count` prompts; begins again from the first when there are too few."""
        return [self.prompts[index % len(self.prompts)] for index in range(count)]


def load_workload(name: str, data_dir: str | Path | None = None) -> Workload:
    """
    Find a workload by name.

    Args:
        name (`str`):
            `"gsm8k"`, `"humaneval"`, `"vicuna"`, `"blend"` (one of each in turn), or a file of prompts as
            [`read_prompt_file`] reads it.
        data_dir (`str` or `Path`, *optional*):
            A directory with the whole test sets, as they are published: `gsm8k_test.jsonl`, `humaneval.jsonl`,
            `vicuna_bench_question.jsonl`. By default the 64 prompts of each that are shipped.

    Returns:
        `Workload`: name and prompts.
    """
    if name == "blend":
        parts = [load_workload(part, data_dir).prompts for part in _DOMAINS]
        turns = chain.from_iterable(zip_longest(*parts))
        return Workload(name, tuple(prompt for prompt in turns if prompt is not None))
    if name in _DOMAINS:
        return Workload(name, tuple(_test_set(name, data_dir)))
    path = Path(name)
    if not path.is_file():
        raise InvalidInputError(
            f"`workload` is {name!r}, which is neither one of {', '.join(WORKLOADS)} nor a file of prompts."
        )
    return Workload(path.stem, tuple(read_prompt_file(path)))


def _test_set(name: str, data_dir: str | Path | None) -> Sequence[Prompt]:
    if data_dir is None:
        return [
            Prompt((("user", prompt.text),), prompt.domain)
            for prompt in load_test_set_prompts()
            if prompt.domain == _DOMAINS[name]
        ]
    path = Path(data_dir) / _FILES[name]
    if not path.is_file():
        raise InvalidInputError(
            f"`data_dir` is {str(data_dir)!r}, which has no {_FILES[name]}; put the test set there under this name, "
            "or leave `data_dir` out to use the shipped prompts."
        )
    prompts = read_prompt_file(path, _DOMAINS[name])
    return [_as_task(prompt) for prompt in prompts] if name == "humaneval" else prompts


def _as_task(prompt: Prompt) -> Prompt:
    """A bare function head, put as a request like the shipped ones."""
    ((_, code),) = prompt.messages
    text = f"Complete this Python function:\n\n```python\n{code.strip()}\n```"
    return Prompt((("user", text),), prompt.domain)
