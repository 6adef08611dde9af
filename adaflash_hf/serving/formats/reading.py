"""What reading a format amounts to: the native configuration, and where each native tensor comes from."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ...checkpoint_formats import native_tensor_name, refuse_foreign_tensors
from ...errors import DrafterCheckpointError
from .stored_checkpoint import StoredCheckpoint
from .target_files import TargetFiles


__all__ = ["ReadOptions", "Reading", "TensorSource", "apply_options", "plan_tensors"]

# Tensors that hold nothing learned: RoPE tables of old transformers, frozen copies that speculators trains with.
_WITHOUT_CONTENT = (
    (re.compile(r"(?:^|\.)rotary_emb\."), "a RoPE table, which is computed"),
    (re.compile(r"^verifier_(?:lm_head|norm)\."), "a copy of the verifier's, for training only"),
)
_FUSED = re.compile(r"^(?P<prefix>.*\.)(?P<kind>qkv_proj|gate_up_proj)\.(?P<suffix>weight|bias)$")


@dataclass(frozen=True)
class TensorSource:
    """
    Args:
        name (`str`): Name of the stored tensor.
        rows (`tuple[int, int]`, *optional*): First row and the one after the last; all rows by default.
    """

    name: str
    rows: tuple[int, int] | None = None


@dataclass
class Reading:
    """
    A checkpoint in native terms, before any tensor is read.

    Args:
        config (`dict`): Fields of [`DFlashDrafterConfig`].
        sources (`dict[str, TensorSource]`): Where each native tensor comes from.
        dropped (`dict[str, str]`): Stored tensors that are left out, and why.
        notes (`list[str]`): What the user should know.
        computed (`dict[str, torch.Tensor]`): Native tensors that no stored one is a copy of.
    """

    config: dict[str, Any]
    sources: dict[str, TensorSource]
    dropped: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    computed: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class ReadOptions:
    """
    What the user says about a checkpoint, where its files do not say it.

    Args:
        target (`TargetFiles`, *optional*): The target it was trained for. What is read names it only if the files do.
        block_size (`int`, *optional*): Rows of a block.
        block_layout (`str`, *optional*): `"anchor_then_masks"` or `"anchor_first"`.
        trust_copies (`bool`): Take the checkpoint's own embedding and LM head for copies of the target's unseen.
    """

    target: TargetFiles | None = None
    block_size: int | None = None
    block_layout: str | None = None
    trust_copies: bool = False


def apply_options(config: dict[str, Any], options: ReadOptions, source: str) -> None:
    """
    Puts what the user said in place of what the files left open.

    Args:
        config (`dict`): Native fields; changed in place.
        options (`ReadOptions`): What the user said.
        source (`str`): For error messages.

    Raises:
        DrafterCheckpointError: The block size is unknown.
    """
    if options.block_size is not None:
        config["block_size"] = options.block_size
    if options.block_layout is not None:
        config["block_layout"] = options.block_layout
    if config.get("block_size") is None:
        raise DrafterCheckpointError(
            f"{source}: config.json does not say the `block_size` the drafter was trained with, and it cannot be "
            "guessed. Pass --block-size."
        )
    if options.target is not None and config.get("vocab_size") is None:
        config["vocab_size"] = options.target.config.vocab_size


def plan_tensors(
    checkpoint: StoredCheckpoint,
    config: Mapping[str, Any],
    renames: Iterable[tuple[re.Pattern[str], str]] = (),
    set_aside: Iterable[str] = (),
) -> tuple[dict[str, TensorSource], dict[str, str]]:
    """
    Finds the native name of every stored tensor; fused projections are taken apart.

    Args:
        checkpoint (`StoredCheckpoint`): The files.
        config (`Mapping`): Native fields, for the sizes of fused projections.
        renames (`Iterable`): Names of the format, as patterns and replacements, on top of those known to all.
        set_aside (`Iterable[str]`): Stored names that the caller deals with.

    Returns:
        `tuple`: sources by native name, and the names that are dropped with the reason.

    Raises:
        DrafterCheckpointError: A tensor belongs to another kind of drafter, or is there twice.
    """
    sources: dict[str, TensorSource] = {}
    dropped: dict[str, str] = {}
    skipped = set(set_aside)
    for stored in checkpoint.tensors:
        if stored in skipped:
            continue
        if why := next((why for pattern, why in _WITHOUT_CONTENT if pattern.search(stored)), None):
            dropped[stored] = why
            continue
        name = stored
        for pattern, replacement in renames:
            name = pattern.sub(replacement, name)
        name = native_tensor_name(name)
        for native, source in _take_apart(checkpoint, stored, name, config):
            if native in sources:
                raise DrafterCheckpointError(
                    f"{checkpoint.source}: `{sources[native].name}` and `{source.name}` are both `{native}`. Remove "
                    "the one that is out of date."
                )
            sources[native] = source
    refuse_foreign_tensors(sources, checkpoint.source)
    return sources, dropped


def _take_apart(
    checkpoint: StoredCheckpoint, stored: str, name: str, config: Mapping[str, Any]
) -> list[tuple[str, TensorSource]]:
    match = _FUSED.match(name)
    if match is None:
        return [(name, TensorSource(stored))]
    head_dim, heads = config.get("head_dim"), config.get("num_attention_heads")
    key_value_heads = config.get("num_key_value_heads") or heads
    if match["kind"] == "gate_up_proj":
        parts = {"gate_proj": config.get("intermediate_size"), "up_proj": config.get("intermediate_size")}
    elif head_dim is None or heads is None or key_value_heads is None:
        parts = {"q_proj": None}
    else:
        key_value_rows = key_value_heads * head_dim
        parts = {"q_proj": heads * head_dim, "k_proj": key_value_rows, "v_proj": key_value_rows}
    shape = checkpoint.tensors[stored].shape
    sizes = list(parts.values())
    if any(size is None for size in sizes) or not shape or sum(filter(None, sizes)) != shape[0]:
        raise DrafterCheckpointError(
            f"{checkpoint.source}: `{stored}` has {shape[0] if shape else 'no'} rows, but config.json makes "
            f"{' + '.join(map(str, sizes))} of {', '.join(parts)}. Correct the sizes in config.json."
        )
    result, first = [], 0
    for part, size in parts.items():
        assert size is not None
        native = f"{match['prefix']}{part}.{match['suffix']}"
        result.append((native, TensorSource(stored, (first, first + size))))
        first += size
    return result
