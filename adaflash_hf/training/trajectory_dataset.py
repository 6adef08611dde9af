"""Reads stored trajectories as a dataset for training, with what belongs to each row from the feature shards."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset

from ..errors import InvalidInputError
from ..output_places import writing_to
from .features import FeatureShard, compute_target_features, features_path, write_features
from .trajectories import damaged_shard, find_trajectory_shards


if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


__all__ = [
    "TrajectoryDataset",
    "add_target_features",
    "cache_target_features",
    "check_stored_features",
    "check_trajectories_fit",
    "split_by_prompt",
]

# A shorter response has no token after an anchor to learn from.
MIN_RESPONSE_TOKENS = 2
_CACHING_BATCH = 8


class TrajectoryDataset(Dataset[dict[str, Any]]):
    """
    Trajectories from one or more directories, those with a response too short to learn from left out.

    A row is a dictionary: `index` (stable within the dataset), `input_ids` `[n]`, `prompt_length`, `finished`,
    `domain_id`, and where stored `teacher_ids` `[response, k]`, `teacher_log_probs` `[response, k]` and
    `context_hidden_states` `[n - 1, layers * hidden]`.

    Args:
        directories (`str`, `Path` or a sequence of them):
            What `adaflash trajectories` wrote.
        feature_layer_ids (`Sequence[int]`, *optional*):
            Read stored features, which must come from these layers; by default none are read.
        max_tokens (`int`, *optional*):
            Cut longer trajectories; by default none are.

    Attributes:
        paths: Files of the trajectories.
    """

    def __init__(
        self,
        directories: str | Path | Sequence[str | Path],
        *,
        feature_layer_ids: Sequence[int] | None = None,
        max_tokens: int | None = None,
    ) -> None:
        if isinstance(directories, (str, Path)):
            directories = [directories]
        self.paths = [path for directory in directories for path in find_trajectory_shards(directory)]
        self._shards = [_Shard(path) for path in self.paths]
        if feature_layer_ids is not None:
            self.read_features(feature_layer_ids)
        self._teacher_top_k = min(shard.teacher_top_k for shard in self._shards)
        self.max_tokens = max_tokens
        self.domains = sorted({domain for shard in self._shards for domain in shard.domains})
        self._domain_ids = {domain: i for i, domain in enumerate(self.domains)}
        self._starts = np.cumsum([0, *(len(shard) for shard in self._shards)])
        self._rows = [i for i in range(int(self._starts[-1])) if self._usable(i)]
        if not self._rows:
            raise InvalidInputError(
                f"`trajectories` ({', '.join(map(str, directories))}) hold no response of {MIN_RESPONSE_TOKENS} or "
                "more tokens; make longer ones."
            )

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def teacher_top_k(self) -> int:
        """Likeliest target tokens stored at each response position; 0 if some shard has none."""
        return self._teacher_top_k

    @property
    def has_features(self) -> bool:
        """Whether rows come with `context_hidden_states`."""
        return self._shards[0].features is not None

    def read_features(self, layer_ids: Sequence[int]) -> None:
        """
        Have rows come with the features that are stored beside the trajectories.

        Args:
            layer_ids (`Sequence[int]`):
                Layers that they must come from.
        """
        for shard in self._shards:
            shard.features = FeatureShard(features_path(shard.path), layer_ids)

    @property
    def num_response_tokens(self) -> int:
        """Response tokens of all rows."""
        return sum(len(self.response_ids(index)) for index in range(len(self)))

    @property
    def largest_token_id(self) -> int:
        """Of all prompts and responses."""
        return max(int(ids.max()) for shard in self._shards for ids in (*shard.prompts, *shard.responses) if len(ids))

    @property
    def fingerprint(self) -> str:
        """SHA-256, in hex, of what is learned from: tokens, domains, and how much of a teacher is stored."""
        digest = hashlib.sha256(str(self.teacher_top_k).encode())
        for index in range(len(self)):
            prompt, response = self.prompt_ids(index), self.response_ids(index)
            digest.update(f"{self.domain(index)} {len(prompt)} {len(response)} ".encode())
            digest.update(prompt.astype(np.int32).tobytes() + response.astype(np.int32).tobytes())
        return digest.hexdigest()

    def prompt_ids(self, index: int) -> np.ndarray:
        """Prompt of a row, `[n]` int32."""
        shard, row = self._locate(self._rows[index])
        return shard.prompts[row]

    def response_ids(self, index: int) -> np.ndarray:
        """Response of a row, `[n]` int32, as far as `max_tokens` leaves it."""
        shard, row = self._locate(self._rows[index])
        return shard.responses[row][: self._room(shard, row)]

    def domain(self, index: int) -> str:
        """Domain of a row."""
        shard, row = self._locate(self._rows[index])
        return shard.domains[row]

    def teacher(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Stored teacher of a row: token ids and log-probabilities, both `[response, teacher_top_k]`."""
        shard, row = self._locate(self._rows[index])
        length = len(shard.responses[row][: self._room(shard, row)])
        ids, log_probs = shard.teacher_ids[row], shard.teacher_log_probs[row]
        return ids[:length, : self.teacher_top_k], log_probs[:length, : self.teacher_top_k]

    def __getitem__(self, index: int) -> dict[str, Any]:
        shard, row = self._locate(self._rows[index])
        prompt, response = shard.prompts[row], self.response_ids(index)
        was_cut = len(response) < len(shard.responses[row])
        ids = np.concatenate([prompt, response]).astype(np.int64)
        example = {
            "index": index,
            "input_ids": torch.from_numpy(ids),
            "prompt_length": len(prompt),
            "finished": shard.finished[row] and not was_cut,
            "domain_id": self._domain_ids[shard.domains[row]],
        }
        if self.teacher_top_k:
            for name, values in zip(("teacher_ids", "teacher_log_probs"), self.teacher(index), strict=True):
                example[name] = torch.from_numpy(values.copy())  # the file's buffers are read-only
        if shard.features is not None:
            example["context_hidden_states"] = shard.features[row][: len(ids) - 1]
        return example

    def _locate(self, position: int) -> tuple[_Shard, int]:
        shard = bisect_right(self._starts, position) - 1
        return self._shards[shard], position - int(self._starts[shard])

    def _room(self, shard: _Shard, row: int) -> int | None:
        return None if self.max_tokens is None else max(self.max_tokens - len(shard.prompts[row]), 0)

    def _usable(self, position: int) -> bool:
        shard, row = self._locate(position)
        return len(shard.responses[row][: self._room(shard, row)]) >= MIN_RESPONSE_TOKENS


