"""Requests as the engine sees them: what is asked for, its random numbers, and how far it has come."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .engine_handles import FinishReason, RequestHandle, RequestResult, RequestStats
from .sequences import SequenceBatch
from .stopping import StopRules
from .token_choice import TokenChooser


if TYPE_CHECKING:
    from transformers.generation.logits_process import LogitsProcessorList


__all__ = [
    "GenerationRequest",
    "PreparedRequest",
    "RequestNoise",
    "RequestState",
]


class RequestState(enum.Enum):
    """Where a request is."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    FINISHED = "finished"


class RequestNoise:
    """The random numbers of one request, addressed by the index of the generated token that they decide.

    So a token depends on the seed and on what precedes it, and on nothing else: not on neighbours, on how many rows
    were verified with it, or on whether the request was returned to the queue in between.

    Args:
        seed (`int`): Seed of the request's own generator.
    """

    BLOCK = 64  # tokens; drawn in equal pieces, so that the numbers do not depend on how many are asked for
    DRAFT, ACCEPTANCE, CHOICE = range(3)

    def __init__(self, seed: int):
        self._generator = torch.Generator("cpu").manual_seed(seed)
        self._first = 0
        self._numbers = torch.empty(0, 3, dtype=torch.float64, device="cpu")

    def take(self, first: int, count: int) -> torch.Tensor:
        """Numbers in [0, 1) for tokens `first` to `first + count - 1`; earlier ones are forgotten.

        Returns:
            `torch.Tensor` of shape `(count, 3)`: On the CPU, for the draft, its acceptance and the choice.
        """
        while self._first + len(self._numbers) < first + count:
            block = torch.rand(self.BLOCK, 3, dtype=torch.float64, generator=self._generator, device="cpu")
            self._numbers = torch.cat([self._numbers, block])
        self._numbers = self._numbers[first - self._first :]
        self._first = first
        return self._numbers[:count]


@dataclass
class PreparedRequest:
    """
    A request as transformers' own `generate()` prepares it.

    Attributes:
        prompt_ids (`list[int]`): The prompt.
        logits_processor (`LogitsProcessorList`): Processors of this request.
        stop_rules (`StopRules`): Its ends.
        do_sample (`bool`): Sample, or take the argmax.
        samples_drafts (`bool`): Whether drafts are sampled and corrected by rejection.
        seed (`int`, *optional*): Seed, if it samples.
        pad_token_id (`int`): For processors that see a padded batch; here there is one row, so it is never seen.
        settings (`tuple`, *optional*): Equal for requests whose rows may be processed together; None if they may not.
    """

    prompt_ids: list[int]
    logits_processor: LogitsProcessorList
    stop_rules: StopRules
    do_sample: bool
    samples_drafts: bool
    seed: int | None
    pad_token_id: int
    settings: tuple[Any, ...] | None


class GenerationRequest:
    """The engine's side of a request.

    Args:
        handle (`RequestHandle`): Its owner's side.
        prepared (`PreparedRequest`): What is asked for.
        domain (`str`, *optional*): A tag for whoever records finished requests.
    """

    def __init__(self, handle: RequestHandle, prepared: PreparedRequest, domain: str | None):
        self.handle = handle
        self.prepared = prepared
        self.domain = domain
        self.arrival = handle.request_id
        self.state = RequestState.WAITING
        self.tokens: list[int] = []
        self.chooser = TokenChooser(prepared.logits_processor, prepared.do_sample, 1)
        self._sequences: SequenceBatch | None = None
        self.noise = RequestNoise(prepared.seed) if prepared.seed is not None else None
        self.target_slot = self.drafter_slot = -1
        self.prefilled = 0
        self.end: FinishReason | None = None
        self.failure: Exception | None = None
        self.drafter_version: int | None = None
        self.rounds: list[tuple[int, int]] = []
        self.returns = 0
        self.submitted_s = time.perf_counter()
        self.admitted_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None

    @property
    def prompt_ids(self) -> list[int]:
        """The prompt."""
        return self.handle.prompt_ids

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens."""
        return len(self.prompt_ids) + len(self.tokens)

    @property
    def prefill_target(self) -> int:
        """Tokens to have in the cache before decoding: all but the anchor, which the first verification brings."""
        return self.num_tokens - 1 if self.tokens else len(self.prompt_ids)

    @property
    def prefill_remaining(self) -> int:
        """Tokens still to be prefilled."""
        return 0 if self.state is RequestState.DECODING else self.prefill_target - self.prefilled

    @property
    def anchor_id(self) -> int:
        """The last committed token."""
        return self.tokens[-1]

    @property
    def remaining(self) -> int:
        """Tokens that it may still grow by."""
        return self.prepared.stop_rules.remaining(self.num_tokens)

    def next_chunk(self, count: int) -> list[int]:
        """The next `count` tokens to prefill."""
        prompt, begin, end = self.prompt_ids, self.prefilled, self.prefilled + count
        # After a return, generated tokens are prefilled too.
        return prompt[begin:end] + self.tokens[max(begin - len(prompt), 0) : max(end - len(prompt), 0)]

    def sequences_on(self, device: torch.device) -> SequenceBatch:
        """What processors and criteria read, made when the first of them asks."""
        if self._sequences is None:
            prompt = torch.tensor([self.prompt_ids], device=device)
            self._sequences = SequenceBatch(prompt, self.prepared.pad_token_id)
            self._sequences.append(0, self.tokens)
        return self._sequences

    def cut(self, tokens: list[int], device: torch.device) -> tuple[int, bool]:
        """How many of `tokens` the stop rules let through, and whether the request ends there."""

        def prefixes(length: int, pending: dict[int, list[int]]) -> torch.Tensor:
            return self.sequences_on(device).prefixes(length, pending)

        return self.prepared.stop_rules.cut(tokens, self.num_tokens, 0, prefixes)

    def commit(self, tokens: list[int]) -> float | None:
        """Appends tokens and shows them to the owner; says how many seconds after the last ones, if there are any."""
        if not self.handle.add_tokens(tokens):
            return None
        now, before = time.perf_counter(), self.last_token_s
        self.tokens.extend(tokens)
        if self._sequences is not None:
            self._sequences.append(0, tokens)
        self.last_token_s = now
        if before is None:
            self.first_token_s = now
            return None
        return now - before

    def fail(self, error: Exception) -> None:
        """Ends it by an error of its own."""
        self.end, self.failure = "error", error

    def build_result(self, reason: FinishReason, error: BaseException | None = None) -> RequestResult:
        """What is handed to the owner and to the recorder."""
        return RequestResult(
            request_id=self.handle.request_id,
            prompt_ids=self.prompt_ids,
            token_ids=list(self.tokens),
            finish_reason=reason,
            seed=self.prepared.seed,
            domain=self.domain,
            drafter_version=self.drafter_version or 0,
            rounds=self.rounds,
            stats=self._build_stats(),
            error=error,
        )

    def _build_stats(self) -> RequestStats:
        now = time.perf_counter()
        stats = RequestStats(
            prompt_tokens=len(self.prompt_ids),
            generated_tokens=len(self.tokens),
            returns=self.returns,
            committed_tokens=max(len(self.tokens) - 1, 0),
            queue_s=(self.admitted_s or now) - self.submitted_s,
            total_s=now - self.submitted_s,
        )
        stats.count_rounds(self.rounds)
        if self.first_token_s is not None and self.last_token_s is not None:
            stats.time_to_first_token_s = self.first_token_s - self.submitted_s
            if len(self.tokens) > 1:
                stats.token_latency_s = (self.last_token_s - self.first_token_s) / (len(self.tokens) - 1)
        return stats
