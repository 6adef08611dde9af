"""Bounds of recurrent steps are lifted for as long as anybody needs it, and then what they were."""

from __future__ import annotations

import math

from plain_comparison import exact_target, shared_target

from adaflash_hf.generation.step_bounds import StepBounds


def bounds_of(target) -> set:
    return {module.time_step_limit for module in target.modules() if hasattr(module, "time_step_limit")}


def test_they_are_back_when_the_last_user_is_through() -> None:
    target = exact_target("zamba2")
    before, none = {(0.001, math.inf)}, {(0.0, math.inf)}
    assert bounds_of(target) == before
    first = StepBounds(target)
    with first.lifted():
        second = StepBounds(target)
        other = second.lifted()
        other.__enter__()
        assert bounds_of(target) == none
    assert bounds_of(target) == none
    other.__exit__(None, None, None)
    assert bounds_of(target) == before


def test_an_error_brings_them_back_too() -> None:
    target = exact_target("nemotron_h")
    before = bounds_of(target)
    try:
        with StepBounds(target).lifted():
            raise KeyError
    except KeyError:
        pass
    assert bounds_of(target) == before != {(0.0, math.inf)}


def test_models_without_any() -> None:
    with StepBounds(shared_target()).lifted():
        pass
