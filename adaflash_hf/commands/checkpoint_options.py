"""Options of the commands that read and write checkpoints: export, convert and inspect."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer


if TYPE_CHECKING:
    from ..serving.formats import ReadOptions, TargetFiles


__all__ = [
    "BlockLayout",
    "BlockLayoutOption",
    "BlockSizeOption",
    "ForceOption",
    "FromOption",
    "JsonOption",
    "ReadFormat",
    "RevisionOption",
    "TargetFilesOption",
    "TrustCopiesOption",
    "hub_arguments",
    "open_target",
    "read_options",
]


class ReadFormat(StrEnum):
    """Formats that are read."""

    NATIVE = "native"
    Z_LAB = "z-lab"
    ADAFLASH_AUTHORS = "adaflash-authors"
    SPECULATORS = "speculators"
    DEEPSPEC = "deepspec"
    TORCHSPEC = "torchspec"
    SGLANG_PLUGIN = "sglang-plugin"


class BlockLayout(StrEnum):
    """Which token a row of the block predicts."""

    ANCHOR_THEN_MASKS = "anchor_then_masks"
    ANCHOR_FIRST = "anchor_first"


TargetFilesOption = Annotated[
    str | None,
    typer.Option(
        "--target",
        help="Directory or Hub id of the target: fills in what the files leave open, and is what they are compared "
        "with. Its weights are not loaded.",
    ),
]
FromOption = Annotated[
    ReadFormat | None, typer.Option("--from", help="Format of the files; default: what they look like.")
]
BlockSizeOption = Annotated[
    int | None,
    typer.Option("--block-size", min=2, help="Rows of a block, the anchor included, where the files do not say it."),
]
BlockLayoutOption = Annotated[
    BlockLayout | None,
    typer.Option("--block-layout", help="What a row of a block predicts, where the files do not say it."),
]
TrustCopiesOption = Annotated[
    bool,
    typer.Option("--trust-copies", help="Leave out the drafter's own embedding and LM head without comparing them."),
]
RevisionOption = Annotated[
    str | None, typer.Option("--revision", help="Branch, tag or commit, if the drafter is on the Hub.")
]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace a checkpoint that is already at OUT.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def open_target(name: str | None) -> TargetFiles | None:
    """The target of `--target`; nothing is read yet."""
    from ..serving.formats import TargetFiles

    return None if name is None else TargetFiles(name)


def read_options(
    target: TargetFiles | None, block_size: int | None, block_layout: BlockLayout | None, trust_copies: bool
) -> ReadOptions:
    """What the user says about the files."""
    from ..serving.formats import ReadOptions

    return ReadOptions(
        target=target,
        block_size=block_size,
        block_layout=None if block_layout is None else block_layout.value,
        trust_copies=trust_copies,
    )


def hub_arguments(revision: str | None) -> dict[str, Any]:
    """Arguments for the Hub; the token comes from the environment or `hf auth login`."""
    return {} if revision is None else {"revision": revision}
