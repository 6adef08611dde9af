"""What checkpoint files hold, read from headers and config.json alone, and how their tensors are named in messages."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from .errors import DrafterCheckpointError


HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
NAMES_SHOWN = 5


def hub_arguments(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `from_pretrained`'s arguments that say where a file is."""
    return {name: kwargs[name] for name in HUB_ARGUMENTS if name in kwargs}


def tensor_shapes(files: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """
    Tensor names and shapes of safetensors files, none of which is read beyond its header.

    Raises:
        DrafterCheckpointError: A file is missing, damaged or not to be read.
    """
    shapes = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as handle:
                shapes.update({name: tuple(handle.get_slice(name).get_shape()) for name in handle.keys()})
        except (SafetensorError, OSError) as error:
            # Without `git lfs`, a clone has a few lines of text in the place of the weights.
            raise DrafterCheckpointError(
                f"{file} cannot be read ({error}). It is missing, damaged or not whole; download it again, with "
                "`git lfs pull` if it came by git."
            ) from error
    return shapes


def stored_model_type(directory: str | os.PathLike[str]) -> str | None:
    """
    The `model_type` that the config.json of a directory says, None if it says none.

    Raises:
        OSError: There is no config.json, or it cannot be read.
        ValueError: It is not JSON.
    """
    config = json.loads((Path(directory) / "config.json").read_text(encoding="utf-8"))
    model_type = config.get("model_type") if isinstance(config, dict) else None
    return model_type if isinstance(model_type, str) else None


def listed_names(names: Iterable[str]) -> str:
    """The first few names, and how many more there are."""
    names = list(names)
    rest = len(names) - NAMES_SHOWN
    return ", ".join(f"`{name}`" for name in names[:NAMES_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


__all__ = ["HUB_ARGUMENTS", "hub_arguments", "listed_names", "stored_model_type", "tensor_shapes"]
