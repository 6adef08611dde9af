"""`adaflash convert`: rewrite a drafter of any known format in another, bit for bit."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from .checkpoint_options import (
    BlockLayoutOption,
    BlockSizeOption,
    ForceOption,
    FromOption,
    JsonOption,
    RevisionOption,
    TargetFilesOption,
    TrustCopiesOption,
    hub_arguments,
    open_target,
    read_options,
)


__all__ = ["ConvertDtype", "ConvertFormat", "convert"]


class ConvertFormat(StrEnum):
    """Formats that are written."""

    NATIVE = "native"
    Z_LAB = "z-lab"
    ADAFLASH_AUTHORS = "adaflash-authors"
    SPECULATORS = "speculators"
    SGLANG = "sglang"
    SGLANG_PLUGIN = "sglang-plugin"
    VLLM = "vllm"


class ConvertDtype(StrEnum):
    """What the weights are written in."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


def convert(
    source: Annotated[str, typer.Argument(help="Directory or Hub id of a drafter of any known format.")],
    out: Annotated[Path, typer.Argument(help="Directory to make.")],
    to: Annotated[ConvertFormat, typer.Option("--to", help="Format to write.")] = ConvertFormat.NATIVE,
    source_format: FromOption = None,
    target: TargetFilesOption = None,
    dtype: Annotated[
        ConvertDtype | None, typer.Option("--dtype", help="Of the weights; default: as they are, or the engine's.")
    ] = None,
    block_size: BlockSizeOption = None,
    block_layout: BlockLayoutOption = None,
    trust_copies: TrustCopiesOption = False,
    revision: RevisionOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Rewrite SOURCE at OUT in another format. OUT appears complete and read back, or not at all."""
    import torch

    from ..serving.formats import WriteOptions, convert_drafter
    from ..serving.target_fit import check_fit

    files = open_target(target)
    bundle, written = convert_drafter(
        source,
        out,
        to.value,
        read_options(files, block_size, block_layout, trust_copies),
        WriteOptions(target=files, dtype=None if dtype is None else getattr(torch, dtype.value)),
        hub=hub_arguments(revision),
        source_format=None if source_format is None else source_format.value,
        check=None if files is None else lambda config: check_fit(config, files),
        force=force,
    )
    notes = bundle.notes + written.notes
    if as_json:
        record = {"out": str(out), "format": to.value, "tensors": len(written.tensors), "notes": notes}
        typer.echo(json.dumps(record, ensure_ascii=False))
        return
    typer.echo(f"{out}: {len(written.tensors)} tensors in format {to.value}")
    for note in notes:
        typer.echo(f"  note: {note}")
