"""`adaflash inspect`: what a drafter checkpoint is, what is wrong with it, and which engine runs it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from .checkpoint_options import (
    BlockLayoutOption,
    BlockSizeOption,
    FromOption,
    JsonOption,
    RevisionOption,
    TargetFilesOption,
    TrustCopiesOption,
    hub_arguments,
    open_target,
    read_options,
)


if TYPE_CHECKING:
    from rich.table import Table

    from ..configuration_dflash_drafter import DFlashDrafterConfig
    from ..serving.inspection import Inspection


__all__ = ["inspect"]

_ENGINE_TITLES = {
    "adaflash": "adaflash_hf, generate()",
    "transformers": "transformers' DFlash loop",
    "sglang": "SGLang, DFLASH",
    "sglang-plugin": "SGLang, ADAFLASH plugin",
    "vllm": "vLLM",
}
_STYLES = {"ready": "green", "partial": "yellow", "refuses": "red", "wrong": "bold red"}


def inspect(
    drafter: Annotated[str, typer.Argument(help="Directory or Hub id of a drafter of any known format.")],
    target: TargetFilesOption = None,
    source_format: FromOption = None,
    block_size: BlockSizeOption = None,
    block_layout: BlockLayoutOption = None,
    trust_copies: TrustCopiesOption = False,
    revision: RevisionOption = None,
    as_json: JsonOption = False,
) -> None:
    """Describe DRAFTER, name its problems, and say what each engine will do with it. Exits with 1 on problems."""
    from ..serving.inspection import inspect_drafter

    result = inspect_drafter(
        drafter,
        read_options(open_target(target), block_size, block_layout, trust_copies),
        hub_arguments(revision),
        None if source_format is None else source_format.value,
    )
    if as_json:
        typer.echo(json.dumps(result.as_dict(), ensure_ascii=False))
    else:
        _print(result)
    if result.problems:
        raise typer.Exit(1)


def _print(result: Inspection) -> None:
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False)
    console.print(f"{escape(result.source)}: {escape(result.format_title or 'no known format of DFlash drafters')}")
    for problem in result.problems:
        console.print(f"[bold red]problem:[/] {escape(problem)}")
    if result.config is not None:
        console.print(_facts(result, result.config))
    for note in result.notes:
        console.print(f"[dim]note:[/] {escape(note)}")
    if result.engines:
        console.print(_engines(result))


def _facts(result: Inspection, config: DFlashDrafterConfig) -> Table:
    from rich.table import Table

    causal = [config.is_causal_layer(i) for i in range(config.num_hidden_layers)]
    head = config.length_head_config
    rows = {
        "target": f"{config.target_model_name_or_path or 'not named'}, {config.num_target_layers} layers"
        + ("" if result.fits is None else f"; fits {result.fits}"),
        "layer ids": f"{config.target_layer_ids} (layer outputs from 0; {[i + 1 for i in config.target_layer_ids]} in "
        "vLLM's and speculators' count)",
        "block": f"{config.block_size} rows, {config.block_layout}: {config.draft_length} drafts; mask token "
        f"{config.mask_token_id}",
        "drafter": f"{config.num_hidden_layers} layers, hidden {config.hidden_size}, MLP {config.intermediate_size}, "
        f"heads {config.num_attention_heads}/{config.num_key_value_heads} of {config.head_dim}",
        "attention": _attention(config, causal),
        "RoPE": f"{config.rope_parameters['rope_type']}, base {config.rope_parameters['rope_theta']:g}",
        "vocabulary": f"{config.vocab_size}"
        + ("" if config.draft_vocab_size is None else f", of which {config.draft_vocab_size} are drafted"),
        "length head": "none" if head is None else f"{head.head_type}, bottleneck {head.bottleneck_size}",
        "weights": _weights(result),
    }
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _attention(config: DFlashDrafterConfig, causal: list[bool]) -> str:
    sliding = config.layer_types.count("sliding_attention")
    window = f", {sliding} of {config.num_hidden_layers} with a window of {config.sliding_window}" if sliding else ""
    kind = "causal" if all(causal) else "bidirectional" if not any(causal) else "causal in some layers"
    return f"{kind} inside the block{window}"


def _weights(result: Inspection) -> str:
    dtypes = ", ".join(f"{count} {dtype}" for dtype, count in result.dtypes.items())
    millions = (result.parameters or 0) / 1e6
    size = "" if result.size_bytes is None else f", {result.size_bytes / 2**20:.1f} MB"
    return f"{millions:.1f}M parameters, tensors: {dtypes}{size}"


def _engines(result: Inspection) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table("engine", "as it is", "why", box=None, pad_edge=False, header_style="bold")
    for entry in result.engines:
        style = _STYLES[entry.outlook.value]
        table.add_row(
            _ENGINE_TITLES[entry.engine], f"[{style}]{entry.outlook.value}[/]", escape(entry.reason), end_section=True
        )
    return table
