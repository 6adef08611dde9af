"""Plain against AdaFlash decoding of one prompt: run both in turn, time them, and compare their tokens.

Speedup is always against plain `generate()` of the same target, in the same process and dtype, with the two
interleaved. Batches and workloads of many requests are not measured here.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from ..errors import InvalidInputError
from .bench_timing import synchronize


if TYPE_CHECKING:
    from ..generation.statistics import GenerationStats


__all__ = [
    "Comparison",
    "DecodedRun",
    "FirstDifference",
    "Side",
    "TimedTextStreamer",
    "compare_decoding",
    "decode_once",
    "find_first_difference",
    "stats_as_dict",
    "warm_up",
]

Side = Literal["plain", "adaflash"]

# Two evaluation orders of the same sum differ by a few units in the last place of the largest logit: between one row
# at a time and all at once, the gaps of two logits differed by up to 2.5 epsilons (SmolLM2-135M, bfloat16, 488 gaps
# below 2). In float32 that is far below what shape-dependent kernels lose on the way, hence the absolute floor.
_NEAR_TIE_EPSILONS = 4.0
_NEAR_TIE_FLOOR = 1e-3

_WARM_UP_TOKENS = 12


class TimedTextStreamer(TextStreamer):
    """
    Hands finished pieces of text to a callback and counts the seconds this takes.

    `display_s` is subtracted from the time of the run, so that drawing on the terminal is charged to neither side.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            Turns tokens into text.
        on_text (`Callable[[str], None]`):
            Called with each new piece of the response.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, on_text: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.display_s = 0.0
        self._on_text = on_text

    def put(self, value: torch.Tensor) -> None:
        """Take the next tokens, `(1, new_tokens)` or `(new_tokens,)`; the first call brings the prompt."""
        start = time.perf_counter()
        super().put(value)
        self.display_s += time.perf_counter() - start

    def end(self) -> None:
        """Flush what is left."""
        start = time.perf_counter()
        super().end()
        self.display_s += time.perf_counter() - start

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Pass text on instead of printing it."""
        del stream_end
        if text:
            self._on_text(text)


@dataclass(frozen=True)
class DecodedRun:
    """
    One `generate()` call.

    Attributes:
        token_ids: The new tokens, a final EOS included.
        decode_s: Seconds of the whole call, prefill included and display excluded.
        stats: The drafter's statistics; `None` for plain decoding.
    """

    token_ids: tuple[int, ...]
    decode_s: float
    stats: GenerationStats | None = None

    @property
    def tok_per_s(self) -> float:
        """New tokens per second."""
        return len(self.token_ids) / self.decode_s if self.decode_s > 0 else 0.0


@dataclass(frozen=True)
class FirstDifference:
    """
    Where two responses to one prompt part.

    Attributes:
        position: Index among the new tokens.
        plain_token_id: What plain decoding said there; `None` if it had ended.
        adaflash_token_id: What AdaFlash said there; `None` if it had ended.
        top_two_gap: Difference of the target's two largest logits there, from a forward over the common prefix.
        is_near_tie: Whether both tokens are as close to the best as the target's dtype rounds.
    """

    position: int
    plain_token_id: int | None
    adaflash_token_id: int | None
    top_two_gap: float
    is_near_tie: bool


@dataclass(frozen=True)
class Comparison:
    """
    Plain and AdaFlash decoding of one prompt.

    Attributes:
        plain: The plain runs, in order.
        adaflash: The AdaFlash runs, in order.
        sampled: Whether tokens were drawn at random, which makes the two responses different by nature.
        first_difference: Where the responses part; `None` if they are identical or sampled.
    """

    plain: tuple[DecodedRun, ...]
    adaflash: tuple[DecodedRun, ...]
    sampled: bool = False
    first_difference: FirstDifference | None = field(default=None)

    @property
    def plain_tok_per_s(self) -> float:
        """Median over the plain runs."""
        return statistics.median(run.tok_per_s for run in self.plain)

    @property
    def adaflash_tok_per_s(self) -> float:
        """Median over the AdaFlash runs."""
        return statistics.median(run.tok_per_s for run in self.adaflash)

    @property
    def speedup(self) -> float:
        """AdaFlash's tokens per second over plain decoding's."""
        return self.adaflash_tok_per_s / self.plain_tok_per_s if self.plain_tok_per_s else 0.0

    @property
    def acceptance_length(self) -> float | None:
        """Tau of the first AdaFlash run: tokens committed per verification, bonus included."""
        stats = self.adaflash[0].stats
        return stats.acceptance_length if stats is not None else None

    def as_dict(self) -> dict[str, Any]:
        """What `adaflash generate --compare --json` prints."""
        difference = self.first_difference
        return {
            "plain_tok_per_s": self.plain_tok_per_s,
            "adaflash_tok_per_s": self.adaflash_tok_per_s,
            "speedup": self.speedup,
            "acceptance_length": self.acceptance_length,
            "new_tokens": len(self.adaflash[0].token_ids),
            "identical": None if self.sampled else difference is None,
            "first_difference": None if difference is None else vars(difference),
        }


def decode_once(
    target_model: PreTrainedModel,
    inputs: Mapping[str, torch.Tensor],
    *,
    drafter: Any | None = None,
    streamer: TimedTextStreamer | None = None,
    **generate_kwargs: Any,
) -> DecodedRun:
    """
    Call `generate()` once and time it.

    Args:
        target_model (`PreTrainedModel`):
            The target.
        inputs (`Mapping[str, torch.Tensor]`):
            `input_ids` and `attention_mask` of shape `(1, prompt_tokens)`, on any device.
        drafter (`DFlashDrafterModel`, *optional*):
            Drafts if given; without it decoding is plain.
        streamer (`TimedTextStreamer`, *optional*):
            Receives the tokens as they come; its own time is not counted.
        **generate_kwargs:
            Passed to `generate()`.
    """
    prompt_ids = inputs["input_ids"]
    if prompt_ids.dim() != 2 or prompt_ids.shape[0] != 1:
        raise InvalidInputError(f"`input_ids` has shape {tuple(prompt_ids.shape)}; pass one prompt, (1, tokens).")
    if drafter is not None:
        generate_kwargs["assistant_model"] = drafter
    if streamer is not None:
        generate_kwargs["streamer"] = streamer
    on_device = {name: tensor.to(target_model.device) for name, tensor in inputs.items()}
    synchronize(target_model.device)
    start = time.perf_counter()
    output_ids = target_model.generate(**on_device, **generate_kwargs)
    synchronize(target_model.device)
    decode_s = time.perf_counter() - start - (streamer.display_s if streamer is not None else 0.0)
    return DecodedRun(
        token_ids=tuple(output_ids[0, prompt_ids.shape[1] :].tolist()),
        decode_s=decode_s,
        stats=drafter.last_generation_stats if drafter is not None else None,
    )


def compare_decoding(
    target_model: PreTrainedModel,
    drafter: Any,
    inputs: Mapping[str, torch.Tensor],
    *,
    generate_kwargs: Mapping[str, Any],
    drafting_kwargs: Mapping[str, Any] | None = None,
    plain_model: PreTrainedModel | None = None,
    repeats: int = 1,
    seed: int | None = None,
    make_streamer: Callable[[Side], TimedTextStreamer | None] | None = None,
    on_run: Callable[[Side, DecodedRun], None] | None = None,
) -> Comparison:
    """
    Decode one prompt both ways, in turn, and compare.

    Args:
        target_model (`PreTrainedModel`):
            The target.
        drafter (`DFlashDrafterModel`):
            The drafter.
        inputs (`Mapping[str, torch.Tensor]`):
            `input_ids` and `attention_mask` of shape `(1, prompt_tokens)`.
        generate_kwargs (`Mapping[str, Any]`):
            Passed to both calls of `generate()`.
        drafting_kwargs (`Mapping[str, Any]`, *optional*):
            Passed to the call with the drafter only (`length_policy`, `draft_proposal`).
        plain_model (`PreTrainedModel`, *optional*):
            Decodes the plain side: the same model without prepacked weights. `target_model` itself by default.
        repeats (`int`, *optional*, defaults to 1):
            How many times each side runs; which side goes first alternates.
        seed (`int`, *optional*):
            Set before every run, for sampling.
        make_streamer (`Callable`, *optional*):
            Gives the streamer of a side; only the first repeat is streamed.
        on_run (`Callable`, *optional*):
            Called after each run.
    """
    if repeats < 1:
        raise InvalidInputError(f"`repeats` is {repeats}; it must be at least 1.")
    models: dict[Side, PreTrainedModel] = {"plain": plain_model or target_model, "adaflash": target_model}
    runs: dict[Side, list[DecodedRun]] = {"plain": [], "adaflash": []}
    order: tuple[Side, Side] = ("plain", "adaflash")
    for repeat in range(repeats):
        # What runs second finds warmer caches, so the sides take turns.
        for side in order if repeat % 2 == 0 else reversed(order):
            if seed is not None:
                torch.manual_seed(seed)
            extra = dict(drafting_kwargs or {}) if side == "adaflash" else {}
            run = decode_once(
                models[side],
                inputs,
                drafter=drafter if side == "adaflash" else None,
                streamer=make_streamer(side) if make_streamer is not None and repeat == 0 else None,
                **generate_kwargs,
                **extra,
            )
            runs[side].append(run)
            if on_run is not None:
                on_run(side, run)
    sampled = bool(generate_kwargs.get("do_sample", False))
    difference = None
    if not sampled:
        difference = find_first_difference(
            target_model, inputs["input_ids"], runs["plain"][0].token_ids, runs["adaflash"][0].token_ids
        )
    return Comparison(tuple(runs["plain"]), tuple(runs["adaflash"]), sampled, difference)


def warm_up(
    target_model: PreTrainedModel,
    drafter: Any,
    inputs: Mapping[str, torch.Tensor],
    *,
    drafting_kwargs: Mapping[str, Any] | None = None,
    plain_model: PreTrainedModel | None = None,
) -> tuple[DecodedRun, DecodedRun]:
    """
    Run both sides briefly, so that first-call costs (kernel selection, allocations) are charged to neither.

    Args:
        target_model (`PreTrainedModel`):
            The target.
        drafter (`DFlashDrafterModel`):
            The drafter.
        inputs (`Mapping[str, torch.Tensor]`):
            `input_ids` and `attention_mask` of shape `(1, prompt_tokens)`.
        drafting_kwargs (`Mapping[str, Any]`, *optional*):
            Passed to the call with the drafter only.
        plain_model (`PreTrainedModel`, *optional*):
            Decodes the plain side; `target_model` by default.

    Returns:
        `tuple[DecodedRun, DecodedRun]`: the second run of each, plain first, from which speed can be estimated.
    """
    generate_kwargs: dict[str, Any] = {"max_new_tokens": _WARM_UP_TOKENS, "do_sample": False}
    for _ in range(2):
        plain = decode_once(plain_model or target_model, inputs, **generate_kwargs)
        adaflash = decode_once(target_model, inputs, drafter=drafter, **generate_kwargs, **dict(drafting_kwargs or {}))
    return plain, adaflash


@torch.no_grad()
def find_first_difference(
    target_model: PreTrainedModel,
    prompt_ids: torch.Tensor,
    plain_ids: tuple[int, ...],
    adaflash_ids: tuple[int, ...],
) -> FirstDifference | None:
    """
    Where two greedy responses part, and how close the target's two best tokens were there.

    Args:
        target_model (`PreTrainedModel`):
            The target; it runs once over the prompt and the common prefix, without a cache.
        prompt_ids (`torch.Tensor`):
            The prompt, shape `(1, prompt_tokens)`.
        plain_ids (`tuple[int, ...]`):
            New tokens of plain decoding.
        adaflash_ids (`tuple[int, ...]`):
            New tokens of AdaFlash.

    Returns:
        `FirstDifference` or `None`: `None` if the two are the same.
    """
    if plain_ids == adaflash_ids:
        return None
    shorter = min(len(plain_ids), len(adaflash_ids))
    position = next((i for i in range(shorter) if plain_ids[i] != adaflash_ids[i]), shorter)
    plain_token_id = plain_ids[position] if position < len(plain_ids) else None
    adaflash_token_id = adaflash_ids[position] if position < len(adaflash_ids) else None

    prefix = torch.cat([prompt_ids.to("cpu"), torch.tensor([plain_ids[:position]], dtype=prompt_ids.dtype)], dim=1)
    # A last-position head keeps a long prefix from making prefix x vocabulary logits.
    logits = target_model(input_ids=prefix.to(target_model.device), use_cache=False, logits_to_keep=1).logits[0, -1]
    logits = logits.float()
    top_logits = logits.topk(2).values
    rounding = _NEAR_TIE_EPSILONS * torch.finfo(target_model.dtype).eps * top_logits[0].abs().item()
    said = [token for token in (plain_token_id, adaflash_token_id) if token is not None]
    # Of the best rather than of each other: three can be level in sixteen bits.
    behind = (top_logits[0] - logits[said].min()).item()
    return FirstDifference(
        position=position,
        plain_token_id=plain_token_id,
        adaflash_token_id=adaflash_token_id,
        top_two_gap=(top_logits[0] - top_logits[1]).item(),
        is_near_tie=len(said) == 2 and behind <= max(rounding, _NEAR_TIE_FLOOR),
    )


def stats_as_dict(stats: GenerationStats) -> dict[str, Any]:
    """All counters of a run and the ratios made of them, for JSON."""
    return {**vars(stats), "acceptance_length": stats.acceptance_length, "overhead_s": stats.overhead_s}
