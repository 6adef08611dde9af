"""The headline: what `generate()` gains on one prompt at a time, with and without the drafter's part told apart.

Three ways take turns, prompt by prompt, in one process: plain decoding on the model as it was loaded, which is what
users have without this package; plain decoding on rearranged weights; and AdaFlash on those. The text that a README
shows is made of the result here, so that a test can compare the two.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..errors import InvalidInputError
from ..generation.prepacking import unpacked_twin
from .comparison import Comparison, DecodedRun, compare_decoding, decode_once, warm_up
from .pictures import matplotlib_figure, save_pictures
from .result_files import markdown_table


if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from transformers import PreTrainedModel

    from ..modeling_dflash_drafter import DFlashDrafterModel


__all__ = ["headline_table", "headline_text", "measure_speed", "plot_speed", "speed_sections", "summarise_speed"]

_HEADER = (
    "greedy, one prompt at a time",
    "plain `generate()`",
    "prepacked weights alone",
    "AdaFlash",
    "speedup",
    "tau",
)
# What PyTorch calls processors whose bfloat16 products are emulated.
_WITHOUT_BFLOAT16 = ("DEFAULT", "AVX2")


def measure_speed(
    target_model: PreTrainedModel,
    drafter: DFlashDrafterModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    length_policy: str,
    on_prompt: Callable[[Comparison], None] | None = None,
) -> dict[str, Any]:
    """
    Decode every prompt in each of the three ways, greedily, and compare tokens.

    Args:
        target_model (`PreTrainedModel`):
            The target, with its linear layers prepacked if that is to be measured.
        drafter (`DFlashDrafterModel`):
            Its drafter.
        prompts (`Sequence[Sequence[int]]`):
            Token ids of each.
        max_new_tokens (`int`):
            Longest answer.
        length_policy (`str`):
            Of the drafted side.
        on_prompt (`Callable[[Comparison], None]`, *optional*):
            Called after each prompt.

    Returns:
        `dict[str, Any]`: see [`summarise_speed`], and each prompt's comparison under `per_prompt`
    """
    if not prompts:
        raise InvalidInputError("`prompts` is empty; give at least one.")
    inputs = [{"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids)).long()} for ids in prompts]
    drafting = {"length_policy": length_policy}
    greedy: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False}
    as_loaded = unpacked_twin(target_model)
    warm_up(target_model, drafter, inputs[0], drafting_kwargs=drafting, plain_model=as_loaded)
    comparisons, prepacked = [], []
    for prompt in inputs:
        comparison = compare_decoding(
            target_model,
            drafter,
            prompt,
            generate_kwargs=greedy,
            drafting_kwargs=drafting,
            plain_model=as_loaded,
        )
        comparisons.append(comparison)
        prepacked.append(decode_once(target_model, prompt, **greedy))
        if on_prompt is not None:
            on_prompt(comparison)
    per_prompt = [comparison.as_dict() for comparison in comparisons]
    return {**summarise_speed(comparisons, prepacked), "per_prompt": per_prompt}


def summarise_speed(comparisons: Sequence[Comparison], prepacked: Sequence[DecodedRun]) -> dict[str, Any]:
    """
    Medians over prompts; tau pooled over all rounds.

    Args:
        comparisons (`Sequence[Comparison]`):
            Plain as loaded against AdaFlash, one for each prompt.
        prepacked (`Sequence[DecodedRun]`):
            Plain decoding of the same prompts on the rearranged weights.
    """
    stats = [run.stats for comparison in comparisons for run in comparison.adaflash if run.stats is not None]
    rounds = max(sum(one.rounds for one in stats), 1)
    speedups = sorted(comparison.speedup for comparison in comparisons)
    drafting = sorted(c.adaflash_tok_per_s / run.tok_per_s for c, run in zip(comparisons, prepacked, strict=True))
    differences = [c.first_difference for c in comparisons if c.first_difference is not None]
    return {
        "prompts": len(comparisons),
        "plain_tok_per_s": statistics.median(c.plain_tok_per_s for c in comparisons),
        "prepacked_plain_tok_per_s": statistics.median(run.tok_per_s for run in prepacked),
        "adaflash_tok_per_s": statistics.median(c.adaflash_tok_per_s for c in comparisons),
        "speedup_median": statistics.median(speedups),
        "speedup_quartiles": _quartiles(speedups),
        "speedup_over_prepacked_median": statistics.median(drafting),
        "speedup_over_prepacked_quartiles": _quartiles(drafting),
        "acceptance_length": sum(one.committed_tokens for one in stats) / rounds,
        "identical": len(comparisons) - len(differences),
        "near_ties": sum(difference.is_near_tie for difference in differences),
        "draft_ms_per_round": 1000 * sum(one.draft_s for one in stats) / rounds,
        "verify_ms_per_round": 1000 * sum(one.verify_s for one in stats) / rounds,
        "overhead_ms_per_round": 1000 * statistics.median(one.overhead_s / max(one.rounds, 1) for one in stats),
    }


def headline_table(result: Mapping[str, Any]) -> str:
    """
    One row: speeds, speedup and tau.

    Args:
        result (`Mapping[str, Any]`):
            What [`measure_speed`] measured, with `environment`.
    """
    speeds = [f"{result[f'{side}_tok_per_s']:.1f} tok/s" for side in ("plain", "prepacked_plain", "adaflash")]
    cells = [_place(result["environment"]), *speeds]
    cells += [f"{result['speedup_median']:.2f}x", f"{result['acceptance_length']:.2f}"]
    return markdown_table(_HEADER, [cells])


def headline_text(result: Mapping[str, Any]) -> str:
    """
    How it was measured, the spread, and what became of the tokens, as one paragraph.

    Args:
        result (`Mapping[str, Any]`):
            What [`measure_speed`] measured, with `environment` and `settings`.
    """
    environment, settings = result["environment"], result["settings"]
    low, high = result["speedup_quartiles"]
    versions = ", ".join(f"{name} {str(environment[name]).partition('+')[0]}" for name in ("torch", "transformers"))
    return (
        f"Medians over the first {result['prompts']} prompts of {settings['prompts']}, "
        f"{settings['max_new_tokens']} new tokens each, all three in turn in one process, {versions}; half of the "
        f"speedups lie between {low:.2f}x and {high:.2f}x, and drafting alone, against plain decoding on the same "
        f"prepacked weights, gives {result['speedup_over_prepacked_median']:.2f}x. {_agreement(result)}"
    )


def speed_sections(result: Mapping[str, Any]) -> list[str]:
    """
    Paragraphs and tables of the Markdown file: the headline, where a round's time goes, and every prompt.

    Args:
        result (`Mapping[str, Any]`):
            As for [`headline_text`].
    """
    rounds = markdown_table(
        ("a round", "ms"),
        [(name, f"{result[f'{name}_ms_per_round']:.1f}") for name in ("draft", "verify", "overhead")],
    )
    rows = [
        (
            number,
            f"{one['plain_tok_per_s']:.1f}",
            f"{one['adaflash_tok_per_s']:.1f}",
            f"{one['speedup']:.2f}x",
            None if one["acceptance_length"] is None else f"{one['acceptance_length']:.2f}",
            one["new_tokens"],
            _outcome(one["first_difference"]),
        )
        for number, one in enumerate(result["per_prompt"], start=1)
    ]
    header = ("prompt", "plain tok/s", "AdaFlash tok/s", "speedup", "tau", "tokens", "tokens against plain")
    environment = markdown_table(("environment", "value"), result["environment"].items())
    return [headline_table(result), headline_text(result), rounds, markdown_table(header, rows), environment]


def plot_speed(result: Mapping[str, Any], path: str | Path) -> list[Path]:
    """
    Draw the speedup of every prompt over its tau.

    Args:
        result (`Mapping[str, Any]`):
            What [`measure_speed`] measured.
        path (`str` or `Path`):
            Where to, without a suffix.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    figure: Figure = matplotlib_figure()(figsize=(6, 4), layout="constrained")
    panel = figure.subplots()
    known = [one for one in result["per_prompt"] if one["acceptance_length"] is not None]
    panel.scatter([one["acceptance_length"] for one in known], [one["speedup"] for one in known], label="prompts")
    panel.axhline(result["speedup_median"], color="C1", linestyle="--", label="median")
    panel.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
    panel.set(xlabel="tau", ylabel="speedup over plain generate()")
    panel.legend(fontsize="small")
    return save_pictures({"speedup": figure}, path)


