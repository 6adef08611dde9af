"""Embeddings and LM heads that a drafter checkpoint carries: copies of the target's, or something of its own.

The drafter uses its target's. A copy can be left out; a head that was trained cannot, because drafts made with the
target's head in its place would be wrong, and nothing would say so.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ...errors import DrafterCheckpointError
from .reading import ReadOptions
from .stored_checkpoint import StoredCheckpoint
from .target_files import TargetFiles


__all__ = ["drop_copies", "owned_names"]

_EMBEDDING = "embed_tokens.weight"
_HEAD = "lm_head.weight"


def owned_names(names: Iterable[str]) -> dict[str, str]:
    """The embedding and LM head among stored names: what each is, by its name."""
    return {
        name: kind
        for name in names
        for kind in (_EMBEDDING, _HEAD)
        if name in (kind, f"model.{kind}", f"draft_model.{kind}")
    }


def drop_copies(
    checkpoint: StoredCheckpoint, options: ReadOptions, named_target: str | None, token_ids: torch.Tensor | None = None
) -> dict[str, str]:
    """
    Makes sure that a checkpoint's own embedding and LM head are the target's.

    Args:
        checkpoint (`StoredCheckpoint`): The files.
        options (`ReadOptions`): Has the target, or the word that they are copies.
        named_target (`str`, *optional*): The target that the checkpoint names.
        token_ids (`torch.Tensor`, *optional*): The target's rows that the LM head holds; all by default.

    Returns:
        `dict[str, str]`: the stored names to leave out, and why.

    Raises:
        DrafterCheckpointError: They are not copies, or nothing says what the target is.
    """
    owned = owned_names(checkpoint.tensors)
    if not owned or options.trust_copies:
        return dict.fromkeys(owned, "taken for a copy of the target's, as told")
    target = options.target or (TargetFiles(named_target) if named_target else None)
    if target is None:
        raise DrafterCheckpointError(
            f"{checkpoint.source} holds {_listed(owned)} of its own. Only copies of the target's can be left out: "
            "pass --target to compare them, or --trust-copies if you know that they were never trained."
        )
    for name, kind in owned.items():
        rows = target.embedding() if kind == _EMBEDDING else target.lm_head()
        if kind == _HEAD and token_ids is not None:
            rows = rows[token_ids]
        _compare(checkpoint.load(name), rows, f"{checkpoint.source}: `{name}`", target.name)
    return dict.fromkeys(owned, f"equal to that of {target.name}, whose own is used")


def _compare(stored: torch.Tensor, rows: torch.Tensor, name: str, target: str) -> None:
    if stored.shape != rows.shape:
        raise DrafterCheckpointError(
            f"{name} has shape {list(stored.shape)}, the target's in {target} has {list(rows.shape)}. Pass the target "
            "that the drafter was trained for with --target."
        )
    # A copy may have been rounded on either side.
    coarser = stored.dtype if stored.dtype.itemsize < rows.dtype.itemsize else rows.dtype
    differs = (stored.to(coarser) != rows.to(coarser)).any(dim=-1)
    if count := int(differs.sum()):
        raise DrafterCheckpointError(
            f"{name} differs from that of {target} in {count} of {len(differs)} rows. The drafter was trained with "
            "its own, and drafts made with the target's would be wrong. Pass its real target with --target, or run it "
            "with the project that wrote it."
        )


def _listed(owned: Iterable[str]) -> str:
    return " and ".join(f"`{name}`" for name in owned)
