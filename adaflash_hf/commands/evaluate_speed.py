"""`adaflash evaluate speed`: the headline of the README, measured on one prompt at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .bench_options import DataDirOption, MaxNewTokensOption
from .options import DeviceOption, DrafterOption, Dtype, DtypeOption, LengthPolicy, PrepackOption, TargetOption


if TYPE_CHECKING:
    from rich.console import Console

    from ..training.prompts import Prompt
    from .loading import LoadedModels


__all__ = ["run_speed", "speed"]

WorkloadOption = Annotated[
    str, typer.Option("--workload", "-w", help="Name, file of prompts or Hub data set; see adaflash evaluate list.")
]
LimitOption = Annotated[int, typer.Option("--limit", min=1, help="Prompts, the first ones.")]
PolicyOption = Annotated[
    LengthPolicy, typer.Option("--length-policy", help="What decides how much of a draft is verified.")
]


def speed(
    workload: WorkloadOption = "gsm8k",
    limit: LimitOption = 12,
    max_new_tokens: MaxNewTokensOption = 80,
    length_policy: PolicyOption = LengthPolicy.COST_AWARE,
    target: TargetOption = "smollm2-135m",
    drafter: DrafterOption = None,
    dtype: DtypeOption = Dtype.AUTO,
    device: DeviceOption = None,
    prepack: PrepackOption = True,
    data_dir: DataDirOption = None,
    out: Path = Path("speed"),
) -> None:
    """Plain `generate()`, prepacked weights alone, and AdaFlash, in turn on one prompt at a time."""
    from rich.console import Console

    from ..evaluation.result_files import write_results
    from ..evaluation.speed import speed_sections
    from ..evaluation.workloads import load_workload
    from .loading import load_models

    console = Console(stderr=True)
    prompts = load_workload(workload, data_dir).prompts[:limit]
    result = run_speed(
        workload if not Path(workload).exists() else Path(workload).name,
        prompts,
        load_models(target, drafter, dtype.value, device, prepack, console, length_policy),
        max_new_tokens=max_new_tokens,
        length_policy=length_policy.value,
        console=console,
    )
    sections = speed_sections(result)
    # First on the terminal: the disk may be full by now.
    Console().print("\n\n".join(sections[:3]), highlight=False, markup=False, soft_wrap=True)
    write_results(out, result, "Speed of one request at a time", sections)


def run_speed(
    source: str,
    prompts: Sequence[Prompt],
    models: LoadedModels,
    *,
    max_new_tokens: int,
    length_policy: str,
    console: Console,
) -> dict[str, Any]:
    """
    Measure, and say with what.

    Args:
        source (`str`):
            Where the prompts come from, as results name it.
        prompts (`Sequence[Prompt]`):
            What to ask.
        models (`LoadedModels`):
            Target, tokenizer and drafter, with prepacked layers if those are to be measured.
        max_new_tokens (`int`):
            Longest answer.
        length_policy (`str`):
            Of the drafted side.
        console (`rich.console.Console`):
            Where progress is shown.

    Returns:
        `dict[str, Any]`: of [`measure_speed`], after `environment` and `settings`
    """
    from rich.progress import Progress

    from ..evaluation.bench import describe_environment
    from ..evaluation.speed import measure_speed
    from ..generation.prepacking import has_prepacked_layers
    from ..training.prompts import encode_prompts

    is_prepacked = has_prepacked_layers(models.target_model)
    with Progress(console=console) as progress:
        task = progress.add_task("Decoding", total=len(prompts))
        measured = measure_speed(
            models.target_model,
            models.drafter,
            encode_prompts(models.tokenizer, prompts),
            max_new_tokens=max_new_tokens,
            length_policy=length_policy,
            on_prompt=lambda comparison: progress.advance(task),
        )
    settings = {
        "prompts": source,
        "limit": len(prompts),
        "max_new_tokens": max_new_tokens,
        "length_policy": length_policy,
    }
    environment = describe_environment(models.target_model, models.drafter, prepacked=is_prepacked)
    return {"environment": environment, "settings": settings, **measured}
