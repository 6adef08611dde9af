"""One answer at a time, odd ones above all: the client gets every byte, and nothing else is recorded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from sglang_server import TOKENIZER

from adaflash_hf.online.recorder import TrajectoryRecorder
from adaflash_hf.serving.answer_listener import AnswerListener, as_event, events_of, json_object
from adaflash_hf.serving.observed_response import ObservedResponse
from adaflash_hf.serving.response_tokens import ResponseTokens


ADDED = ("return_input_ids_in_sglext", "return_output_ids_in_sglext")
GOOD = {"choices": [{"index": 0, "message": {"content": "ab"}, "finish_reason": "stop"}]}
EXTENSION = {"input_ids": [1, 2], "output_ids": [[3, 4, 5]]}
ODD = [
    b'{"choices": [null]}',
    b'{"choices": "abc"}',
    b'{"choices": {"a": 1}}',
    b'{"choices": [{"index": 0, "message": "text"}]}',
    b'{"choices": [{"index": [0], "message": {"content": "a"}}]}',
]


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[TrajectoryRecorder]:
    with TrajectoryRecorder(tmp_path / "buffer", flush_interval_s=0.01) as made:
        yield made


def listener(recorder: TrajectoryRecorder, added: tuple[str, ...] = ADDED) -> tuple[AnswerListener, ResponseTokens]:
    tokens = ResponseTokens(TOKENIZER)
    return AnswerListener(recorder, tokens, ObservedResponse("chat/completions", {"messages": []}), added), tokens


def test_what_was_added_is_recorded_and_taken_out(recorder: TrajectoryRecorder) -> None:
    listening, tokens = listener(recorder)
    assert json.loads(listening.whole(json.dumps({**GOOD, "sglext": EXTENSION}).encode())) == GOOD
    assert recorder.flush(600) and tokens.counts == {"ids": 1} and recorder.counts.written == 1


def test_what_holds_nothing_of_ours_is_passed_byte_by_byte(recorder: TrajectoryRecorder) -> None:
    content = b'{ "choices":[ ],\n"n": 1e3}'
    for added in (ADDED, ()):
        assert listener(recorder, added)[0].whole(content) == content


@pytest.mark.parametrize("content", ODD)
def test_odd_answers_are_passed_and_not_recorded(content: bytes, recorder: TrajectoryRecorder) -> None:
    listening, tokens = listener(recorder)
    assert listening.whole(content) == content
    streaming, _ = listener(recorder)
    event = b"data: " + content + b"\n\n"
    assert streaming.event(event) == event
    # Once it is lost, what still comes is no answer of its own.
    assert streaming.event(as_event(GOOD)) == as_event(GOOD)
    streaming.ended()
    assert recorder.flush(600) and recorder.counts.received == 0
    assert tokens.counts == {"unreadable": 1}


def test_odd_answers_with_our_fields_in_them(recorder: TrajectoryRecorder) -> None:
    listening, _ = listener(recorder)
    fields = {"choices": [1], "sglext": {"input_ids": [1]}}
    assert json.loads(listening.whole(json.dumps(fields).encode())) == {"choices": [1]}
    assert listener(recorder)[0].whole(b'{"sglext": 7}') == b'{"sglext": 7}'
    # Half a pair of surrogates has no UTF-8.
    event = listener(recorder)[0].event(
        b'data: {"choices": [], "id": "\\ud800", "sglext": {"output_ids": 5, "x": 1}}\n\n'
    )
    assert event == b'data: {"choices": [], "id": "\\ud800", "sglext": {"x": 1}}\n\n'


def test_brackets_in_brackets_are_no_object() -> None:
    assert json_object(b"[" * 100_000) is None
    assert json_object(b'{"a":' * 100_000 + b"1" + b"}" * 100_000) is None
    assert json_object(b"[1]") is json_object(b"\xff") is json_object(b"") is None
    assert json_object(b'{"a": 1}') == {"a": 1}


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_come_whole_however_the_stream_is_cut(size: int) -> None:
    stream = b": hello\n\ndata: 1\r\n\r\ndata: 2\ndata: 3\n\n\n\ndata: end"

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(stream), size):
            yield stream[start : start + size]

    async def collected() -> list[bytes]:
        return [event async for event in events_of(pieces())]

    expected = [b": hello\n\n", b"data: 1\r\n\r\n", b"data: 2\ndata: 3\n\n", b"\n\n", b"data: end"]
    assert asyncio.run(collected()) == expected
