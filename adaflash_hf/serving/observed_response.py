"""What went by of one request with the OpenAI interface: text, token ids, and how drafting fared.

Whole responses and events of a stream are taken alike. Nothing here knows a tokenizer; see `response_tokens.py`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .served_versions import VersionHistory, reported_spans


__all__ = ["ObservedChoice", "ObservedResponse", "rounds_of_details"]

# More rounds than a response of any length that is recorded has; what claims more is not believed.
_MOST_ROUNDS = 1_000_000


@dataclass
class ObservedChoice:
    """
    One answer to a prompt.

    Attributes:
        text: Pieces of what the client was shown.
        token_ids: What the server says was generated; None if it does not say.
        prompt_ids: What the server says it was asked; None if it does not say.
        finish_reason: Why it ended; None while it has not.
        matched_stop: The stop string or token, where the server says it.
        is_reshaped: Whether a parser took parts out of the text (reasoning, tool calls).
        arrivals: When pieces came, and how many tokens, or pieces, were there by then.
    """

    text: list[str] = field(default_factory=list)
    token_ids: list[int] | None = None
    prompt_ids: list[int] | None = None
    finish_reason: str | None = None
    matched_stop: int | str | None = None
    is_reshaped: bool = False
    arrivals: list[tuple[float, int]] = field(default_factory=list)

    def add(self, fields: dict[str, Any], at_s: float) -> None:
        """
        Takes a choice of a response or of an event.

        Args:
            fields (`dict`): The choice.
            at_s (`float`): When it came, on the monotonic clock.
        """
        content = fields.get("message") or fields.get("delta") or {}
        piece = fields.get("text") or content.get("content") or ""
        if piece:
            self.text.append(piece)
        if content.get("tool_calls") or content.get("reasoning_content") or content.get("reasoning"):
            self.is_reshaped = True
        ids = next((fields[name] for name in ("token_ids", "response_token_ids") if fields.get(name)), None)
        if ids is not None:
            self.token_ids = [*(self.token_ids or []), *ids]
        self.prompt_ids = fields.get("prompt_token_ids") or self.prompt_ids
        self.finish_reason = fields.get("finish_reason") or self.finish_reason
        if fields.get("matched_stop") is not None:
            self.matched_stop = fields["matched_stop"]
        if piece or ids or self.is_reshaped:
            self.arrivals.append((at_s, len(self.arrivals) + 1 if self.token_ids is None else len(self.token_ids)))


class ObservedResponse:
    """
    All that went by of one request.

    Args:
        route (`str`): `"chat/completions"` or `"completions"`.
        body (`dict`): The request.
        domain (`str`, *optional*): Tag of the traffic.
    """

    def __init__(self, route: str, body: dict[str, Any], domain: str | None = None) -> None:
        self.route, self.body, self.domain = route, body, domain
        self.id: str | None = None
        self.choices: dict[int, ObservedChoice] = {}
        self.usage: dict[str, int] = {}
        self.metadata: dict[str, Any] = {}
        self.is_failed = False
        self._prompt_ids: list[int] | None = None
        self._details: list[dict[str, Any]] = []

    def add(self, fields: dict[str, Any], at_s: float | None = None) -> None:
        """
        Takes a whole response, or one event.

        Args:
            fields (`dict`): As the server sent it.
            at_s (`float`, *optional*): When it came, on the monotonic clock; now by default.
        """
        at_s = time.monotonic() if at_s is None else at_s
        self.is_failed |= fields.get("error") is not None or fields.get("object") == "error"
        self.id = fields.get("id") or self.id
        self.usage = fields.get("usage") or self.usage
        self.metadata = fields.get("metadata") or self.metadata
        self._prompt_ids = fields.get("prompt_token_ids") or self._prompt_ids
        for choice in fields.get("choices") or []:
            self.choices.setdefault(choice.get("index", 0), ObservedChoice()).add(choice, at_s)
        self._add_extension(fields.get("sglext") or {})

    def prompt_ids_of(self, index: int) -> list[int] | None:
        """
        The prompt of a choice as the server says it; None if it does not.

        Args:
            index (`int`): Number of the choice.
        """
        own = self.choices[index].prompt_ids
        if own is None and self.route == "completions":
            # Several choices of one prompt share it, and only the first may carry it.
            own = self.choices[self.prompt_index(index) * self.num_choices].prompt_ids if self.choices else None
        return own or self._prompt_ids

    @property
    def num_choices(self) -> int:
        """Choices for each prompt."""
        return int(self.body.get("n") or 1)

    def prompt_index(self, index: int) -> int:
        """
        Which prompt of a request with several ones a choice belongs to.

        Args:
            index (`int`): Number of the choice.
        """
        return index // self.num_choices

    def completion_tokens_of(self, index: int) -> int | None:
        """
        Tokens of a choice by the server's count; None where it only counts all choices together.

        Args:
            index (`int`): Number of the choice.
        """
        return self.usage.get("completion_tokens") if len(self.choices) == 1 and index in self.choices else None

    def prompt_tokens(self) -> int | None:
        """Tokens of the prompt by the server's count; None where it counts several prompts."""
        return self.usage.get("prompt_tokens") if max(self.choices, default=0) < self.num_choices else None

    def rounds_of(self, index: int) -> list[tuple[int, int]]:
        """
        Rounds of a choice: rows verified and drafts accepted. Their order is not known.

        Args:
            index (`int`): Number of the choice.
        """
        return rounds_of_details(self._details[index]) if index < len(self._details) else []

    def spans_of(self, index: int, num_tokens: int, history: VersionHistory) -> list[tuple[int, int, int]]:
        """
        Who drafted which tokens of a choice.

        SGLang says it where it does not stream. Elsewhere it is what served when the tokens came; where only pieces of
        text come, tokens are taken to be spread evenly over them.

        Args:
            index (`int`): Number of the choice.
            num_tokens (`int`): Tokens of the choice.
            history (`VersionHistory`): What served when.
        """
        spans = reported_spans(self.metadata) if index == 0 else []
        if not spans:
            arrivals = self.choices[index].arrivals
            total = arrivals[-1][1] if arrivals else 0
            spans = history.spans([(at_s, round(num_tokens * count / total)) for at_s, count in arrivals])
        return _covering(spans or [(history.current, 0, num_tokens)], num_tokens)

    def _add_extension(self, extension: dict[str, Any]) -> None:
        self._prompt_ids = extension.get("input_ids") or self._prompt_ids
        for index, ids in enumerate(extension.get("output_ids") or []):
            self.choices.setdefault(index, ObservedChoice()).token_ids = list(ids)
        details = extension.get("spec_tokens_details")
        if details:
            self._details = details if isinstance(details, list) else [details]


