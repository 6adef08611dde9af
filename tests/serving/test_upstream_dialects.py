from __future__ import annotations

from typing import Any

import pytest

from adaflash_hf.serving.upstream_dialects import DIALECTS, without_added


SGLANG, VLLM = DIALECTS["sglang"], DIALECTS["vllm"]


def test_what_is_asked_of_whom() -> None:
    chat = SGLANG.added_to(
        "chat/completions", {"return_spec_tokens_details": True, "return_input_ids_in_sglext": False}
    )
    assert chat == ("return_input_ids_in_sglext", "return_output_ids_in_sglext")
    assert "return_token_ids" in SGLANG.added_to("completions", {})
    assert VLLM.added_to("chat/completions", {}) == ("return_token_ids",)
    assert DIALECTS["other"].added_to("chat/completions", {}) == ()


def test_only_what_was_added_is_taken_out() -> None:
    added = SGLANG.added_to("chat/completions", {"return_output_ids_in_sglext": True})
    fields: dict[str, Any] = {
        "choices": [{"message": {"content": "a"}}],
        "sglext": {"input_ids": [1], "output_ids": [[2]], "spec_tokens_details": {}, "routed_experts": "x"},
    }
    assert without_added(fields, added) == {
        "choices": [{"message": {"content": "a"}}],
        "sglext": {"output_ids": [[2]], "routed_experts": "x"},
    }


@pytest.mark.parametrize(("rest", "stays"), [({}, False), ({"usage": {"prompt_tokens": 1}}, True)])
def test_events_that_hold_nothing_else_are_left_out(rest: dict[str, Any], stays: bool) -> None:
    fields = {"id": "x", "choices": [], "sglext": {"input_ids": [1]}, **rest}
    cleaned = without_added(fields, ("return_input_ids_in_sglext",))
    assert cleaned == ({"id": "x", "choices": [], **rest} if stays else None)


def test_ids_in_and_beside_choices() -> None:
    fields = {"prompt_token_ids": [1], "choices": [{"text": "a", "token_ids": [2], "prompt_token_ids": [1]}]}
    assert without_added(fields, ("return_token_ids",)) == {"choices": [{"text": "a"}]}
