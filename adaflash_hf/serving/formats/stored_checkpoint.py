"""A drafter checkpoint as it lies on the disk or on the Hub: its config.json and the headers of its tensor files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers.utils import cached_file

from ...checkpoint_loading import ADAPTER_CONFIG_NAME, find_weight_files
from ...error_text import first_line
from ...errors import DrafterCheckpointError, InvalidInputError


__all__ = ["CONFIG_NAME", "StoredCheckpoint", "StoredTensor", "open_checkpoint", "open_json"]

CONFIG_NAME = "config.json"
# Weights of a kind this package never opens, with what their presence without safetensors means.
_PICKLED_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".distcp")
_DTYPE_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}


@dataclass(frozen=True)
class StoredTensor:
    """
    A tensor that has not been read.

    Args:
        shape (`tuple[int, ...]`): Its shape.
        dtype (`str`): torch's name of its dtype, such as `"bfloat16"`.
        file (`str`): The safetensors file it is in.
    """

    shape: tuple[int, ...]
    dtype: str
    file: str


@dataclass(frozen=True)
class StoredCheckpoint:
    """
    Args:
        source (`str`): What the user called it, for messages.
        config (`dict`): The parsed config.json.
        tensors (`Mapping[str, StoredTensor]`): Under the names in the files.
    """

    source: str
    config: dict[str, Any]
    tensors: Mapping[str, StoredTensor]

    @property
    def size_bytes(self) -> int:
        """Size of the weight files."""
        return sum(os.path.getsize(file) for file in {tensor.file for tensor in self.tensors.values()})

    def load(self, name: str) -> torch.Tensor:
        """Reads one tensor."""
        with safe_open(self.tensors[name].file, framework="pt") as handle:
            return handle.get_tensor(name)


def open_checkpoint(path: str | os.PathLike[str], hub: Mapping[str, Any] | None = None) -> StoredCheckpoint:
    """
    Reads the config.json and the tensor headers of a drafter.

    Args:
        path (`str` or `os.PathLike`): Directory or Hub id.
        hub (`Mapping`, *optional*): Arguments of transformers' `cached_file`, such as `revision` and `token`.

    Raises:
        InvalidInputError: There is no such directory or repository.
        DrafterCheckpointError: It is not a complete checkpoint in safetensors.
    """
    source, options = os.fspath(path), dict(hub or {})
    config = open_json(source, CONFIG_NAME, options)
    if config is None:
        if open_json(source, ADAPTER_CONFIG_NAME, options) is not None:
            raise DrafterCheckpointError(
                f"{source} is a PEFT adapter, not a drafter; merge it into its drafter first."
            )
        if not os.path.isdir(source):
            raise InvalidInputError(
                f"{source} is no directory, and no repository of that name with a {CONFIG_NAME} is on the Hub or, "
                "offline, in its cache. Correct the name."
            )
        raise DrafterCheckpointError(f"{source} has no {CONFIG_NAME}. Pass the directory that holds the checkpoint.")
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DrafterCheckpointError(
            f"{source}: `architectures` in {CONFIG_NAME} is {names!r}; expected a list of names of classes."
        )
    try:
        files = find_weight_files(source, None, options)
    except DrafterCheckpointError as error:
        raise DrafterCheckpointError(f"{error}{_pickles_in(source)}") from error
    except OSError as error:
        raise DrafterCheckpointError(f"{source}: a weight file cannot be had ({first_line(error)}).") from error
    return StoredCheckpoint(source=source, config=config, tensors=_read_headers(files, source))


def open_json(source: str, filename: str, options: Mapping[str, Any]) -> dict[str, Any] | None:
    """
    A JSON file of a directory or Hub repository; None if it does not have one.

    Raises:
        InvalidInputError: There is no such directory or repository.
        DrafterCheckpointError: The file is not a JSON object.
    """
    if os.path.isfile(source):
        raise InvalidInputError(f"{source} is a file; pass the directory it is in.")
    try:
        file = cached_file(source, filename, _raise_exceptions_for_missing_entries=False, **options)
    except (OSError, ValueError) as error:
        raise InvalidInputError(
            f"{source} is neither a directory nor a Hub repository that can be reached ({first_line(error)})."
        ) from error
    if file is None:
        return None
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise DrafterCheckpointError(f"{source}: {filename} is not JSON: {error}.") from error
    if not isinstance(content, dict):
        raise DrafterCheckpointError(f"{source}: {filename} holds a {type(content).__name__}; expected an object.")
    return content


def _read_headers(files: list[str], source: str) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as handle:
                for name in handle.keys():
                    if name in tensors:
                        raise DrafterCheckpointError(
                            f"{source}: `{name}` is in {tensors[name].file} and in {file}. Remove the stale file."
                        )
                    part = handle.get_slice(name)
                    dtype = _DTYPE_NAMES.get(part.get_dtype(), part.get_dtype())
                    tensors[name] = StoredTensor(tuple(part.get_shape()), dtype, file)
        except FileNotFoundError as error:
            raise DrafterCheckpointError(f"{source}: the weight file {os.path.basename(file)} is missing.") from error
        except (SafetensorError, OSError) as error:
            raise DrafterCheckpointError(
                f"{source}: {os.path.basename(file)} cannot be read ({first_line(error)}). The file is damaged or "
                "was not written to its end; copy or download it again."
            ) from error
    return tensors


def _pickles_in(source: str) -> str:
    """Names pickled weights of a local directory, which explain why there is nothing to read."""
    if not os.path.isdir(source):
        return ""
    found = sorted(name for name in os.listdir(source) if name.endswith(_PICKLED_SUFFIXES))
    return f" Found here: {', '.join(found[:3])}." if found else ""
