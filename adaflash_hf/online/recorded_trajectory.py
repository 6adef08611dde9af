"""One finished request as it goes through the replay buffer."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..errors import InvalidInputError


__all__ = ["MAX_DOMAIN_LENGTH", "MIN_RESPONSE_TOKENS", "NO_DOMAIN", "RecordedTrajectory", "fit_for_target"]

NO_DOMAIN = "default"
MAX_DOMAIN_LENGTH = 64
# A shorter response has no token after an anchor to learn from.
MIN_RESPONSE_TOKENS = 2
_TOKENS = np.dtype("<i4")
_ROUNDS = np.dtype("<u2")


@dataclass(frozen=True)
class RecordedTrajectory:
    """
    What the target said to a prompt, and how drafting fared meanwhile.

    Attributes:
        token_ids: `[n]` int32, prompt and response.
        prompt_length: Tokens of the prompt.
        drafter_version: Version that drafted when the request began; 0 is the drafter nobody has adapted.
        domain: Tag of the traffic, at most `MAX_DOMAIN_LENGTH` characters.
        finished: Whether the response ended by itself, not by a length limit or a cancellation.
        rounds: `[rounds, 2]` uint16, rows verified (the anchor included) and drafts accepted in each round.
        created_s: When it ended, in seconds since the epoch.
        request_id: What a collector that may deliver twice knows it by; a second one with the same id is dropped.
        text: The decoded response, if the recorder was asked to keep it.
        version_spans: Which version drafted which tokens, if it changed meanwhile: triples of a version and a
            half-open range of response tokens, without gaps. Empty if one version drafted all.
        id: Number in the buffer; 0 before it is there.
    """

    token_ids: np.ndarray
    prompt_length: int
    drafter_version: int = 0
    domain: str = NO_DOMAIN
    finished: bool = True
    rounds: np.ndarray = field(default_factory=lambda: np.zeros((0, 2), _ROUNDS))
    created_s: float = field(default_factory=time.time)
    request_id: str | None = None
    text: str | None = None
    version_spans: tuple[tuple[int, int, int], ...] = ()
    id: int = 0

    @classmethod
    def from_lists(
        cls,
        prompt_ids: Sequence[int],
        response_ids: Sequence[int],
        rounds: Sequence[tuple[int, int]] = (),
        *,
        domain: str | None = None,
        **fields: Any,
    ) -> RecordedTrajectory:
        """
        From plain lists.

        Args:
            prompt_ids (`Sequence[int]`):
                Tokens of the prompt, without padding.
            response_ids (`Sequence[int]`):
                Tokens the target added.
            rounds (`Sequence[tuple[int, int]]`, *optional*):
                Rows verified and drafts accepted in each round.
            domain (`str`, *optional*):
                Tag of the traffic.
            fields:
                Any other attribute.
        """
        return cls(
            token_ids=np.array([*prompt_ids, *response_ids], dtype=_TOKENS),
            prompt_length=len(prompt_ids),
            rounds=np.array(rounds, dtype=_ROUNDS).reshape(-1, 2),
            domain=(domain or NO_DOMAIN)[:MAX_DOMAIN_LENGTH],
            **fields,
        )

    @classmethod
    def from_stored(cls, fields: dict[str, Any]) -> RecordedTrajectory:
        """
        From a row of the buffer.

        Args:
            fields (`dict[str, Any]`):
                The attributes, arrays as bytes.
        """
        arrays: dict[str, Any] = {
            "rounds": np.frombuffer(fields["rounds"], _ROUNDS).reshape(-1, 2),
            "token_ids": np.frombuffer(fields["token_ids"], _TOKENS),
        }
        spans = tuple(tuple(span) for span in json.loads(fields["version_spans"] or "[]"))
        trajectory = cls(**{**fields, **arrays, "version_spans": spans, "finished": bool(fields["finished"])})
        trajectory.check()
        return trajectory

    @property
    def num_response_tokens(self) -> int:
        """Tokens the target added."""
        return len(self.token_ids) - self.prompt_length

    @property
    def num_bytes(self) -> int:
        """What it counts for in the buffer's limit: the payload, and something for the row itself."""
        return self.token_ids.nbytes + self.rounds.nbytes + len((self.text or "").encode()) + 128

    @property
    def prompt_hash(self) -> float:
        """A number in [0, 1) that all trajectories of one prompt share, whoever computes it."""
        digest = hashlib.blake2b(self.token_ids[: self.prompt_length].astype(_TOKENS).tobytes(), digest_size=8)
        return int.from_bytes(digest.digest()) / 2**64

    def cut(self, max_tokens: int) -> RecordedTrajectory | None:
        """
        At most `max_tokens` of it, cut at the end: context must stay what the target saw.

        Args:
            max_tokens (`int`):
                Prompt and response together.

        Returns:
            `RecordedTrajectory` or None: None if too little of the response is left to learn from.
        """
        if min(len(self.token_ids), max_tokens) - self.prompt_length < MIN_RESPONSE_TOKENS:
            return None
        if len(self.token_ids) <= max_tokens:
            return self
        length = max_tokens - self.prompt_length
        spans = tuple(
            (version, start, min(end, length)) for version, start, end in self.version_spans if start < length
        )
        return replace(self, token_ids=self.token_ids[:max_tokens], version_spans=spans, finished=False)

    def check(self) -> None:
        """Raise [`InvalidInputError`] if it is not what the target can have said."""
        if self.token_ids.ndim != 1 or not 0 <= self.prompt_length < len(self.token_ids):
            raise InvalidInputError(
                f"`prompt_length` is {self.prompt_length} of {self.token_ids.shape} tokens; a trajectory is one row "
                "with at least one token after the prompt."
            )
        if int(self.token_ids.min()) < 0:
            raise InvalidInputError(f"`token_ids` holds {int(self.token_ids.min())}; ids are not negative.")
        ends = [0, *(end for _, _, end in self.version_spans)]
        if self.version_spans and (
            [start for _, start, _ in self.version_spans] != ends[:-1]
            or ends[-1] != self.num_response_tokens
            or sorted(set(ends)) != ends
        ):
            raise InvalidInputError(
                f"`version_spans` is {self.version_spans} for {self.num_response_tokens} response tokens; the ranges "
                "must follow each other and cover the response."
            )

    def example(self, domain_id: int, max_tokens: int | None = None) -> dict[str, Any]:
        """
        The row that [`DrafterDataCollator`] takes.

        Args:
            domain_id (`int`):
                Number of its domain.
            max_tokens (`int`, *optional*):
                Cut what is longer.
        """
        import torch

        ids = self.token_ids[:max_tokens].astype(np.int64)
        return {
            "index": self.id,
            "input_ids": torch.from_numpy(ids),
            "prompt_length": self.prompt_length,
            "finished": self.finished and len(ids) == len(self.token_ids),
            "domain_id": domain_id,
        }


def fit_for_target(
    trajectories: Iterable[RecordedTrajectory], vocab_size: int, max_tokens: int
) -> list[RecordedTrajectory]:
    """
    Those a drafter can be trained on.

    Args:
        trajectories (`Iterable[RecordedTrajectory]`):
            What was recorded, perhaps of another target.
        vocab_size (`int`):
            Tokens of the target.
        max_tokens (`int`):
            What is longer is cut, what then has too little response is left out.
    """
    known = (one for one in trajectories if int(one.token_ids.max()) < vocab_size)
    return [cut for one in known if (cut := one.cut(max_tokens)) is not None]
