"""`adaflash export`: write a drafter for an inference engine, checked, and say how to serve it."""

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


__all__ = ["ExportFormat", "export"]

_UNKNOWN_TARGET = "TARGET"


class ExportFormat(StrEnum):
    """What a drafter is exported for."""

    SGLANG = "sglang"
    SGLANG_PLUGIN = "sglang-plugin"
    VLLM = "vllm"
    SPECULATORS = "speculators"
    Z_LAB = "z-lab"


def export(
    drafter: Annotated[str, typer.Argument(help="Directory or Hub id of the drafter, or of an adapter on one.")],
    out: Annotated[Path, typer.Argument(help="Directory to make.")],
    to: Annotated[ExportFormat, typer.Option("--to", help="What it is for.")],
    target: TargetFilesOption = None,
    source_format: FromOption = None,
    block_size: BlockSizeOption = None,
    block_layout: BlockLayoutOption = None,
    trust_copies: TrustCopiesOption = False,
    revision: RevisionOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write DRAFTER to OUT for an inference engine. OUT appears complete and read back, or not at all."""
    from ..serving.formats import WriteOptions, convert_drafter
    from ..serving.launch_commands import launch_command
    from ..serving.target_fit import check_fit

    files = open_target(target)
    bundle, written = convert_drafter(
        drafter,
        out,
        to.value,
        read_options(files, block_size, block_layout, trust_copies),
        WriteOptions(target=files),
        hub=hub_arguments(revision),
        source_format=None if source_format is None else source_format.value,
        check=None if files is None else lambda config: check_fit(config, files),
        force=force,
    )
    config = written.holds.config
    target_name = (None if files is None else files.path) or config.target_model_name_or_path
    command = launch_command(to.value, config, target_name or _UNKNOWN_TARGET, str(out))
    notes = bundle.notes + written.notes
    if command is not None and target_name is None:
        notes.append(f"The drafter does not name its target; put it in the place of {_UNKNOWN_TARGET}.")
    if as_json:
        record = {
            "out": str(out),
            "format": to.value,
            "target": target_name,
            "block_size": config.block_size,
            "num_speculative_tokens": config.draft_length,
            "tensors": len(written.tensors),
            "notes": notes,
            "command": None if command is None else command.arguments,
            "environment": {} if command is None else command.environment,
        }
        typer.echo(json.dumps(record, ensure_ascii=False))
        return
    typer.echo(f"{out}: {len(written.tensors)} tensors for {to.value}, target {target_name or 'not named'}")
    for note in notes:
        typer.echo(f"  note: {note}")
    if command is not None:
        typer.echo(f"\n{command}")
        for note in command.notes:
            typer.echo(f"  note: {note}")
