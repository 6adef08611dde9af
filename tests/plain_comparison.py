"""Runs the same `generate()` call with and without a drafter: whatever plain decoding says is the right answer."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from oracle_drafter import OracleDrafter, give_head_unit_rows, oracle_drafter
from tiny_models import tiny_target
from torch import nn
from transformers import PreTrainedModel
from transformers.generation.utils import GenerateDecoderOnlyOutput


# transformers 5.24 renamed the cache argument and the field that returns it.
CACHE_NAME = "cache" if "cache" in GenerateDecoderOnlyOutput.__dataclass_fields__ else "past_key_values"
PROMPT_LENGTHS = (7, 3, 11, 5)
# Float32 on both sides; a block of rows sums in another order than one row.
TOLERANCE = {"rtol": 1e-4, "atol": 2e-4}

Inputs = dict[str, torch.Tensor] | torch.Tensor


def prompt(length: int = 9, seed: int = 0, vocab_size: int = 96) -> torch.Tensor:
    """Random prompt ids of shape `(1, length)`, special ids avoided."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(5, vocab_size, (1, length), generator=generator)


def ragged_batch(lengths: tuple[int, ...] = PROMPT_LENGTHS, vocab_size: int = 96) -> dict[str, torch.Tensor]:
    """Left-padded prompts of these lengths: `input_ids` and `attention_mask`."""
    longest = max(lengths)
    input_ids = torch.zeros(len(lengths), longest, dtype=torch.long)
    attention_mask = torch.zeros_like(input_ids)
    for row, length in enumerate(lengths):
        input_ids[row, longest - length :] = prompt(length, seed=row + 1, vocab_size=vocab_size)
        attention_mask[row, longest - length :] = 1
    return {"input_ids": input_ids, "attention_mask": attention_mask}


# One prompt, and prompts of different lengths: most of what follows holds for both.
BATCHES: dict[str, Callable[[], Inputs]] = {"one": prompt, "ragged": ragged_batch}


def exact_target(architecture: str = "qwen3", **overrides: Any) -> PreTrainedModel:
    """A tiny target whose answers an oracle can draft."""
    # Tied unit rows would make a model that repeats its last token for ever.
    return give_head_unit_rows(tiny_target(architecture, **{"tie_word_embeddings": False, **overrides}))


@cache
def shared_target(architecture: str = "qwen3") -> PreTrainedModel:
    """The same `exact_target` for every test that leaves it as it is."""
    return exact_target(architecture)


def generate(target: PreTrainedModel, inputs: Inputs, **kwargs: Any) -> Any:
    """`target.generate()`, greedy unless asked otherwise."""
    kwargs = {"do_sample": False, **kwargs}
    return (
        target.generate(inputs, **kwargs) if isinstance(inputs, torch.Tensor) else target.generate(**inputs, **kwargs)
    )


def without_padding(sequences: torch.Tensor, inputs: Inputs) -> list[list[int]]:
    """The rows of `sequences` without the prompt's left padding."""
    if isinstance(inputs, torch.Tensor) or "attention_mask" not in inputs:
        return sequences.tolist()
    padding = (inputs["attention_mask"] == 0).sum(dim=1).tolist()
    repeats = len(sequences) // len(padding)
    return [row.tolist()[padding[index // repeats] :] for index, row in enumerate(sequences)]


def oracle_for(target: PreTrainedModel, inputs: Inputs, answer: torch.Tensor, **overrides: Any) -> OracleDrafter:
    """An oracle that knows `answer`, the ids `generate()` returned for `inputs`, and errs at every fifth position."""
    overrides.setdefault("wrong_every", 5)
    return oracle_drafter(target, without_padding(answer, inputs), **overrides)


def assert_same_as_plain(
    target: PreTrainedModel,
    inputs: Inputs,
    drafter: nn.Module | None = None,
    fresh: Callable[[], dict[str, Any]] = dict,
    drafting: dict[str, Any] | None = None,
    **kwargs: Any,
) -> OracleDrafter:
    """Generates with and without a drafter and compares everything that is returned.

    Args:
        target (`PreTrainedModel`): The target.
        inputs (`dict` or `torch.Tensor`): Prompts.
        drafter (`nn.Module`, *optional*): The drafter; by default an oracle of the plain answer.
        fresh (`Callable`): Makes arguments that remember something, anew for each of the two calls.
        drafting (`dict`, *optional*): Arguments of `generate()` that exist only with a drafter.
        kwargs (`dict`): Arguments of both calls.

    Returns:
        `OracleDrafter`: The drafter that was used, with its statistics and calls.
    """
    expected = generate(target, inputs, **kwargs, **fresh())
    sequences = expected if isinstance(expected, torch.Tensor) else expected.sequences
    drafter = oracle_for(target, inputs, sequences) if drafter is None else drafter
    actual = generate(target, inputs, assistant_model=drafter, **kwargs, **fresh(), **(drafting or {}))
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    else:
        assert_same_output(actual, expected)
    return drafter  # type: ignore[return-value]


def assert_same_output(actual: GenerateDecoderOnlyOutput, expected: GenerateDecoderOnlyOutput) -> None:
    """Compares dictionary outputs: ids exactly, the rest up to rounding. The cache is for the caller to test.

    Of rows that ended early, steps after the end are left out: plain decoding goes on computing something there.
    """
    torch.testing.assert_close(actual.sequences, expected.sequences, rtol=0, atol=0)
    for name in ("scores", "logits", "hidden_states", "attentions"):
        theirs, ours = getattr(expected, name), getattr(actual, name)
        assert (theirs is None) == (ours is None), name
        if theirs is None:
            continue
        assert len(ours) == len(theirs)
        for row, padding in enumerate(_trailing_padding(expected.sequences)):
            steps = len(theirs) - padding
            torch.testing.assert_close(
                _row_of(ours[:steps], row),
                _row_of(theirs[:steps], row),
                **TOLERANCE,
                msg=lambda text, name=name, row=row: f"{name} of row {row}: {text}",
            )


def _trailing_padding(sequences: torch.Tensor) -> list[int]:
    """Number of padding ids at the end of each row."""
    return [int((row.flip(0) != 0).long().argmax()) for row in sequences]


def _row_of(steps: Any, row: int) -> Any:
    """One row of nested tuples of tensors."""
    return steps[row] if isinstance(steps, torch.Tensor) else tuple(_row_of(step, row) for step in steps)


def rows_per_forward(model: nn.Module) -> list[int]:
    """A list that grows by the number of query rows of each forward pass from now on; `model` must not be shared."""
    rows: list[int] = []

    def record(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        source = args[0] if args else kwargs.get("input_ids")
        rows.append((kwargs["inputs_embeds"] if source is None else source).shape[1])

    model.register_forward_pre_hook(record, with_kwargs=True)
    return rows
