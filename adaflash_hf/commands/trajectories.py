"""`adaflash trajectories`: a target's own responses to prompts, stored for training."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import InvalidInputError
from .options import (
    DeviceOption,
    Dtype,
    DtypeOption,
    LengthPolicy,
    PrepackOption,
    TargetOption,
)


if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..generation.engine_statistics import EngineStats
    from ..training.drafted_decoding import DraftedDecoder
    from ..training.prompts import Prompt
    from ..training.trajectories import TrajectorySettings


__all__ = ["parse_layer_ids", "trajectories"]


def trajectories(
    out: Annotated[Path, typer.Option("--out", help="Directory for the trajectories; a killed run continues there.")],
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            "--prompts",
            help="JSON or JSON-lines file with prompts; several times for several files.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    dataset: Annotated[
        list[str] | None,
        typer.Option("--dataset", help="Data set with prompts: a Hub id, a directory that `datasets` saved, or a "
                     "Parquet, JSON or CSV file; several times for several."),
    ] = None,
    split: Annotated[str, typer.Option("--split", help="Split of each --dataset.")] = "train",
    subset: Annotated[
        str | None, typer.Option("--subset", help="Configuration of each --dataset, where there are several.")
    ] = None,
    column: Annotated[
        list[str] | None,
        typer.Option("--column", help="Field of each --dataset with the prompt: messages, conversations or text.  "
                     "[default: the first with a known name]"),
    ] = None,
    target: TargetOption = "smollm2-135m",
    drafter: Annotated[
        str | None,
        typer.Option("--drafter", help="Hub id or directory of a drafter for the target, to decode faster."),
    ] = None,
    length_policy: Annotated[
        LengthPolicy | None,
        typer.Option("--length-policy", help="How much of a draft is verified.  [default: cost_aware]"),
    ] = None,
    domain: Annotated[
        list[str] | None,
        typer.Option("--domain", help="Domain of each --prompts and then of each --dataset, in order.  [default: the "
                     "record's own, or the name of the file or data set]"),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", min=1, help="Longest response, in tokens.")
    ] = 512,
    max_prompt_tokens: Annotated[
        int, typer.Option("--max-prompt-tokens", min=1, help="Longer prompts are left out.")
    ] = 512,
    limit: Annotated[
        int | None,
        typer.Option("--limit", min=1, help="At most this many prompts, from all sources evenly; a data set of the "
                     "Hub is then streamed and not downloaded as a whole."),
    ] = None,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Prompts decoded at once.")] = 32,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, help="0 is greedy; above, tokens are sampled.")
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option("--top-p", min=0.0, max=1.0, help="When sampling, from the likeliest tokens with this "
                            "much probability together.")
    ] = 1.0,
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
    prepack: PrepackOption = True,
    dtype: DtypeOption = Dtype.AUTO,
    device: DeviceOption = None,
) -> None:  # fmt: skip
    """Let the target answer prompts in large batches and store its responses for `adaflash train`."""
    from rich.console import Console

    from ..embedded_target import load_target
    from ..generation.prepacking import settle_prepacking
    from ..output_places import check_writable
    from ..training.initialization import default_target_layer_ids
    from ..training.trajectories import TrajectorySettings, check_made_alike
    from .loading import check_checkpoint, load_drafter

    if length_policy is not None and drafter is None:
        raise InvalidInputError(f"`--length-policy` is {length_policy.value!r}, but there is no --drafter.")
    settings = TrajectorySettings(
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        teacher_top_k=teacher_top_k,
    )
    layer_ids = parse_layer_ids(target_layer_ids)
    check_writable(out)
    check_made_alike(out, target, settings)
    sources = _Sources(prompts or [], dataset or [], split, subset, column or [], domain or [])
    console = Console(markup=False)  # names and places may have brackets
    chosen = interleave(sources.read(limit, seed, console))
    if drafter is not None:
        check_checkpoint(drafter, length_policy=length_policy, target=target)
    target_model, tokenizer = load_target(
        target, dtype.value, device=device, on_progress=lambda text: console.print(f"{text} ...", highlight=False)
    )
    drafter_model = None if drafter is None else load_drafter(drafter, target_model)
    settle_prepacking(target_model, prepack)
    if drafter_model is not None:
        settle_prepacking(drafter_model, prepack, allow_rounding=True)
    if features:
        settings = replace(settings, capture_layer_ids=tuple(layer_ids or default_target_layer_ids(target_model)))
    encoded = _encode(tokenizer, chosen, max_prompt_tokens, limit, console)
    decoder = None
    if drafter_model is not None:
        decoder = _drafted_decoder(target_model, drafter_model, batch_size, length_policy)
    _generate(target_model, encoded, out, settings, decoder, sources.provenance, console)
    _print_statistics(out, console)


@dataclass(frozen=True)
class _Sources:
    """Where the prompts come from, as the options say."""

    files: list[Path]
    datasets: list[str]
    split: str
    subset: str | None
    columns: list[str]
    domains: list[str]

    def __post_init__(self) -> None:
        count = len(self.files) + len(self.datasets)
        if not count:
            raise InvalidInputError(
                "No prompts: give --prompts with a file, or --dataset; `adaflash prompts` makes some."
            )
        if self.domains and len(self.domains) not in (1, count):
            raise InvalidInputError(
                f"`--domain` was given {len(self.domains)} times for {count} `--prompts` and `--dataset`; give one "
                "for all or one each."
            )
        if self.columns and (not self.datasets or len(self.columns) not in (1, len(self.datasets))):
            raise InvalidInputError(
                f"`--column` was given {len(self.columns)} times for {len(self.datasets)} `--dataset`; give one for "
                "all or one each."
            )

    @property
    def provenance(self) -> dict[str, list[str]]:
        """Names only, since the places mean nothing elsewhere."""
        return {
            "files": [path.name for path in self.files],
            "datasets": [name for name in self.datasets if not Path(name).exists()],
        }

    def read(self, limit: int | None, seed: int, console: Console) -> list[list[Prompt]]:
        """Prompts of each source."""
        from ..training.prompt_datasets import PromptDataset, read_prompt_dataset
        from ..training.prompts import read_prompt_file

        count = len(self.files) + len(self.datasets)
        domains = _one_each(self.domains, count)
        columns = _one_each(self.columns, len(self.datasets))
        read = [read_prompt_file(path, domain) for path, domain in zip(self.files, domains, strict=False)]
        # Some are left out later because they are too long.
        wanted = None if limit is None else 2 * limit
        for name, column, domain in zip(self.datasets, columns, domains[len(self.files) :], strict=True):
            console.print(f"Reading {name} ...", highlight=False)
            source = PromptDataset(name, self.split, self.subset, column, domain)
            found = read_prompt_dataset(source, wanted, seed)
            if found.skipped:
                console.print(f"Left out, without a prompt: {found.skipped} records of {name}", highlight=False)
            read.append(found.prompts)
        return read


def _one_each(values: list[str], count: int) -> list[str | None]:
    if not values:
        return [None] * count
    return list(values) if len(values) == count else [values[0]] * count


def _drafted_decoder(
    target_model: PreTrainedModel, drafter: Any, batch_size: int, length_policy: LengthPolicy | None
) -> DraftedDecoder:
    from ..training.drafted_decoding import DraftedDecoder

    policy = LengthPolicy.COST_AWARE if length_policy is None else length_policy
    return DraftedDecoder(target_model, drafter, batch_size, policy.value)


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
    decoder: DraftedDecoder | None,
    provenance: dict[str, list[str]],
    console: Console,
) -> None:
    from ..training.trajectories import TrajectoryBatchReport, generate_trajectories
    from .progress_bars import generation_progress

    begin, new_tokens, stored = time.monotonic(), 0, 0
    with generation_progress("Trajectories", console) as progress:
        task = progress.add_task("", total=len(encoded), note="")

        def on_batch(report: TrajectoryBatchReport) -> None:
            nonlocal new_tokens, stored
            new_tokens += report.new_tokens
            stored += report.trajectories if report.was_stored else 0
            note = f"{new_tokens / (time.monotonic() - begin):.0f} tok/s" if new_tokens else ""
            if decoder is not None and decoder.statistics.rounds:
                note += f", tau {decoder.statistics.acceptance_length:.2f}"
            progress.update(task, advance=report.trajectories, note=note)

        ids, domains = zip(*encoded, strict=True)
        generate_trajectories(
            target_model,
            ids,
            domains,
            out,
            settings,
            on_batch,
            decode=None if decoder is None else decoder.decode,
            provenance=provenance,
        )
    if stored:
        console.print(f"{stored} trajectories were there from an earlier run.", highlight=False)
    seconds = time.monotonic() - begin
    console.print(f"{new_tokens} new tokens in {seconds:.0f} s, {new_tokens / seconds:.0f} tok/s", highlight=False)
    if decoder is not None and new_tokens:
        console.print(_describe_drafting(decoder.statistics), highlight=False)


def _describe_drafting(statistics: EngineStats) -> str:
    lengths = ", ".join(f"{length}: {count}" for length, count in statistics.verify_lengths.items())
    return (
        f"tau {statistics.acceptance_length:.2f}, {statistics.accepted_tokens} of {statistics.drafted_tokens} drafts "
        f"accepted; rows verified at a time: {lengths}"
    )


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
