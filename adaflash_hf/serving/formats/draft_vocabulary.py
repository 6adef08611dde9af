"""Draft vocabularies: a list of token ids here; elsewhere rows of the target's LM head and a table of offsets.

vLLM and speculators store `lm_head.weight`, the head's rows for the tokens that can be drafted, and `d2t`, where draft
token t stands for token t + d2t[t]. This package multiplies the same rows of the target's own head, so the list of ids
is all it keeps, and the rows must be the target's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ...errors import DrafterCheckpointError, DrafterExportError
from .checkpoint_format import DrafterBundle, WriteOptions
from .own_copies import drop_copies
from .reading import ReadOptions
from .stored_checkpoint import StoredCheckpoint
from .target_files import TargetFiles


__all__ = ["DraftVocabulary", "draft_vocabulary_tensors", "read_draft_vocabulary"]

_OFFSETS = "d2t"
_MEMBERS = "t2d"
_HEAD = "lm_head.weight"


@dataclass(frozen=True)
class DraftVocabulary:
    """
    Args:
        tensors (`dict[str, torch.Tensor]`): `draft_token_ids`, or nothing if the drafter drafts all tokens.
        used (`dict[str, str]`): Stored tensors it was made from, and what became of them.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    used: dict[str, str] = field(default_factory=dict)


def read_draft_vocabulary(
    checkpoint: StoredCheckpoint, config: dict[str, Any], options: ReadOptions
) -> DraftVocabulary:
    """
    Turns offsets and head rows into a list of token ids.

    Args:
        checkpoint (`StoredCheckpoint`): The files.
        config (`dict`): Native fields; `draft_vocab_size` is set or removed in place.
        options (`ReadOptions`): Has the target, whose head the rows must be from.

    Raises:
        DrafterCheckpointError: The head was trained, or the offsets make no sense.
    """
    if "draft_token_ids" in checkpoint.tensors:
        return DraftVocabulary()  # as this package writes it
    size = checkpoint.config.get("draft_vocab_size")
    config.pop("draft_vocab_size", None)
    if _OFFSETS not in checkpoint.tensors:
        if size is not None and size != config.get("vocab_size"):
            raise DrafterCheckpointError(
                f"{checkpoint.source}: `draft_vocab_size` is {size}, but the table `{_OFFSETS}` that says which "
                "tokens these are is missing. Use a complete checkpoint."
            )
        return DraftVocabulary()
    offsets = checkpoint.load(_OFFSETS)
    token_ids = torch.arange(len(offsets)) + offsets.long()
    vocab_size = config.get("vocab_size")
    if len(offsets) != size or len(set(token_ids.tolist())) != size or not _is_within(token_ids, vocab_size):
        raise DrafterCheckpointError(
            f"{checkpoint.source}: `{_OFFSETS}` has {len(offsets)} offsets; expected `draft_vocab_size` = {size} that "
            f"lead to different tokens below {vocab_size}. The file is damaged, or it holds token ids in their place."
        )
    used = drop_copies(checkpoint, options, config.get("target_model_name_or_path"), token_ids)
    if _HEAD not in used:
        raise DrafterCheckpointError(f"{checkpoint.source}: `{_HEAD}` is missing. Use a complete checkpoint.")
    used[_OFFSETS] = "became the list `draft_token_ids`"
    if _MEMBERS in checkpoint.tensors:
        used[_MEMBERS] = f"says the same as `{_OFFSETS}`"
    if size == vocab_size:
        return DraftVocabulary(used=used)
    config["draft_vocab_size"] = size
    return DraftVocabulary({"draft_token_ids": token_ids.sort().values}, used)


def draft_vocabulary_tensors(
    bundle: DrafterBundle, options: WriteOptions, with_members: bool
) -> dict[str, torch.Tensor]:
    """
    The tensors that other projects describe a draft vocabulary with; none if the drafter drafts all tokens.

    Args:
        bundle (`DrafterBundle`): The drafter.
        options (`WriteOptions`): Target and dtype.
        with_members (`bool`): Also the table that says of every token whether it can be drafted.

    Raises:
        DrafterExportError: The target, whose head rows are needed, is unknown.
    """
    token_ids = bundle.tensors.get("draft_token_ids")
    if token_ids is None:
        return {}
    name = bundle.config.target_model_name_or_path
    target = options.target or (TargetFiles(name) if name else None)
    if target is None:
        raise DrafterExportError(
            f"The drafter has a draft vocabulary of {len(token_ids)} tokens, for which rows of the target's LM head "
            "are written. Pass --target."
        )
    rows = target.lm_head()[token_ids]
    if rows.shape[1] != bundle.config.hidden_size:
        raise DrafterExportError(
            f"The LM head of {target.name} has {rows.shape[1]} columns; the drafter's `hidden_size` is "
            f"{bundle.config.hidden_size}. Pass the drafter's own target with --target."
        )
    tensors = {
        _HEAD: rows.to(options.dtype or rows.dtype).contiguous(),
        _OFFSETS: token_ids - torch.arange(len(token_ids)),
    }
    if with_members:
        assert bundle.config.vocab_size is not None
        members = torch.zeros(bundle.config.vocab_size, dtype=torch.bool)
        members[token_ids] = True
        tensors[_MEMBERS] = members
    return tensors


def _is_within(token_ids: torch.Tensor, vocab_size: int | None) -> bool:
    return bool((token_ids >= 0).all()) and (vocab_size is None or bool((token_ids < vocab_size).all()))
