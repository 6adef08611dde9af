"""`adaflash demo`: a few real prompts, plain and AdaFlash side by side, and one table."""

from __future__ import annotations

from typing import Annotated

import typer

from .options import (
    Baseline,
    BaselineOption,
    DeviceOption,
    DrafterOption,
    DraftProposalOption,
    Dtype,
    DtypeOption,
    LengthPolicyOption,
    PrepackOption,
    TargetOption,
    VerboseOption,
    drafting_kwargs,
)


__all__ = ["demo"]


def demo(
    target: TargetOption = "smollm2-135m",
    drafter: DrafterOption = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Longest response, in tokens.")] = 128,
    time_budget: Annotated[
        float,
        typer.Option("--time-budget", min=1.0, help="Seconds for all responses; a slow machine makes them shorter."),
    ] = 110.0,
    # Where two logits are level in sixteen bits either may win, and a demonstration is to show the same tokens.
    dtype: DtypeOption = Dtype.FLOAT32,
    device: DeviceOption = None,
    length_policy: LengthPolicyOption = None,
    draft_proposal: DraftProposalOption = None,
    prepack: PrepackOption = True,
    baseline: BaselineOption = Baseline.LOADED,
    verbose: VerboseOption = False,
) -> None:
    """Decode six maths, code and chat prompts plainly and with AdaFlash, side by side, and compare."""
    from rich.console import Console

    from ..evaluation.demo import run_demo
    from ..evaluation.prompts import load_demo_prompts
    from .loading import find_baseline, load_models

    console = Console()
    models = load_models(target, drafter, dtype.value, device, prepack, console, length_policy)
    run_demo(
        models.target_model,
        models.tokenizer,
        models.drafter,
        load_demo_prompts(),
        console=console,
        max_new_tokens=max_new_tokens,
        time_budget_s=time_budget,
        drafting_kwargs=drafting_kwargs(length_policy, draft_proposal, is_greedy=True),
        plain_model=find_baseline(models.target_model, baseline.value, console),
        verbose=verbose,
    )
