"""What a benchmark asks: shipped prompts, test sets in a directory or on the Hub, or prompts of the user's own.

A name of a test set stands for its prompts in their order; of a training set on the Hub, some are drawn with a fixed
seed. Nothing is fetched before it is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import InvalidInputError
from ..training.prompts import Prompt, read_prompt_file
from .prompts import load_test_set_prompts


if TYPE_CHECKING:
    from ..training.prompt_datasets import PromptDataset


__all__ = ["WORKLOADS", "Workload", "describe_workloads", "load_workload"]

BLEND = "blend"
# Of those in a blend, one prompt each in turn.
_BLENDED = ("gsm8k", "humaneval", "vicuna")
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+(:[\w.-]+){0,2}")
_PROMPT_FILE_SUFFIXES = (".json", ".jsonl")
# Drawn from data sets that are no test sets.
_DRAWN = 256


@dataclass(frozen=True)
class _Source:
    """
    Where the prompts of a name are.

    Attributes:
        domain: Of its prompts.
        file: Name of its file in a directory of test sets; None if it is only on the Hub.
        hub_id: On the Hub; None if it is not there.
        split, subset, column, revision: See [`PromptDataset`].
        is_drawn: Whether only some of it are read, drawn at random.
        is_code: Whether a prompt is a bare function head, to be put as a request.
    """

    domain: str
    file: str | None = None
    hub_id: str | None = None
    split: str = "test"
    subset: str | None = None
    column: str | None = None
    revision: str | None = None
    is_drawn: bool = False
    is_code: bool = False

    @property
    def is_shipped(self) -> bool:
        """Whether its first 64 prompts come with the package."""
        return self.file in _SHIPPED_FILES


_SHIPPED_FILES = ("gsm8k_test.jsonl", "humaneval.jsonl", "vicuna_bench_question.jsonl")
_SOURCES = {
    "gsm8k": _Source("maths", "gsm8k_test.jsonl", "openai/gsm8k", subset="main"),
    "humaneval": _Source("code", "humaneval.jsonl", "openai/openai_humaneval", column="prompt", is_code=True),
    "vicuna": _Source("chat", "vicuna_bench_question.jsonl"),
    "math500": _Source("maths", hub_id="HuggingFaceH4/MATH-500", column="problem"),
    # Published as a script, which `datasets` no longer runs; the Hub's own conversion is what it reads.
    "mathqa": _Source("maths", hub_id="allenai/math_qa", column="Problem", revision="refs/convert/parquet"),
    "aime25": _Source("maths", hub_id="MathArena/aime_2025", split="train", column="problem"),
    "mbpp": _Source("code", "mbpp.jsonl", "google-research-datasets/mbpp", subset="full", column="text"),
    "codealpaca": _Source("code", "codealpaca.json", "sahil2801/CodeAlpaca-20k", split="train", is_drawn=True),
    "opencodeinstruct": _Source(
        "code", hub_id="nvidia/OpenCodeInstruct", split="train", column="input", is_drawn=True
    ),
    "mtbench": _Source("chat", hub_id="philschmid/mt-bench", split="train", column="turns"),
    "sharegpt": _Source("chat", hub_id="Aeala/ShareGPT_Vicuna_unfiltered", split="train", is_drawn=True),
    "alpaca": _Source("chat", "alpaca_seed_tasks.jsonl", "tatsu-lab/alpaca", split="train", is_drawn=True),
}
WORKLOADS = (*_SOURCES, BLEND)


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
            One of `WORKLOADS` (`"blend"`: maths, code and chat in turn), a file of prompts as [`read_prompt_file`]
            reads it, or a data set of the Hub as `org/name`, `org/name:split` or `org/name:split:column`.
        data_dir (`str` or `Path`, *optional*):
            A directory with whole test sets, as they are published: `gsm8k_test.jsonl`, `humaneval.jsonl`,
            `vicuna_bench_question.jsonl`, `mbpp.jsonl`, `codealpaca.json`, `alpaca_seed_tasks.jsonl`. By default the
            64 prompts that are shipped of each of the first three; the others are read from the Hub.

    Returns:
        `Workload`: name and prompts.
    """
    if name == BLEND:
        parts = [load_workload(part, data_dir).prompts for part in _BLENDED]
        turns = chain.from_iterable(zip_longest(*parts))
        return Workload(name, tuple(prompt for prompt in turns if prompt is not None))
    if name in _SOURCES:
        return Workload(name, tuple(_named(name, _SOURCES[name], data_dir)))
    path = Path(name)
    if path.is_file():
        return Workload(path.stem, tuple(read_prompt_file(path)))
    if _HUB_NAME.fullmatch(name) and path.suffix not in _PROMPT_FILE_SUFFIXES:
        return _from_hub_name(name)
    raise InvalidInputError(
        f"`workload` is {name!r}, which is neither one of {', '.join(WORKLOADS)} nor a file of prompts; a data set of "
        "the Hub is written as org/name, org/name:split or org/name:split:column."
    )


