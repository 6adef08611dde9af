"""From a response that went by to a trajectory: the server's token ids, or text tokenized again and checked.

Text is made of tokens in more than one way, so what the tokenizer makes of it need not be what the target said. A
response is dropped, and counted, unless its tokens decode to the same text and are as many as the server counted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..online.recorded_trajectory import RecordedTrajectory
from .observed_response import ObservedResponse
from .served_versions import VersionHistory


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


__all__ = ["PendingResponse", "ResponseTokens", "UnusableResponse"]

logger = logging.getLogger(__name__)

_LOG_INTERVAL_S = 60.0
_ENDED = ("stop", "tool_calls", "function_call")


class UnusableResponse(Exception):
    """
    A response whose tokens are not known for sure.

    Args:
        reason (`str`): One of a few words, to be counted by.
        message (`str`): What exactly, for the log.
    """

    def __init__(self, reason: str, message: str = "") -> None:
        super().__init__(message or reason)
        self.reason = reason


class ResponseTokens:
    """
    Makes trajectories of responses, and counts where their tokens came from.

    Args:
        tokenizer (`PreTrainedTokenizerBase`, *optional*): The target's; without one, only the server's ids are used.
        history (`VersionHistory`, *optional*): Which drafter version served when.
        vocab_size (`int`, *optional*): Ids from here on are not the target's.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None = None,
        history: VersionHistory | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self.tokenizer, self.history, self.vocab_size = tokenizer, history or VersionHistory(), vocab_size
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._logged_s = -_LOG_INTERVAL_S

    @property
    def counts(self) -> dict[str, int]:
        """Answers by where their tokens came from (`ids`, `text`), and those not used by the reason."""
        with self._lock:
            return dict(self._counts)

    def count(self, name: str) -> None:
        """
        Count an answer that never gets here.

        Args:
            name (`str`): The reason.
        """
        with self._lock:
            self._counts[name] += 1

    def trajectory(self, response: ObservedResponse, index: int) -> RecordedTrajectory | None:
        """
        The trajectory of one answer.

        Args:
            response (`ObservedResponse`): What went by.
            index (`int`): Number of the answer.

        Returns:
            `RecordedTrajectory` or None: None if its tokens are not known for sure.
        """
        try:
            source, prompt_ids, response_ids = self._ids(response, index)
            if self.vocab_size is not None and max(*prompt_ids, *response_ids, 0) >= self.vocab_size:
                raise UnusableResponse("other_vocabulary", f"it holds ids from {self.vocab_size} on")
        except UnusableResponse as error:
            self.count(error.reason)
            self._log(f"an answer cannot be recorded, {error.reason}: {error}")
            return None
        self.count(source)
        spans = response.spans_of(index, len(response_ids), self.history)
        return RecordedTrajectory.from_lists(
            prompt_ids,
            response_ids,
            response.rounds_of(index),
            domain=response.domain,
            drafter_version=spans[0][0],
            version_spans=tuple(spans) if len(spans) > 1 else (),
            finished=response.choices[index].finish_reason in _ENDED,
            request_id=None if response.id is None else f"{response.id}/{index}",
        )

    def _ids(self, response: ObservedResponse, index: int) -> tuple[str, list[int], list[int]]:
        choice = response.choices[index]
        prompt_ids = response.prompt_ids_of(index)
        if choice.token_ids and prompt_ids:
            return "ids", prompt_ids, choice.token_ids
        if choice.finish_reason is None:
            raise UnusableResponse("broken_off", "it ended before its end, and its tokens were not sent")
        if self.tokenizer is None:
            raise UnusableResponse("no_ids", "the server sends no token ids; name the target to have text tokenized")
        if prompt_ids is None:
            prompt_ids = self._prompt_ids(response, index)
        return "text", prompt_ids, choice.token_ids or self._response_ids(response, index)

    def _prompt_ids(self, response: ObservedResponse, index: int) -> list[int]:
        if response.route == "completions":
            ids = self._completion_prompt_ids(response.body.get("prompt"), response.prompt_index(index))
        else:
            ids = self._chat_prompt_ids(response.body)
        counted = response.prompt_tokens()
        if counted is not None and counted != len(ids):
            raise UnusableResponse(
                "prompt_differs", f"its prompt has {len(ids)} tokens here and {counted} at the server"
            )
        return ids

    def _completion_prompt_ids(self, prompt: Any, index: int) -> list[int]:
        assert self.tokenizer is not None
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            prompt = prompt[index]
        if isinstance(prompt, str):
            return list(self.tokenizer(prompt)["input_ids"])
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
            return list(prompt)
        raise UnusableResponse("no_text", "its prompt is neither text nor token ids")

    def _chat_prompt_ids(self, body: dict[str, Any]) -> list[int]:
        assert self.tokenizer is not None
        messages = [_with_plain_text(message) for message in body.get("messages") or []]
        continues = bool(body.get("continue_final_message"))
        try:
            encoded = self.tokenizer.apply_chat_template(
                messages,
                tools=body.get("tools") or None,
                add_generation_prompt=body.get("add_generation_prompt", True) and not continues,
                continue_final_message=continues,
                tokenize=True,
                return_dict=True,
                **(body.get("chat_template_kwargs") or {}),
            )
        except UnusableResponse:
            raise
        except Exception as error:  # templates are programs, and raise what they like
            raise UnusableResponse("no_template", f"the chat template refuses its prompt: {error}") from error
        return list(encoded["input_ids"])

    def _response_ids(self, response: ObservedResponse, index: int) -> list[int]:
        assert self.tokenizer is not None
        choice = response.choices[index]
        if choice.is_reshaped:
            raise UnusableResponse("reshaped", "the server took reasoning or tool calls out of its text")
        text = "".join(choice.text)
        if response.body.get("echo"):
            raise UnusableResponse("reshaped", "it repeats its prompt (`echo`)")
        ids: list[int] = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        decoded = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if decoded != text:
            raise UnusableResponse("no_round_trip", f"its text becomes {decoded[:80]!r} when tokenized and decoded")
        counted = response.completion_tokens_of(index)
        # Where the server does not say what it stopped at, and the client named other ends, only the count tells.
        is_open = choice.matched_stop is None and (response.body.get("stop") or response.body.get("stop_token_ids"))
        if not is_open or counted == len(ids) + 1:
            ids += self._final_token(choice.finish_reason, choice.matched_stop)
        if counted is not None and counted != len(ids):
            raise UnusableResponse("no_round_trip", f"its text has {len(ids)} tokens here and {counted} at the server")
        return ids

    def _final_token(self, finish_reason: str | None, matched_stop: int | str | None) -> Sequence[int]:
        """The token that ended the response and is not in its text."""
        assert self.tokenizer is not None
        if finish_reason != "stop" or isinstance(matched_stop, str):
            return ()
        final = matched_stop if isinstance(matched_stop, int) else self.tokenizer.eos_token_id
        return () if final is None else (final,)

    def _log(self, message: str) -> None:
        if time.monotonic() - self._logged_s >= _LOG_INTERVAL_S:
            self._logged_s = time.monotonic()
            logger.warning("Collector: %s (more such messages are left out for a while)", message)


@dataclass(frozen=True)
class PendingResponse:
    """
    One answer, for the recorder's thread.

    Attributes:
        tokens: Makes the trajectory.
        response: What went by.
        index: Number of the answer.
    """

    tokens: ResponseTokens
    response: ObservedResponse
    index: int

    def trajectory(self) -> RecordedTrajectory | None:
        """The trajectory; None if its tokens are not known for sure."""
        return self.tokens.trajectory(self.response, self.index)


def _with_plain_text(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    if any(part.get("type") != "text" for part in content):
        raise UnusableResponse("no_text", "its prompt holds pictures or sound")
    return {**message, "content": "".join(part["text"] for part in content)}
