"""`adaflash trajectories`: a target's own responses to prompts, stored for training."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import InvalidInputError
from .options import DeviceOption, Dtype, DtypeOption, TargetOption


if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..training.prompts import Prompt
    from ..training.trajectories import TrajectorySettings


__all__ = ["parse_layer_ids", "trajectories"]


def trajectories(
    out: Annotated[Path, typer.Option("--out", help="Directory for the trajectories; a killed run continues there.")],
    prompts: Annotated[
        list[Path],
        typer.Option(
            "--prompts",
            help="JSON or JSON-lines file with prompts; several times for several files.",
            exists=True,
            dir_okay=False,
        ),
    ],
    target: TargetOption = "smollm2-135m",
    domain: Annotated[
        list[str] | None,
        typer.Option("--domain", help="Domain of each --prompts, in order.  [default: the file's name]"),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", min=1, help="Longest response, in tokens.")
    ] = 512,
    max_prompt_tokens: Annotated[
        int, typer.Option("--max-prompt-tokens", min=1, help="Longer prompts are left out.")
    ] = 512,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="At most this many prompts, from all files evenly.")
    ] = None,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Prompts decoded at once.")] = 32,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, help="0 is greedy; above, tokens are sampled.")
    ] = 0.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Order of the prompts, and sampling.")] = 0,
    teacher_top_k: Annotated[
        int,
        typer.Option("--teacher-top-k", min=0, help="Also store this many of the target's likeliest tokens, as soft "
                     "targets for training."),
    ] = 16,
    features: Annotated[
        bool,
        typer.Option("--features/--no-features", help="Also store the target's hidden states that a drafter reads: "
                     "training then needs no target, at kilobytes per token."),
    ] = False,
    target_layer_ids: Annotated[
        str | None,
        typer.Option("--target-layer-ids", help="Layers for --features, such as 1,8,14.  [default: as for a new "
                     "drafter]"),
    ] = None,
    dtype: DtypeOption = Dtype.AUTO,
    device: DeviceOption = None,
) -> None:  # fmt: skip
    """Let the target answer prompts in large batches and store its responses for `adaflash train`."""
    if domain and len(domain) not in (1, len(prompts)):
        raise InvalidInputError(
            f"`--domain` was given {len(domain)} times for {len(prompts)} `--prompts`; give one for all or one each."
        )
    from rich.console import Console

    from ..embedded_target import load_target
    from ..training.initialization import default_target_layer_ids
    from ..training.prompts import read_prompt_file
    from ..training.trajectories import TrajectorySettings

    console = Console()
    domains = [None] * len(prompts) if not domain else domain * (len(prompts) if len(domain) == 1 else 1)
    files = [read_prompt_file(path, name) for path, name in zip(prompts, domains, strict=True)]
    target_model, tokenizer = load_target(
        target, dtype.value, device=device, on_progress=lambda text: console.print(f"{text} ...", highlight=False)
    )
    layer_ids: list[int] = []
    if features:
        layer_ids = parse_layer_ids(target_layer_ids) or default_target_layer_ids(target_model)
    settings = TrajectorySettings(
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        temperature=temperature,
        seed=seed,
        teacher_top_k=teacher_top_k,
        capture_layer_ids=tuple(layer_ids),
    )
    chosen = interleave(files)
    encoded = _encode(tokenizer, chosen, max_prompt_tokens, limit, console)
    _generate(target_model, encoded, out, settings, console)
    _print_statistics(out, console)


def parse_layer_ids(text: str | None) -> list[int] | None:
    """
    Layer ids from the command line.

    Args:
        text (`str`, *optional*):
            Numbers with commas between them.
    """
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise InvalidInputError(f"`--target-layer-ids` is {text!r}; give numbers such as 1,8,14,20,27.") from error


def interleave(files: list[list[Prompt]]) -> list[Prompt]:
    """
    The prompts of all files in one list in which each file is spread evenly, so that any beginning is a fair sample.

    Args:
        files (`list[list[Prompt]]`):
            Prompts of each file.
    """
    placed = [
        ((i + 0.5) / len(file), number, prompt) for number, file in enumerate(files) for i, prompt in enumerate(file)
    ]
    return [prompt for _, _, prompt in sorted(placed, key=lambda entry: entry[:2])]


def _encode(
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[Prompt],
    max_prompt_tokens: int,
    limit: int | None,
    console: Console,
) -> list[tuple[list[int], str]]:
    """Token ids and domain of the prompts that are short enough, at most `limit` of them."""
    from ..training.prompts import encode_prompts

    kept: list[tuple[list[int], str]] = []
    too_long: Counter[str] = Counter()
    # In pieces, so that a small limit does not encode a large file.
    for begin in range(0, len(prompts), 1024):
        piece = prompts[begin : begin + 1024]
        for prompt, ids in zip(piece, encode_prompts(tokenizer, piece), strict=True):
            if len(ids) <= max_prompt_tokens:
                kept.append((ids, prompt.domain))
            else:
                too_long[prompt.domain] += 1
        if limit is not None and len(kept) >= limit:
            break
    if too_long:
        listed = ", ".join(f"{count} {domain}" for domain, count in sorted(too_long.items()))
        console.print(f"Left out, longer than {max_prompt_tokens} tokens: {listed}", highlight=False)
    if not kept:
        raise InvalidInputError(f"`--max-prompt-tokens` is {max_prompt_tokens}, and every prompt is longer; raise it.")
    return kept[:limit]


def _generate(
    target_model: PreTrainedModel,
    encoded: list[tuple[list[int], str]],
    out: Path,
    settings: TrajectorySettings,
    console: Console,
) -> None:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from ..training.trajectories import TrajectoryBatchReport, generate_trajectories

    progress = Progress(
        TextColumn("Trajectories"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[speed]}"),
        console=console,
    )
    begin, new_tokens, stored = time.monotonic(), 0, 0
    with progress:
        task = progress.add_task("", total=len(encoded), speed="")

        def on_batch(report: TrajectoryBatchReport) -> None:
            nonlocal new_tokens, stored
            new_tokens += report.new_tokens
            stored += report.trajectories if report.was_stored else 0
            speed = f"{new_tokens / (time.monotonic() - begin):.0f} tok/s" if new_tokens else ""
            progress.update(task, advance=report.trajectories, speed=speed)

        ids, domains = zip(*encoded, strict=True)
        generate_trajectories(target_model, ids, domains, out, settings, on_batch)
    if stored:
        console.print(f"{stored} trajectories were there from an earlier run.", highlight=False)
    seconds = time.monotonic() - begin
    console.print(f"{new_tokens} new tokens in {seconds:.0f} s, {new_tokens / seconds:.0f} tok/s", highlight=False)


def _print_statistics(out: Path, console: Console) -> None:
    from rich.table import Table

    from ..training.length_statistics import length_statistics

    table = Table(title=f"Lengths in tokens ({out})")
    for heading in ("domain", "rows", "ended", "prompt", "response", "median", "p90", "total"):
        table.add_column(heading, justify="left" if heading == "domain" else "right")
    for row in length_statistics([out]):
        table.add_row(
            row.domain,
            str(row.trajectories),
            f"{row.finished_share:.0%}",
            f"{row.prompt_tokens_mean:.0f}",
            f"{row.response_tokens_mean:.0f}",
            f"{row.response_tokens_median:.0f}",
            f"{row.response_tokens_p90:.0f}",
            str(row.response_tokens),
        )
    console.print(table)
