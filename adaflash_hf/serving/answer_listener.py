"""Takes one answer down as it goes by on its way to the client, whole or as server-sent events.

Whatever a server sends, the client gets it: an answer that cannot be made sense of is not recorded, and no more.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from typing import Any

from ..online.recorder import TrajectoryRecorder
from .observed_response import ObservedResponse
from .response_tokens import PendingResponse, ResponseTokens
from .upstream_dialects import ADDED_MARKS, without_added


__all__ = ["AnswerListener", "as_event", "events_of", "json_object"]

logger = logging.getLogger(__name__)

_END_MARKS = (b"\n\n", b"\r\n\r\n")
_LONGEST_MARK = max(map(len, _END_MARKS))


class AnswerListener:
    """
    One answer, and out of it what only we asked for.

    Args:
        recorder (`TrajectoryRecorder`): Where trajectories go.
        tokens (`ResponseTokens`): Makes token ids of what went by.
        observed (`ObservedResponse`): Takes it down.
        added (`tuple[str, ...]`): Fields that we added to the client's request.
    """

    def __init__(
        self, recorder: TrajectoryRecorder, tokens: ResponseTokens, observed: ObservedResponse, added: tuple[str, ...]
    ) -> None:
        self._recorder, self._tokens, self._observed, self._added = recorder, tokens, observed, added
        self._is_lost = False

    def whole(self, content: bytes) -> bytes:
        """An answer that is not streamed."""
        fields = json_object(content)
        if fields is None:
            self._tokens.count("no_json")
            return content
        self._take(fields)
        self.ended()
        return _dumped(self._cleaned(fields) or {}) if self._holds_added(content) else content

    def event(self, event: bytes) -> bytes | None:
        """One event of a stream, with its blank line; None if the client would not have got it."""
        data = b"\n".join(
            line[5:].strip() for line in event.replace(b"\r\n", b"\n").split(b"\n") if line.startswith(b"data:")
        )
        fields = json_object(data)
        if fields is None:
            return event  # a comment, or the end
        self._take(fields)
        if not self._holds_added(event):
            return event
        cleaned = self._cleaned(fields)
        return None if cleaned is None else as_event(cleaned)

    def ended(self) -> None:
        """Nothing more will come: whole, broken off, or left by the client."""
        observed = self._observed
        if self._is_lost:
            return
        if observed.is_failed:
            self._tokens.count("failed")
            return
        if not observed.choices:
            self._tokens.count("client_left")
        for index in observed.choices:
            self._recorder.record(PendingResponse(self._tokens, observed, index))

    def _take(self, fields: dict[str, Any]) -> None:
        if self._is_lost:
            return
        try:
            self._observed.add(fields)
        except Exception as error:  # a server may send anything, and it is the client who asked
            self._is_lost = True
            self._tokens.count("unreadable")
            logger.debug("An answer is not as OpenAI's interface has it: %r", error)

    def _holds_added(self, content: bytes) -> bool:
        return bool(self._added) and any(mark in content for mark in ADDED_MARKS)

    def _cleaned(self, fields: dict[str, Any]) -> dict[str, Any] | None:
        try:
            return without_added(fields, self._added)
        except (AttributeError, TypeError):
            return fields


async def events_of(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """
    Server-sent events, each with the blank line that ends it, as soon as it is whole.

    Args:
        pieces (`AsyncIterator[bytes]`): The stream as it comes.
    """
    waiting, looked_at = bytearray(), 0
    async for piece in pieces:
        waiting += piece
        # Only what is new is looked at again, or an event of many megabytes would take minutes.
        while (end := _end_of_event(waiting, looked_at)) is not None:
            yield bytes(waiting[:end])
            del waiting[:end]
            looked_at = 0
        looked_at = max(len(waiting) - _LONGEST_MARK + 1, 0)
    if waiting:
        yield bytes(waiting)


def as_event(fields: dict[str, Any]) -> bytes:
    """
    An event of a stream.

    Args:
        fields (`dict`): What it says.
    """
    return b"data: " + _dumped(fields) + b"\n\n"


def json_object(content: bytes) -> dict[str, Any] | None:
    """
    The JSON object that some bytes are; None if they are none.

    Args:
        content (`bytes`): Of a request, an answer or an event.
    """
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError):  # the latter is for brackets in brackets, a thousand deep
        return None
    return fields if isinstance(fields, dict) else None


def _dumped(fields: dict[str, Any]) -> bytes:
    try:
        return json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # half of a pair of surrogates, which only exists escaped
        return json.dumps(fields).encode()


def _end_of_event(data: bytearray, start: int) -> int | None:
    ends = [place + len(mark) for mark in _END_MARKS if (place := data.find(mark, start)) >= 0]
    return min(ends, default=None)
