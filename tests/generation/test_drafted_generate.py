"""Which loop a call with a drafter is left to. What AdaFlash's loop does with it: see the tests of decoding."""

from __future__ import annotations

from typing import Any

import pytest
from plain_comparison import shared_target
from tiny_models import tiny_drafter
from transformers import GenerationConfig

from adaflash_hf import DFlashDrafterModel, InvalidInputError
from adaflash_hf.generation.drafted_generate import generate_with_drafter, is_left_to_stock_loop
from adaflash_hf.generation.routing import install_routing, original_generate, uninstall_routing


@pytest.fixture(scope="module")
def drafter() -> DFlashDrafterModel:
    return tiny_drafter()


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


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"draft_proposal": "greedy"}, "`draft_proposal` is 'greedy'"),
        ({"speculation_type": "eagle"}, "`speculation_type` is 'eagle'"),
        ({"token_healing": True}, "`token_healing` is on"),
        ({"custom_generate": "dola"}, "`custom_generate` and a DFlash drafter"),
    ],
)
def test_refused_before_the_first_token(kwargs: dict[str, Any], message: str, drafter: DFlashDrafterModel) -> None:
    with pytest.raises(ValueError, match=message):
        generate_with_drafter(shared_target(), assistant_model=drafter, **kwargs)


def test_original_is_the_same_with_and_without_routing() -> None:
    routed = original_generate()
    uninstall_routing()
    try:
        assert original_generate() is routed
    finally:
        install_routing()
