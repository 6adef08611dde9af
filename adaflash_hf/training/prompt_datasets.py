"""Prompts of data sets: from the Hugging Face Hub, or from directories and files that `datasets` reads.

Of a large data set only as much is read as is wanted: it is streamed and shuffled on the way.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..error_text import install_hint
from ..errors import InvalidInputError, MissingDependencyError
from ..hub_connection import hub_or_cache
from ..hub_upload import hub_errors
from .prompts import Prompt, prompt_of_record


__all__ = ["DatasetPrompts", "PromptDataset", "read_prompt_dataset"]

_FILE_READERS = {
    ".parquet": "parquet",
    ".json": "json",
    ".jsonl": "json",
    ".csv": "csv",
    ".arrow": "arrow",
}
_SAVED_TO_DISK = ("state.json", "dataset_dict.json")
# Records that are shuffled among each other while streaming.
_SHUFFLE_BUFFER = 10_000


@dataclass(frozen=True)
class PromptDataset:
    """
    Where prompts are.

    Attributes:
        name: Hub id, or a local file or directory.
        split: Split to read.
        subset: Configuration of a data set that has several.
        column: Field with the prompt; by default the first one with a known name.
        domain: Label of the prompts; by default each record's own field `domain`, or the name of the data set.
        revision: Branch, tag or commit on the Hub; the newest by default.
    """

    name: str
    split: str = "train"
    subset: str | None = None
    column: str | None = None
    domain: str | None = None
    revision: str | None = None

    @property
    def is_local(self) -> bool:
        """Whether it is on this machine."""
        return Path(self.name).exists()

    @property
    def short_name(self) -> str:
        """Last part of its name."""
        return Path(self.name).stem if self.is_local else self.name.rpartition("/")[2]


@dataclass(frozen=True)
class DatasetPrompts:
    """
    What was read.

    Attributes:
        prompts: Prompts, in the order they were met.
        skipped: Records without a prompt of the user.
    """

    prompts: list[Prompt]
    skipped: int


def read_prompt_dataset(source: PromptDataset, limit: int | None = None, seed: int = 0) -> DatasetPrompts:
    """
    Read the prompts of a data set.

    Args:
        source (`PromptDataset`):
            Where they are.
        limit (`int`, *optional*):
            At most this many, drawn at random; a data set of the Hub is then streamed and not downloaded as a whole.
        seed (`int`, *optional*, defaults to 0):
            Decides which ones.

    Raises:
        InvalidInputError: the data set, its split or its column is not there, or no record holds a prompt.
        MissingDependencyError: `datasets` is not installed.
    """
    records = _open(source, is_streaming=limit is not None and not source.is_local)
    known = getattr(records, "column_names", None)
    if source.column is not None and known and source.column not in known:
        raise InvalidInputError(
            f"`column` is {source.column!r}, but {source.name} has {', '.join(known)}; name one of these."
        )
    if limit is not None:
        records = _shuffled(records, seed)
    return _collect(records, source, limit)


def _open(source: PromptDataset, *, is_streaming: bool) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise MissingDependencyError(
            f"Data sets are read with the package datasets, which is not installed; run: {install_hint('train')}"
        ) from error
    path = Path(source.name)
    try:
        if path.is_file():
            reader = _FILE_READERS.get(path.suffix.lower())
            if reader is None:
                raise ValueError(f"files of these kinds are read: {', '.join(_FILE_READERS)}")
            return datasets.load_dataset(reader, data_files=str(path), split="train")
        if any((path / name).is_file() for name in _SAVED_TO_DISK):
            saved = datasets.load_from_disk(str(path))
            return saved[source.split] if isinstance(saved, datasets.DatasetDict) else saved
        with hub_or_cache(source.name):
            return datasets.load_dataset(
                source.name, source.subset, split=source.split, streaming=is_streaming, revision=source.revision
            )
    except (*hub_errors(), ValueError, KeyError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InvalidInputError(
            f"`dataset` is {source.name!r} (split {source.split!r}, subset {source.subset!r}) and cannot be read "
            f"({reason}). Give a Hub id, a directory that `datasets` saved, or Parquet, JSON or CSV files."
        ) from error


def _shuffled(records: Any, seed: int) -> Any:
    import datasets

    if isinstance(records, datasets.IterableDataset):
        return records.shuffle(seed=seed, buffer_size=_SHUFFLE_BUFFER)
    return records.shuffle(seed=seed)


def _collect(records: Iterable[dict[str, Any]], source: PromptDataset, limit: int | None) -> DatasetPrompts:
    prompts: list[Prompt] = []
    skipped, reason = 0, ""
    for number, record in enumerate(records, start=1):
        try:
            place = f"record {number} of {source.name}"
            prompts.append(
                prompt_of_record(record, place, source.domain, default_domain=source.short_name, column=source.column)
            )
        except InvalidInputError as error:
            skipped, reason = skipped + 1, reason or str(error)
        if limit is not None and len(prompts) == limit:
            break
    if not prompts:
        raise InvalidInputError(f"`dataset` is {source.name!r}, and none of its records holds a prompt: {reason}")
    return DatasetPrompts(prompts, skipped)
