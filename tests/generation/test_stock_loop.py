"""Calls that transformers' own DFlash loop answers as plain decoding does go there; the others are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plain_comparison import CACHE_NAME, exact_target, generate, prompt, shared_target
from tiny_models import tiny_drafter
from transformers import DynamicCache, GenerationConfig, StaticCache

from adaflash_hf import DFlashDrafterModel
from adaflash_hf.errors import DrafterCompatibilityError, InvalidInputError, UnsupportedGenerationError
from adaflash_hf.generation.stock_loop import is_left_to_stock_loop


@pytest.fixture(scope="module")
def drafter() -> DFlashDrafterModel:
    return tiny_drafter(shared_target())


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        ((), {}, False),
        ((), {"speculation_type": "dflash"}, True),
        ((), {"speculation_type": "adaflash"}, False),
        ((), {"generation_config": GenerationConfig(speculation_type="dflash")}, True),
        ((None, GenerationConfig(speculation_type="dflash")), {}, True),
        ((None, GenerationConfig(speculation_type="dflash")), {"speculation_type": "adaflash"}, False),
    ],
)
def test_stock_loop_is_asked_for(
    args: tuple[Any, ...], kwargs: dict[str, Any], expected: bool, drafter: DFlashDrafterModel
) -> None:
    assert is_left_to_stock_loop(shared_target(), drafter, args, kwargs) is expected


def test_stock_loop_would_misread_the_rows() -> None:
    drafter = tiny_drafter(block_layout="anchor_first")
    with pytest.raises(InvalidInputError, match="'anchor_first'"):
        is_left_to_stock_loop(shared_target(), drafter, (), {"speculation_type": "dflash"})


def prefilled(tokens: int) -> DynamicCache:
    target, cache = shared_target(), DynamicCache(config=shared_target().config)
    with torch.no_grad():
        target(prompt()[:, :tokens], **{CACHE_NAME: cache})
    return cache


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (lambda: {CACHE_NAME: prefilled(4)}, r"with a cache that holds tokens already \(4 here\)"),
        (lambda: {CACHE_NAME: StaticCache(config=shared_target().config, max_cache_len=64)}, "static cache"),
        (lambda: {"cache_implementation": "static"}, "static cache"),
        (lambda: {"use_cache": False}, "`use_cache` is False"),
        (lambda: {"guidance_scale": 1.5}, "`guidance_scale` 1.5"),
        (lambda: {"inputs_embeds": shared_target().get_input_embeddings()(prompt())}, "`inputs_embeds`"),
        (lambda: {"output_hidden_states": True, "return_dict_in_generate": True}, "`output_hidden_states` asks for"),
        (lambda: {"output_attentions": True, "return_dict_in_generate": True}, "`output_attentions` asks for"),
    ],
)
def test_what_it_gets_wrong_is_refused(options: Any, message: str, drafter: DFlashDrafterModel) -> None:
    with pytest.raises(UnsupportedGenerationError, match=f"{message}.* Leave `speculation_type` out"):
        generate(
            shared_target(),
            prompt(),
            assistant_model=drafter,
            speculation_type="dflash",
            max_new_tokens=9,
            **options(),
        )


@pytest.mark.parametrize(
    "options",
    [
        dict,
        lambda: {CACHE_NAME: DynamicCache(config=shared_target().config)},
        lambda: {"repetition_penalty": 1.5, "output_scores": True, "return_dict_in_generate": True},
    ],
)
def test_what_it_gets_right_goes_there(options: Any, drafter: DFlashDrafterModel) -> None:
    plain, own = (
        generate(shared_target(), prompt(), max_new_tokens=9, **options(), **extra)
        for extra in ({}, {"assistant_model": drafter, "speculation_type": "dflash"})
    )
    if not isinstance(plain, torch.Tensor):
        plain, own = plain.sequences, own.sequences
    assert own.equal(plain)


def test_a_drafter_of_another_target_is_refused() -> None:
    other = tiny_drafter(exact_target(vocab_size=120))
    with pytest.raises(DrafterCompatibilityError, match="`vocab_size` is 120"):
        generate(shared_target(), prompt(), assistant_model=other, speculation_type="dflash", max_new_tokens=9)