def _quartiles(ordered: Sequence[float]) -> list[float]:
    return [ordered[len(ordered) // 4], ordered[(3 * len(ordered)) // 4]]


def _place(environment: Mapping[str, Any]) -> str:
    dtype = str(environment["dtype"]).removeprefix("torch.")
    if environment["device"] != "cpu":
        return f"{dtype}, {environment['device']}"
    capability = str(environment["cpu_capability"])
    emulated = " without bfloat16 instructions" if dtype == "bfloat16" and capability in _WITHOUT_BFLOAT16 else ""
    return f"{dtype}, {environment['threads']} {capability} threads{emulated}"


def _agreement(result: Mapping[str, Any]) -> str:
    gaps = [one["first_difference"]["top_two_gap"] for one in result["per_prompt"] if one["first_difference"]]
    if not gaps:
        return "All answers are those of plain decoding, token for token."
    return (
        f"{len(gaps)} of the {result['prompts']} answers part from plain decoding's at some place, where the two best "
        f"logits lie within {max(gaps):.3g} of each other."
    )


def _outcome(difference: Mapping[str, Any] | None) -> str:
    if difference is None:
        return "identical"
    kind = "near-tie" if difference["is_near_tie"] else "DIFFERENT"
    return f"{kind} at {difference['position']} (gap {difference['top_two_gap']:.2g})"
