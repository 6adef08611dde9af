"""Which loop a call with a drafter is left to. What AdaFlash's loop does with it: see the tests of decoding."""

from __future__ import annotations

from typing import Any

import pytest
from plain_comparison import shared_target
from tiny_models import tiny_drafter

from adaflash_hf import DFlashDrafterModel
from adaflash_hf.generation.drafted_generate import generate_with_drafter
from adaflash_hf.generation.routing import install_routing, original_generate, uninstall_routing


@pytest.fixture(scope="module")
def drafter() -> DFlashDrafterModel:
    return tiny_drafter()


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
