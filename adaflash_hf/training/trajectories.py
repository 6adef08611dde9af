"""Makes trajectories: a target's own responses to prompts, batch after batch, in shards on disk.

A directory of trajectories holds

    trajectories.json                how they were made; a run over the same directory must agree with it
    trajectories-00000.parquet       one shard per batch, see [`trajectory_schema`]; `datasets` reads them
    features-00000.safetensors       target features of the rows of that shard, optional, see `features.py`

A shard appears by a rename when it is complete. What a batch holds depends on the settings alone, so a run that was
killed continues with the batches that have no shard yet and ends with the same set.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from ..atomic_files import PARTIAL_SUFFIX, written_aside
from ..error_text import install_hint
from ..errors import InvalidInputError, MissingDependencyError
from ..generation.request_checks import context_limit
from ..output_places import writing_to
from .batched_decoding import DecodedResponse, DecodingSettings, decode_batch, eos_token_ids_of
from .features import FEATURES_PREFIX, features_path, write_features


if TYPE_CHECKING:
    import pyarrow as pa
    from transformers import PreTrainedModel


__all__ = [
    "SETTINGS_FILE",
    "BatchDecoder",
    "TrajectoryBatchReport",
    "TrajectorySettings",
    "check_made_alike",
    "damaged_shard",
    "find_trajectory_shards",
    "generate_trajectories",
    "plan_batches",
    "read_settings",
    "trajectory_path",
    "trajectory_schema",
]

SETTINGS_FILE = "trajectories.json"
TRAJECTORY_PREFIX = "trajectories"
_FORMAT = 1
# Batches are cut from prompts sorted by length within windows of this many batches: enough for batches of nearly one
# length, few enough that the first shards of a run already hold prompts of all lengths.
_WINDOW_BATCHES = 16


@dataclass(frozen=True)
class TrajectorySettings:
    """
    All that decides what the responses are, besides target and prompts.

    Attributes:
        max_new_tokens: Longest response, in tokens.
        batch_size: Prompts decoded at once.
        temperature: 0 is greedy.
        top_p: When sampling, only from the likeliest tokens that have this much probability together.
        seed: Decides the order of the prompts and, when sampling, the responses.
        teacher_top_k: Likeliest target tokens kept at each response position; 0 for none.
        capture_layer_ids: Target layers whose outputs are kept beside the trajectories; empty for none.
    """

    max_new_tokens: int = 512
    batch_size: int = 32
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    teacher_top_k: int = 0
    capture_layer_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise InvalidInputError(f"`batch_size` is {self.batch_size}; it must be at least 1.")
        self.decoding(())

    def decoding(self, eos_token_ids: tuple[int, ...]) -> DecodingSettings:
        """The part that is about one batch; refuses what is not allowed."""
        return DecodingSettings(
            max_new_tokens=self.max_new_tokens,
            eos_token_ids=eos_token_ids,
            temperature=self.temperature,
            top_p=self.top_p,
            teacher_top_k=self.teacher_top_k,
            capture_layer_ids=self.capture_layer_ids,
        )


class BatchDecoder(Protocol):
    """Decodes one batch of prompts; the same seed gives the same responses."""

    def __call__(
        self, prompt_ids: Sequence[Sequence[int]], settings: DecodingSettings, seed: int
    ) -> list[DecodedResponse]:
        """Responses in the order of the prompts."""
        ...


@dataclass(frozen=True)
class TrajectoryBatchReport:
    """
    What [`generate_trajectories`] tells after each batch.

    Attributes:
        batch_index: Number of the batch.
        num_batches: How many there are.
        trajectories: Rows in its shard.
        new_tokens: Response tokens decoded for it; 0 if its shard was there already.
        was_stored: Whether its shard was there already.
    """

    batch_index: int
    num_batches: int
    trajectories: int
    new_tokens: int
    was_stored: bool


def trajectory_path(directory: Path, batch_index: int) -> Path:
    """File of a shard."""
    return directory / f"{TRAJECTORY_PREFIX}-{batch_index:05d}.parquet"


def find_trajectory_shards(directory: str | Path) -> list[Path]:
    """
    The complete shards of a directory, in order.

    Args:
        directory (`str` or `Path`):
            What [`generate_trajectories`] wrote.
    """
    paths = sorted(Path(directory).glob(f"{TRAJECTORY_PREFIX}-*.parquet"))
    if not paths:
        raise InvalidInputError(
            f"`trajectories` is {str(directory)!r}, which holds no {TRAJECTORY_PREFIX}-*.parquet; make some with "
            "`adaflash trajectories`."
        )
    return paths


def damaged_shard(path: Path, error: Exception) -> InvalidInputError:
    """What to raise where a shard cannot be read."""
    return InvalidInputError(
        f"`trajectories`: {path} cannot be read ({error!r}); remove it and run `adaflash trajectories` again."
    )


def read_settings(directory: str | Path) -> dict[str, Any]:
    """How the trajectories of a directory were made, as [`generate_trajectories`] recorded it."""
    path = Path(directory) / SETTINGS_FILE
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise InvalidInputError(
            f"`trajectories` is {str(directory)!r}, whose {SETTINGS_FILE} cannot be read ({error}); give a directory "
            "that `adaflash trajectories` wrote."
        ) from error


def trajectory_schema(teacher_top_k: int = 0) -> pa.Schema:
    """Columns of a shard; the two of the teacher only if it was kept."""
    pa = _pyarrow()
    fields = [
        ("prompt_ids", pa.list_(pa.int32())),
        ("response_ids", pa.list_(pa.int32())),
        ("domain", pa.string()),
        ("finished", pa.bool_()),
    ]
    if teacher_top_k:
        # One row per response position, likeliest token first.
        fields.append(("teacher_ids", pa.list_(pa.list_(pa.int32(), teacher_top_k))))
        fields.append(("teacher_log_probs", pa.list_(pa.list_(pa.float16(), teacher_top_k))))
    return pa.schema(fields)


def plan_batches(prompt_lengths: Sequence[int], batch_size: int, seed: int) -> list[list[int]]:
    """
    Which prompts go into which batch: shuffled, then neighbours of similar length together.

    Args:
        prompt_lengths (`Sequence[int]`):
            Tokens of each prompt.
        batch_size (`int`):
            Prompts of a batch; the last one may be smaller.
        seed (`int`):
            Decides the order.

    Returns:
        `list[list[int]]`: indices of prompts, each exactly once.
    """
    rng = random.Random(seed)
    order = list(range(len(prompt_lengths)))
    rng.shuffle(order)
    batches: list[list[int]] = []
    window = batch_size * _WINDOW_BATCHES
    for begin in range(0, len(order), window):
        members = sorted(order[begin : begin + window], key=lambda index: prompt_lengths[index])
        cut = [members[i : i + batch_size] for i in range(0, len(members), batch_size)]
        rng.shuffle(cut)
        batches += cut
    return batches


def generate_trajectories(
    target_model: PreTrainedModel,
    prompt_ids: Sequence[Sequence[int]],
    domains: Sequence[str],
    directory: str | Path,
    settings: TrajectorySettings,
    on_batch: Callable[[TrajectoryBatchReport], None] | None = None,
    *,
    decode: BatchDecoder | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> None:
    """
    Decode the prompts and store the trajectories; continues where an earlier run over `directory` ended.

    Args:
        target_model (`PreTrainedModel`):
            The target, in evaluation mode.
        prompt_ids (`Sequence[Sequence[int]]`):
            Token ids of each prompt.
        domains (`Sequence[str]`):
            Domain of each prompt.
        directory (`str` or `Path`):
            Where the shards go.
        settings (`TrajectorySettings`):
            What to decode and what to keep.
        on_batch (`Callable[[TrajectoryBatchReport], None]`, *optional*):
            Called after each batch.
        decode (`BatchDecoder`, *optional*):
            Decodes a batch; by default [`decode_batch`], plainly.
        provenance (`Mapping[str, Any]`, *optional*):
            Where the prompts come from, kept with the settings for people and model cards. A run that continues may
            have another.

    Raises:
        InvalidInputError: `directory` holds trajectories that were made otherwise, or the target lacks the layers, the
            vocabulary or the room for the responses.
    """
    directory = Path(directory)
    batches = plan_batches([len(ids) for ids in prompt_ids], settings.batch_size, settings.seed)
    record = _record_of(target_model, prompt_ids, domains, settings)
    _check_target(target_model, prompt_ids, settings)
    _claim_directory(directory, record, dict(provenance or {}))
    decoding = settings.decoding(eos_token_ids_of(target_model))
    if decode is None:
        decode = _plain_decoder(target_model)
    for batch_index, members in enumerate(batches):
        new_tokens, path = 0, trajectory_path(directory, batch_index)
        was_stored = path.exists()
        if not was_stored:
            # Seeded per batch, so that a batch does not depend on which ones ran before it in this process.
            seed = settings.seed * 1_000_003 + batch_index
            responses = decode([prompt_ids[i] for i in members], decoding, seed)
            new_tokens = sum(len(response.response_ids) for response in responses)
            with writing_to(directory, kept=f"{batch_index} of {len(batches)} batches are there: repeat to go on"):
                if settings.capture_layer_ids:
                    features = [response.features for response in responses]
                    write_features(features_path(path), features, target_model, settings.capture_layer_ids)
                # Last, because its presence says that the batch is complete.
                texts, labels = [prompt_ids[i] for i in members], [domains[i] for i in members]
                _write_shard(path, texts, labels, responses, settings)
        if on_batch is not None:
            on_batch(TrajectoryBatchReport(batch_index, len(batches), len(members), new_tokens, was_stored))


def _check_target(
    target_model: PreTrainedModel, prompt_ids: Sequence[Sequence[int]], settings: TrajectorySettings
) -> None:
    config = target_model.config.get_text_config(decoder=True)
    depth = config.num_hidden_layers
    if outside := [layer for layer in settings.capture_layer_ids if not 0 <= layer < depth]:
        raise InvalidInputError(
            f"`capture_layer_ids` (--target-layer-ids) has {outside}, but the target's layers are 0 to {depth - 1}."
        )
    if settings.teacher_top_k > config.vocab_size:
        raise InvalidInputError(
            f"`teacher_top_k` (--teacher-top-k) is {settings.teacher_top_k}, but the target knows {config.vocab_size} "
            "tokens; lower it (16 is usual)."
        )
    longest, limit = max(map(len, prompt_ids), default=0), context_limit(config)
    if limit is not None and longest + settings.max_new_tokens > limit:
        raise InvalidInputError(
            f"A prompt has {longest} tokens and `max_new_tokens` (--max-new-tokens) is {settings.max_new_tokens}, but "
            f"the target's context ends at {limit}. Lower that, or leave out long prompts (--max-prompt-tokens)."
        )


def _plain_decoder(target_model: PreTrainedModel) -> BatchDecoder:
    def decode(prompt_ids: Sequence[Sequence[int]], settings: DecodingSettings, seed: int) -> list[DecodedResponse]:
        generator = torch.Generator(target_model.device).manual_seed(seed)
        return decode_batch(target_model, prompt_ids, settings, generator)

    return decode


def _record_of(
    target_model: PreTrainedModel,
    prompt_ids: Sequence[Sequence[int]],
    domains: Sequence[str],
    settings: TrajectorySettings,
) -> dict[str, Any]:
    if len(domains) != len(prompt_ids):
        raise InvalidInputError(f"`domains` has {len(domains)} entries for {len(prompt_ids)} prompts; give one each.")
    digest = hashlib.sha256(json.dumps([[list(ids) for ids in prompt_ids], list(domains)]).encode())
    return {
        "format": _FORMAT,
        "target": target_model.name_or_path,
        "dtype": str(target_model.dtype).removeprefix("torch."),
        "num_prompts": len(prompt_ids),
        "prompts_sha256": digest.hexdigest(),
        **_as_json(settings),
    }


def _as_json(settings: TrajectorySettings) -> dict[str, Any]:
    """As they will be read back: tuples become lists."""
    fields: dict[str, Any] = json.loads(json.dumps(asdict(settings)))
    return fields


def _claim_directory(directory: Path, record: dict[str, Any], provenance: dict[str, Any]) -> None:
    """Create the directory, or check that what it holds was made the same way."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInputError(
            f"`out` is '{directory}', which is no directory and cannot be made one ({error.strerror}). Pass another."
        ) from error
    path = directory / SETTINGS_FILE
    if path.exists():
        stored = _stored_record(directory)
        _refuse_difference(directory, stored, record, stored.keys() | record.keys())
    elif any(directory.glob(f"{TRAJECTORY_PREFIX}-*.parquet")) or any(directory.glob(f"{FEATURES_PREFIX}-*")):
        raise InvalidInputError(
            f"`out` is {str(directory)!r}, which holds shards but no {SETTINGS_FILE}; give another directory."
        )
    else:
        with writing_to(directory), written_aside(path) as partial:
            partial.write_text(json.dumps({**record, "provenance": provenance}, indent=2), encoding="utf-8")
    # Only a killed run leaves these; two runs over one directory at once are not supported.
    for leftover in directory.glob(f"*{PARTIAL_SUFFIX}"):
        leftover.unlink()


