"""`adaflash prompts`: the target writes user prompts itself, for `adaflash trajectories`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .options import DeviceOption, Dtype, DtypeOption, PrepackOption, TargetOption


if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..training.prompt_synthesis import SynthesisReport, SynthesisSettings


__all__ = ["prompts"]


def prompts(
    out: Annotated[Path, typer.Option("--out", help="JSON-lines file; prompts are added to what it holds.",
                                      dir_okay=False)],
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="Prompts of the domain the file shall hold.")],
    target: TargetOption = "smollm2-135m",
    domain: Annotated[str, typer.Option("--domain", help="Label of the prompts.")] = "chat",
    prefix: Annotated[
        list[str] | None,
        typer.Option("--prefix", help='Beginning of the user\'s turn, such as "def " for code; several times for '
                     "several, used in turn."),
    ] = None,
    temperature: Annotated[float, typer.Option("--temperature", help="Of the sampling; above 0.")] = 0.8,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Longer turns are dropped.")] = 70,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Turns sampled at once.")] = 96,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Decides what is sampled.")] = 0,
    prepack: PrepackOption = True,
    dtype: DtypeOption = Dtype.AUTO,
    device: DeviceOption = None,
) -> None:  # fmt: skip
    """Let the target write user prompts itself: no data set needed. A killed run continues when repeated."""
    from rich.console import Console

    from ..embedded_target import load_target
    from ..generation.prepacking import settle_prepacking
    from ..training.prompt_synthesis import SynthesisSettings, check_prompts_can_be_added

    settings = SynthesisSettings(
        count=count,
        domain=domain,
        prefixes=tuple(prefix or [""]),
        temperature=temperature,
        max_new_tokens=max_tokens,
        batch_size=batch_size,
        seed=seed,
    )
    check_prompts_can_be_added(out)
    console = Console()
    target_model, tokenizer = load_target(
        target,
        dtype.value,
        device=device,
        on_progress=lambda text: console.print(f"{text} ...", highlight=False, markup=False),
    )
    settle_prepacking(target_model, prepack)
    report = _synthesize(target_model, tokenizer, out, settings, console)
    reasons = ", ".join(f"{number} {reason}" for reason, number in report.dropped.most_common()) or "none"
    console.print(
        f"{report.held} prompts of the domain {domain} are in {out}; {report.drawn} turns sampled in this run, "
        f"dropped: {reasons}.",
        highlight=False,
        markup=False,
    )


def _synthesize(
    target_model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    out: Path,
    settings: SynthesisSettings,
    console: Console,
) -> SynthesisReport:
    from ..training.prompt_synthesis import synthesize_prompts
    from .progress_bars import generation_progress

    with generation_progress("Prompts", console) as progress:
        task = progress.add_task("", total=settings.count, note="")

        def on_batch(report: SynthesisReport) -> None:
            dropped = sum(report.dropped.values())
            note = f"{dropped / report.drawn:.0%} dropped" if report.drawn else ""
            progress.update(task, completed=min(report.held, settings.count), note=note)

        return synthesize_prompts(target_model, tokenizer, out, settings, on_batch)
