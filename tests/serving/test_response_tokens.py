from __future__ import annotations

from typing import Any

import pytest
from stand_ins import byte_tokenizer

from adaflash_hf.online.recorded_trajectory import RecordedTrajectory
from adaflash_hf.serving.observed_response import ObservedResponse
from adaflash_hf.serving.response_tokens import ResponseTokens


TOKENIZER = byte_tokenizer()
MESSAGES = [{"role": "user", "content": "hi"}]


def ids_of(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def answered(
    text: str = "fine", body: dict[str, Any] | None = None, usage: dict[str, int] | None = None, **choice: Any
) -> ObservedResponse:
    """An answer to a chat of one message, without ids."""
    seen = ObservedResponse("chat/completions", {"messages": MESSAGES, **(body or {})}, "small talk")
    message = {"content": text, **choice.pop("message", {})}
    seen.add({"id": "x", "choices": [{"index": 0, "finish_reason": "stop", "message": message, **choice}]})
    seen.add({"usage": usage} if usage else {})
    return seen


def made(
    seen: ObservedResponse, tokens: ResponseTokens | None = None
) -> tuple[RecordedTrajectory | None, dict[str, int]]:
    tokens = tokens or ResponseTokens(TOKENIZER)
    return tokens.trajectory(seen, 0), tokens.counts


def response_of(trajectory: RecordedTrajectory | None) -> list[int]:
    assert trajectory is not None
    return trajectory.token_ids[trajectory.prompt_length :].tolist()


def test_text_is_tokenized_with_template_and_end() -> None:
    trajectory, counts = made(answered())
    assert trajectory is not None and counts == {"text": 1}
    assert TOKENIZER.decode(trajectory.token_ids[: trajectory.prompt_length]) == "<|user|>hi<|assistant|>"
    assert response_of(trajectory) == [*ids_of("fine"), TOKENIZER.eos_token_id]
    assert (trajectory.domain, trajectory.request_id, trajectory.finished) == ("small talk", "x/0", True)


@pytest.mark.parametrize(
    ("fields", "final"),
    [
        ({"finish_reason": "length"}, []),
        ({"matched_stop": 77}, [77]),
        ({"matched_stop": "###"}, []),
        ({"body": {"stop": ["###"]}}, []),  # which of both ended it nobody says
        ({"body": {"stop": ["###"]}, "usage": {"completion_tokens": 5}}, [2]),
        ({"body": {"stop": ["###"]}, "usage": {"completion_tokens": 4}}, []),
    ],
)
def test_the_token_that_ended_it(fields: dict[str, Any], final: list[int]) -> None:
    trajectory, _ = made(answered(**fields))
    assert response_of(trajectory) == [*ids_of("fine"), *final]
    assert trajectory is not None
    assert trajectory.finished == (fields.get("finish_reason") != "length")


@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        (answered(usage={"completion_tokens": 3}), "no_round_trip"),
        (answered(usage={"prompt_tokens": 99}), "prompt_differs"),
        (answered(finish_reason=None), "broken_off"),
        (answered(message={"reasoning_content": "hm"}), "reshaped"),
        (answered(body={"echo": True}), "reshaped"),
        (answered(body={"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}), "no_text"),
        (answered(body={"messages": [{"content": "of no role"}]}), "no_template"),
    ],
)
def test_what_is_not_sure_is_dropped_and_counted(seen: ObservedResponse, reason: str) -> None:
    assert made(seen) == (None, {reason: 1})


def test_text_that_does_not_become_itself() -> None:
    class Lossy:
        """Forgets capital letters, as some tokenizers do."""

        def __getattr__(self, name: str) -> Any:
            return getattr(TOKENIZER, name)

        def __call__(self, text: str, **kwargs: Any) -> Any:
            return TOKENIZER(text.lower(), **kwargs)

    tokens = ResponseTokens(Lossy())  # type: ignore[arg-type]
    assert made(answered("fine"), tokens)[0] is not None
    assert made(answered("Fine"), tokens)[0] is None
    assert tokens.counts == {"text": 1, "no_round_trip": 1}


def test_parts_of_text_are_one_text() -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    first, second = (made(answered(body=b))[0] for b in ({"messages": [{"role": "user", "content": parts}]}, {}))
    assert first is not None and second is not None
    assert first.token_ids.tolist() == second.token_ids.tolist()


def test_ids_of_the_server_need_no_tokenizer_and_no_end() -> None:
    seen = answered(finish_reason=None, message={"tool_calls": [{"id": "f"}]})
    seen.add({"sglext": {"input_ids": [5, 6], "output_ids": [[7, 8]], "spec_tokens_details": {}}})
    trajectory, counts = made(seen, ResponseTokens())
    assert trajectory is not None and counts == {"ids": 1}
    assert (trajectory.token_ids.tolist(), trajectory.prompt_length, trajectory.finished) == ([5, 6, 7, 8], 2, False)


def test_without_ids_and_tokenizer() -> None:
    assert made(answered(), ResponseTokens()) == (None, {"no_ids": 1})


def test_ids_of_another_vocabulary() -> None:
    seen = answered()
    seen.add({"sglext": {"input_ids": [5, 6], "output_ids": [[7, 800]]}})
    assert made(seen, ResponseTokens(vocab_size=260)) == (None, {"other_vocabulary": 1})


@pytest.mark.parametrize(("prompt", "expected"), [("hi", ids_of("hi")), ([9, 8, 7], [9, 8, 7]), ([[4], [9]], [4])])
def test_prompts_of_completions(prompt: Any, expected: list[int]) -> None:
    seen = ObservedResponse("completions", {"prompt": prompt})
    seen.add({"id": "x", "choices": [{"index": 0, "text": "fine", "finish_reason": "length"}]})
    trajectory, _ = made(seen)
    assert trajectory is not None
    assert trajectory.token_ids[: trajectory.prompt_length].tolist() == expected


def test_rounds_come_along() -> None:
    seen = answered()
    details = {"spec_correct_drafts_histogram": [1, 2], "spec_num_proposed_drafts": 9, "spec_verify_ct": 3}
    seen.add({"sglext": {"spec_tokens_details": details}})
    trajectory, _ = made(seen)
    assert trajectory is not None and trajectory.rounds.tolist() == [[4, 1], [4, 1], [4, 0]]