def split_by_prompt(dataset: TrajectoryDataset, num_held_out: int) -> tuple[list[int], list[int]]:
    """
    Indices for training and about `num_held_out` others for evaluation.

    Rows are held out by the hash of their prompt, so that all rows of one prompt stay on one side.

    Args:
        dataset (`TrajectoryDataset`):
            What to split.
        num_held_out (`int`):
            Rows to hold out; more only if the last prompt has several rows.

    Returns:
        `tuple[list[int], list[int]]`: training and held-out indices.
    """
    if not 0 <= num_held_out < len(dataset):
        raise InvalidInputError(
            f"`num_held_out` (--held-out) is {num_held_out}, but there are {len(dataset)} trajectories; leave some of "
            "them for training."
        )
    hashes = [hashlib.sha256(dataset.prompt_ids(index).tobytes()).digest() for index in range(len(dataset))]
    limit = sorted(hashes)[num_held_out - 1] if num_held_out else b""
    train = [index for index, value in enumerate(hashes) if value > limit]
    return train, [index for index, value in enumerate(hashes) if value <= limit]


def check_stored_features(
    dataset: TrajectoryDataset, features: str = "auto", layer_ids: Sequence[int] | None = None
) -> None:
    """
    Refuse stored features that are not there or of no use, before there is a target that others could come from.

    Args:
        dataset (`TrajectoryDataset`):
            Trajectories to train on.
        features (`str`, *optional*, defaults to `"auto"`):
            See [`add_target_features`].
        layer_ids (`Sequence[int]`, *optional*):
            Layers that they must come from; by default that is not known yet.
    """
    for path in _feature_files(dataset, features):
        FeatureShard(path, layer_ids)


def check_trajectories_fit(
    dataset: TrajectoryDataset, target_config: PreTrainedConfig, features: str = "auto"
) -> None:
    """
    Refuse trajectories that cannot be this target's, by its configuration alone.

    Args:
        dataset (`TrajectoryDataset`):
            Trajectories to train on.
        target_config (`PreTrainedConfig`):
            The target's configuration.
        features (`str`, *optional*, defaults to `"auto"`):
            See [`add_target_features`].

    Raises:
        InvalidInputError: a token is not in its vocabulary, or stored features are not of its width.
    """
    config = target_config.get_text_config(decoder=True)
    largest = dataset.largest_token_id
    if largest >= config.vocab_size:
        raise InvalidInputError(
            f"`trajectories` hold the token {largest}, but the target's vocabulary ends at {config.vocab_size - 1}: "
            "another model made them. Make new ones with this target (adaflash trajectories), or pass their target."
        )
    for path in _feature_files(dataset, features):
        FeatureShard(path).check_width(config.hidden_size)


def add_target_features(
    dataset: TrajectoryDataset,
    target_model: PreTrainedModel,
    layer_ids: Sequence[int],
    features: str = "auto",
    *,
    on_shard: Callable[[int, int], None] | None = None,
) -> str:
    """
    Have rows come with the target's features, unless they are to be computed at each step.

    Args:
        dataset (`TrajectoryDataset`):
            Trajectories to train on; changed in place.
        target_model (`PreTrainedModel`):
            The target, in evaluation mode.
        layer_ids (`Sequence[int]`):
            Layers that features must come from.
        features (`str`, *optional*, defaults to `"auto"`):
            `"stored"`, `"compute"` at each step, `"cache"`: compute once, beside the trajectories; or `"auto"`: stored
            if all are there, else computed.
        on_shard (`Callable[[int, int], None]`, *optional*):
            See [`cache_target_features`].

    Returns:
        `str`: `"stored"`, `"compute"` or `"cache"`.

    Raises:
        InvalidInputError: see [`check_trajectories_fit`].
    """
    check_trajectories_fit(dataset, target_model.config, features)
    source = _source_of_features(dataset, features)
    if source == "cache":
        _cache_features(dataset.paths, target_model, layer_ids, on_shard=on_shard)
    if source != "compute":
        dataset.read_features(layer_ids)
    return source