def check_made_alike(directory: Path, target: str, settings: TrajectorySettings) -> None:
    """
    Refuse a directory that holds trajectories made otherwise, as far as that shows before the target is loaded.

    Args:
        directory (`Path`):
            Where the shards go; need not exist.
        target (`str`):
            Hub id or directory of the target.
        settings (`TrajectorySettings`):
            What to decode; its layers are not looked at, for they may depend on the target.

    Raises:
        InvalidInputError: it does.
    """
    if not (directory / SETTINGS_FILE).exists():
        return
    stored = _stored_record(directory)
    known = {**_as_json(settings), "target": target if stored.get("target") else ""}
    _refuse_difference(directory, stored, known, known.keys() - {"capture_layer_ids"})


def _stored_record(directory: Path) -> dict[str, Any]:
    # A setting that an older version did not know had its default.
    stored = {**_as_json(TrajectorySettings()), **read_settings(directory)}
    stored.pop("provenance", None)
    return stored


def _refuse_difference(
    directory: Path, stored: Mapping[str, Any], now: Mapping[str, Any], names: Iterable[str]
) -> None:
    different = sorted(name for name in names if stored.get(name) != now.get(name))
    if different:
        listed = ", ".join(f"{name}: {stored.get(name)!r} there, {now.get(name)!r} now" for name in different)
        raise InvalidInputError(
            f"`out` is {str(directory)!r}, which holds trajectories made otherwise ({listed}). Repeat the options "
            "they were made with to continue, or give another directory."
        )


