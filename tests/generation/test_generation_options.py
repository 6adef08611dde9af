from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import GenerationConfig

from adaflash_hf.generation.generation_options import option_value, take_stop_strings


def model(**fields: Any) -> Any:
    return SimpleNamespace(generation_config=GenerationConfig(**fields))


@pytest.mark.parametrize(
    ("kwargs", "given", "own", "expected"),
    [
        ({"top_k": 1}, 2, 3, 1),
        ({"top_k": None}, 2, 3, None),
        ({}, 2, 3, 2),
        ({}, None, 3, 3),
    ],
)
def test_arguments_come_first_then_the_configuration_given(
    kwargs: dict[str, Any], given: int | None, own: int, expected: int | None
) -> None:
    config = None if given is None else GenerationConfig(top_k=given)
    assert option_value("top_k", model(top_k=own), config, kwargs) == expected


def test_stop_strings_are_taken_from_wherever_they_are() -> None:
    kwargs: dict[str, Any] = {"stop_strings": ["a"], "max_new_tokens": 3}
    assert take_stop_strings(model(), None, kwargs) == (["a"], None)
    assert kwargs == {"max_new_tokens": 3}

    config = GenerationConfig(stop_strings="b", top_k=4)
    kwargs = {}
    strings, passed_on = take_stop_strings(model(stop_strings="c"), config, kwargs)
    assert strings == "b" and passed_on.stop_strings is None and passed_on.top_k == 4
    assert config.stop_strings == "b"  # it is the user's
    assert kwargs == {"stop_strings": None}  # or the model's own would apply


@pytest.mark.parametrize("kwargs", [{}, {"stop_strings": None}])
def test_without_any_nothing_changes(kwargs: dict[str, Any]) -> None:
    before, config = dict(kwargs), GenerationConfig()
    strings, passed_on = take_stop_strings(model(), config, kwargs)
    assert strings is None and passed_on is config and kwargs == before