def cache_target_features(
    target_model: PreTrainedModel,
    directories: Sequence[str | Path],
    layer_ids: Sequence[int],
    *,
    batch_size: int = _CACHING_BATCH,
    on_shard: Callable[[int, int], None] | None = None,
) -> None:
    """
    Compute the features of all stored trajectories and keep them beside; shards that have theirs are left alone.

    Args:
        target_model (`PreTrainedModel`):
            The target, in evaluation mode.
        directories (`Sequence[str or Path]`):
            What `adaflash trajectories` wrote.
        layer_ids (`Sequence[int]`):
            Layers to capture.
        batch_size (`int`, *optional*, defaults to 8):
            Trajectories per forward pass.
        on_shard (`Callable[[int, int], None]`, *optional*):
            Called with how many shards are done and how many there are.
    """
    paths = [path for directory in directories for path in find_trajectory_shards(directory)]
    _cache_features(paths, target_model, layer_ids, batch_size=batch_size, on_shard=on_shard)


def _source_of_features(dataset: TrajectoryDataset, features: str) -> str:
    if features != "auto":
        return features
    return "stored" if all(features_path(path).exists() for path in dataset.paths) else "compute"


def _feature_files(dataset: TrajectoryDataset, features: str) -> list[Path]:
    """Files of features that will be read; of those that are cached the ones that are there."""
    source = _source_of_features(dataset, features)
    paths = map(features_path, dataset.paths)
    return [path for path in paths if source == "stored" or (source == "cache" and path.exists())]


def _cache_features(
    paths: Sequence[Path],
    target_model: PreTrainedModel,
    layer_ids: Sequence[int],
    *,
    batch_size: int = _CACHING_BATCH,
    on_shard: Callable[[int, int], None] | None = None,
) -> None:
    for done, path in enumerate(paths, start=1):
        if not features_path(path).exists():
            shard = _Shard(path)
            texts = [np.concatenate(pair) for pair in zip(shard.prompts, shard.responses, strict=True)]
            features: list[torch.Tensor | None] = [None] * len(texts)
            # Neighbours in length share a batch, so that little of it is padding.
            order = sorted(range(len(texts)), key=lambda row: len(texts[row]))
            for begin in range(0, len(order), batch_size):
                rows = order[begin : begin + batch_size]
                ids = torch.zeros(len(rows), len(texts[rows[-1]]), dtype=torch.long)
                for i, row in enumerate(rows):
                    ids[i, : len(texts[row])] = torch.from_numpy(texts[row].astype(np.int64))
                context = compute_target_features(target_model, ids.to(target_model.device), layer_ids).context.cpu()
                for i, row in enumerate(rows):
                    features[row] = context[i, : len(texts[row]) - 1].clone()
            kept = f"{done - 1} of {len(paths)} files are there: repeat to go on"
            with writing_to(path.parent, "trajectories", kept):
                write_features(features_path(path), features, target_model, layer_ids)
        if on_shard is not None:
            on_shard(done, len(paths))


class _Shard:
    """Columns of one file; rows are views into the file's own buffers."""

    def __init__(self, path: Path) -> None:
        import pyarrow.parquet as pq

        self.path = path
        self.features: FeatureShard | None = None
        try:
            table = pq.read_table(path)
            columns = {name: table.column(name).combine_chunks() for name in table.column_names}
            self.prompts = _rows_of(columns["prompt_ids"])
            self.responses = _rows_of(columns["response_ids"])
            self.domains: list[str] = columns["domain"].to_pylist()
            self.finished: list[bool] = columns["finished"].to_pylist()
        except (OSError, ValueError, KeyError) as error:
            raise damaged_shard(path, error) from error
        self.teacher_ids = _rows_of(columns["teacher_ids"]) if "teacher_ids" in columns else []
        self.teacher_log_probs = _rows_of(columns["teacher_log_probs"]) if "teacher_log_probs" in columns else []
        self.teacher_top_k = self.teacher_ids[0].shape[-1] if self.teacher_ids else 0

    def __len__(self) -> int:
        return len(self.domains)


def _rows_of(column: Any) -> list[np.ndarray]:
    """Each row of a list column as an array: `[n]`, or `[n, k]` for lists of fixed-size lists."""
    values, offsets = column.values, column.offsets.to_numpy()
    width: Iterable[int] = ()
    if hasattr(values.type, "list_size"):
        width, values = (values.type.list_size,), values.values
    flat = values.to_numpy(zero_copy_only=False).reshape(-1, *width)
    return [flat[begin:end] for begin, end in zip(offsets[:-1], offsets[1:], strict=True)]
