"""Tells drafters apart whose configurations are alike: by what is in their weight files."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError


__all__ = ["weights_sha256"]


def weights_sha256(name_or_path: str | os.PathLike[str]) -> str | None:
    """
    SHA-256, in hex, over the safetensors files of a checkpoint on this disk.

    Args:
        name_or_path (`str` or `os.PathLike`):
            A directory, or a Hub id whose files are in the cache.

    Returns:
        `str`, *optional*: None where there are no such files.
    """
    directory = Path(name_or_path)
    if not directory.is_dir():
        try:
            config = try_to_load_from_cache(os.fspath(name_or_path), "config.json")
        except HFValidationError:
            return None
        if not isinstance(config, str):
            return None
        directory = Path(config).parent
    files = sorted(directory.glob("*.safetensors"))
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest() if files else None
