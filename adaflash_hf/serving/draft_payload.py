"""A drafter's tensors as a running SGLang takes them over HTTP, and what a server must look like afterwards.

SGLang's own client sends handles to memory that both sides share, which ends at the machine's border. Tensors go by
value here: as plain pickles, which the server reads with an unpickler that allows tensors and nothing else.
"""

from __future__ import annotations

import base64
import pickle
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ..errors import DrafterExportError
from .formats.checkpoint_format import WriteOptions
from .formats.drafter_files import read_drafter
from .formats.registry import format_called


__all__ = ["DraftWeights", "check_same_drafter", "draft_weights", "payloads", "stale_tensors"]

# What SGLang fuses, by the last part of a module's name.
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_PARAMETER = re.compile(r"(?P<module>.*?)(?P<leaf>[^.]+)\.(?P<kind>weight|bias)")


@dataclass(frozen=True)
class DraftWeights:
    """
    A drafter as a server holds it.

    Attributes:
        source: Where it was read from.
        tensors: Under the names of the server's format, bfloat16.
    """

    source: str
    tensors: Mapping[str, torch.Tensor]


def draft_weights(path: str | Path, *, has_plugin: bool) -> DraftWeights:
    """
    Reads a drafter of any format for a server.

    Args:
        path (`str` or `Path`): Its directory.
        has_plugin (`bool`): Whether the server runs this package's algorithm, which takes the length head as well.
    """
    form = format_called("sglang-plugin" if has_plugin else "sglang")
    assert form.write is not None
    written = form.write(read_drafter(path), WriteOptions(dtype=form.dtype))
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in written.tensors.items()}
    return DraftWeights(str(path), tensors)


def payloads(weights: DraftWeights, bucket_bytes: int) -> Iterator[str]:
    """
    The tensors for `/update_weights_from_tensor`, a bucket at a time.

    Args:
        weights (`DraftWeights`): The drafter.
        bucket_bytes (`int`): About how large one request may be.
    """
    bucket: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in weights.tensors.items():
        if not tensor.dtype.is_floating_point:
            continue  # the draft vocabulary, which never changes
        if bucket and size + tensor.nbytes > bucket_bytes:
            yield _encoded(bucket)
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    yield _encoded(bucket)


def check_same_drafter(new: DraftWeights, current: DraftWeights) -> None:
    """
    Raise [`DrafterExportError`] unless one can take the other's place.

    Args:
        new (`DraftWeights`): What is to be served.
        current (`DraftWeights`): What is served.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in current.tensors.items()}
    found = {name: tuple(tensor.shape) for name, tensor in new.tensors.items()}
    different = sorted(name for name in shapes.keys() | found.keys() if shapes.get(name) != found.get(name))
    if different:
        name = different[0]
        raise DrafterExportError(
            f"{new.source} has {found.get(name)} for `{name}`, served is {shapes.get(name)} of {current.source} "
            f"({len(different)} such tensors). Only weights may change; for another drafter, start the server anew."
        )
    for name, tensor in new.tensors.items():
        if not tensor.dtype.is_floating_point and not torch.equal(tensor, current.tensors[name]):
            raise DrafterExportError(
                f"{new.source} has another `{name}` than {current.source}; a new draft vocabulary needs a new start "
                "of the server."
            )


def stale_tensors(
    new: DraftWeights, current: DraftWeights, before: Mapping[str, str], after: Mapping[str, str]
) -> list[str]:
    """
    Tensors of a server that should have changed and did not.

    Args:
        new (`DraftWeights`): What it was sent.
        current (`DraftWeights`): What it had.
        before (`Mapping[str, str]`): The drafter's checksums by rank and name.
        after (`Mapping[str, str]`): The same after the update.
    """
    changed = {name for name, tensor in new.tensors.items() if not torch.equal(tensor, current.tensors[name])}
    by_name: dict[str, list[bool]] = {}
    for key, value in after.items():
        name = key.partition(":")[2]
        by_name.setdefault(name, []).append(before.get(key) != value)
    # With tensor parallelism, one rank's share may be what has not changed.
    return sorted(
        name for name, moved in by_name.items() if not any(moved) and any(part in changed for part in _sources(name))
    )


def _sources(name: str) -> list[str]:
    """Names in a checkpoint of what a server's tensor is made of."""
    name = name.removeprefix("model.")
    match = _PARAMETER.fullmatch(name)
    if match is None or match["leaf"] not in _FUSED:
        return [name]
    return [f"{match['module']}{part}.{match['kind']}" for part in _FUSED[match["leaf"]]]


def _encoded(bucket: list[tuple[str, torch.Tensor]]) -> str:
    # Clones: pickling a view takes its whole storage along.
    own = [(name, tensor.clone()) for name, tensor in bucket]
    return base64.b64encode(pickle.dumps(own, protocol=4)).decode("ascii")