def _write_shard(
    path: Path,
    prompt_ids: Sequence[Sequence[int]],
    domains: Sequence[str],
    responses: Sequence[DecodedResponse],
    settings: TrajectorySettings,
) -> None:
    pa = _pyarrow()
    import pyarrow.parquet as pq

    schema = trajectory_schema(settings.teacher_top_k)
    columns: list[Any] = [
        pa.array([np.asarray(ids, dtype=np.int32) for ids in prompt_ids], type=schema.field("prompt_ids").type),
        pa.array([response.response_ids.numpy() for response in responses], type=schema.field("response_ids").type),
        pa.array(list(domains)),
        pa.array([response.finished for response in responses]),
    ]
    for name in ("teacher_ids", "teacher_log_probs")[: 2 if settings.teacher_top_k else 0]:
        rows = [getattr(response, name).numpy() for response in responses]
        columns.append(_nested_array(rows, schema.field(name).type))
    with written_aside(path) as partial:
        pq.write_table(pa.Table.from_arrays(columns, schema=schema), partial, compression="zstd")


def _nested_array(rows: Sequence[np.ndarray], kind: pa.DataType) -> pa.Array:
    """Rows of shape `[n_i, k]` as a list column of fixed-size lists, without going through Python numbers."""
    pa = _pyarrow()
    values = pa.FixedSizeListArray.from_arrays(pa.array(np.concatenate(rows).reshape(-1)), kind.value_type.list_size)
    offsets = np.cumsum([0, *(len(row) for row in rows)], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), values)


def _pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise MissingDependencyError(
            f"Trajectories are stored as Parquet, which needs the package pyarrow; run: {install_hint('train')}"
        ) from error
    return pyarrow
