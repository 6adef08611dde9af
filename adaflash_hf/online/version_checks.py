"""What a version must be before it is published, and again before it is served: tensor by tensor, field by field.

The same drafter with other weights, nothing else: names, shapes, configuration, draft vocabulary and target are those
of the drafter it is to replace, and every number is finite. Not covered: whether it drafts well, see `probe.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from ..errors import PublishedVersionError


if TYPE_CHECKING:
    from ..configuration_dflash_drafter import DFlashDrafterConfig


__all__ = ["WEIGHTS_FILE", "check_configuration", "read_weights"]

WEIGHTS_FILE = "model.safetensors"
# Say how a checkpoint was written or is loaded, not what it computes.
_VOLATILE_FIELDS = (
    "_attn_implementation",
    "_name_or_path",
    "architectures",
    "auto_map",
    "dtype",
    "torch_dtype",
    "transformers_version",
)


def check_configuration(directory: Path, expected: DFlashDrafterConfig) -> None:
    """
    Compare a version's configuration with that of the drafter it is to replace.

    Args:
        directory (`Path`):
            The version's directory.
        expected (`DFlashDrafterConfig`):
            Configuration of the drafter in use.

    Raises:
        PublishedVersionError: They differ, for example in the target; or there is none.
    """
    path = directory / "config.json"
    try:
        found = type(expected).from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise PublishedVersionError(f"{path} cannot be read ({error}); publish the version again.") from error
    ours, theirs = _lasting_fields(expected), _lasting_fields(found)
    different = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    if different:
        listed = ", ".join(f"{name}: {theirs.get(name)!r} there, {ours.get(name)!r} in use" for name in different)
        raise PublishedVersionError(
            f"{path} describes another drafter ({listed}). Only weights may change; for another drafter or target, "
            "use another publish directory and start serving anew."
        )


def read_weights(
    directory: Path, expected: Mapping[str, torch.Tensor], *, device: torch.device | str = "cpu"
) -> dict[str, torch.Tensor]:
    """
    Weights of a version, in the dtypes of the drafter it is to replace.

    Args:
        directory (`Path`):
            The version's directory.
        expected (`Mapping[str, torch.Tensor]`):
            State dict of the drafter in use; integer tensors in it (the draft vocabulary) must be the same.
        device (`torch.device` or `str`, *optional*, defaults to `"cpu"`):
            Where to put them.

    Raises:
        PublishedVersionError: A tensor is missing, unexpected, mis-shaped, not finite or of another vocabulary.
    """
    path = directory / WEIGHTS_FILE
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            _check_names(path, names, set(expected))
            return {
                name: _checked(path, name, file.get_tensor(name), expected[name], device) for name in sorted(names)
            }
    except (OSError, SafetensorError) as error:
        raise PublishedVersionError(f"{path} cannot be read ({error}); publish the version again.") from error


def _lasting_fields(config: DFlashDrafterConfig) -> dict[str, Any]:
    # Through JSON, so that tuples and lists, and nested configurations, compare as they are stored.
    fields = json.loads(json.dumps(config.to_dict(), default=str))
    for part in (fields, fields.get("length_head_config") or {}):
        for name in _VOLATILE_FIELDS:
            part.pop(name, None)
    return fields


def _check_names(path: Path, found: set[str], expected: set[str]) -> None:
    if found != expected:
        raise PublishedVersionError(
            f"{path} lacks the tensors {sorted(expected - found)[:5]} and has {sorted(found - expected)[:5]} in "
            "addition; publish the same drafter with other weights."
        )


def _checked(
    path: Path, name: str, tensor: torch.Tensor, expected: torch.Tensor, device: torch.device | str
) -> torch.Tensor:
    if tensor.shape != expected.shape:
        raise PublishedVersionError(
            f"{path}: `{name}` has the shape {list(tensor.shape)}, in use is {list(expected.shape)}; publish the same "
            "drafter with other weights."
        )
    if not expected.dtype.is_floating_point:
        if not torch.equal(tensor.to(expected), expected):
            raise PublishedVersionError(
                f"{path}: `{name}` is not the one in use; a new draft vocabulary needs a new start of the server."
            )
        return expected
    # A copy, because the file may be gone by the time it is used; in the dtype it will have, because what overflows
    # float16 is not finite there.
    converted = tensor.to(device=device, dtype=expected.dtype, copy=True)
    if not tensor.dtype.is_floating_point or not _is_finite(converted):
        raise PublishedVersionError(
            f"{path}: `{name}` has values that are not finite in {expected.dtype}; the training run diverged or the "
            "file is damaged."
        )
    return converted


def _is_finite(tensor: torch.Tensor) -> bool:
    """Reads the tensor once and writes nothing, beside a decoding that needs the processor's caches."""
    return tensor.numel() == 0 or all(bool(torch.isfinite(extreme)) for extreme in torch.aminmax(tensor))