def rounds_of_details(details: dict[str, Any]) -> list[tuple[int, int]]:
    """
    Rounds of a request from SGLang's histograms, the longest first; their order is not known.

    Args:
        details (`dict`): `spec_tokens_details`, or `meta_info` of `/generate`.

    Returns:
        `list[tuple[int, int]]`: Rows verified, the anchor included, and drafts accepted.
    """
    accepted = _expanded(details.get("spec_correct_drafts_histogram") or [])
    if not accepted or len(accepted) > _MOST_ROUNDS:
        return []
    rows = _expanded(details.get("spec_cap_lens_histogram") or [])
    if len(rows) != len(accepted):
        verified = int(details.get("spec_verify_ct") or len(accepted))
        rows = [1 + round(int(details.get("spec_num_proposed_drafts") or 0) / max(verified, 1))] * len(accepted)
    # Which belong together is not known either; the most rows to the most accepted is always possible.
    return [(max(row, count + 1), count) for row, count in zip(rows, accepted, strict=True)]


def _expanded(histogram: Sequence[int]) -> list[int]:
    """Values of a histogram, the largest first."""
    return [value for value in reversed(range(len(histogram))) for _ in range(min(histogram[value], _MOST_ROUNDS))]


def _covering(spans: list[tuple[int, int, int]], num_tokens: int) -> list[tuple[int, int, int]]:
    """Spans that end where the tokens do: the final token may not be in the text, an aborted one in no span."""
    kept = [(version, start, min(end, num_tokens)) for version, start, end in spans if start < num_tokens]
    if kept:
        version, start, _ = kept[-1]
        kept[-1] = (version, start, num_tokens)
    return kept