def describe_workloads() -> list[tuple[str, str]]:
    """Name of each workload, and where its prompts come from, for people."""
    described = []
    for name, source in _SOURCES.items():
        places = ["64 shipped"] if source.is_shipped else []
        places += [f"{source.file} in --data-dir"] if source.file else []
        places += [f"{source.hub_id} on the Hub"] if source.hub_id and not source.is_shipped else []
        described.append((name, f"{source.domain}: {', or '.join(places)}"))
    described.append((BLEND, f"{', '.join(_BLENDED)} in turn"))
    described.append(("FILE.jsonl", "a file of your own"))
    described.append(("org/name[:split[:column]]", "a data set of the Hub"))
    return described


def _named(name: str, source: _Source, data_dir: str | Path | None) -> Sequence[Prompt]:
    if data_dir is None and source.is_shipped:
        return [
            Prompt((("user", prompt.text),), prompt.domain)
            for prompt in load_test_set_prompts()
            if prompt.domain == source.domain
        ]
    path = None if data_dir is None or source.file is None else Path(data_dir) / source.file
    if path is not None and path.is_file():
        prompts = read_prompt_file(path, source.domain)
    elif path is not None and (source.is_shipped or source.hub_id is None):
        raise InvalidInputError(
            f"`data_dir` is {str(data_dir)!r}, which has no {source.file}; put the test set there under this name, or "
            "leave `data_dir` out to use the shipped prompts."
        )
    else:
        prompts = _from_hub(source)
    return [_as_task(prompt) for prompt in prompts] if source.is_code else prompts


def _from_hub(source: _Source) -> list[Prompt]:
    from ..training.prompt_datasets import PromptDataset

    assert source.hub_id is not None
    dataset = PromptDataset(
        source.hub_id, source.split, source.subset, source.column, source.domain, revision=source.revision
    )
    return _read_hub(dataset, _DRAWN if source.is_drawn else None)


def _from_hub_name(text: str) -> Workload:
    from ..training.prompt_datasets import PromptDataset

    name, _, rest = text.partition(":")
    split, _, column = rest.partition(":")
    dataset = PromptDataset(name, split or "train", column=column or None)
    return Workload(dataset.short_name, tuple(_read_hub(dataset, _DRAWN)))


def _read_hub(dataset: PromptDataset, limit: int | None) -> list[Prompt]:
    from ..training.prompt_datasets import read_prompt_dataset

    return read_prompt_dataset(dataset, limit).prompts


def _as_task(prompt: Prompt) -> Prompt:
    """A bare function head, put as a request like the shipped ones."""
    ((_, code),) = prompt.messages
    text = f"Complete this Python function:\n\n```python\n{code.strip()}\n```"
    return Prompt((("user", text),), prompt.domain)
