"""One round of the engine: draft, verify and prefill in one packed forward, judge, commit."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers.modeling_utils import PreTrainedModel

from .engine_context import DrafterContext
from .engine_requests import GenerationRequest, RequestState
from .engine_verdicts import Block, Verdict, judge_blocks, sample_drafts
from .length_policies import LengthPolicy, RoundContext, RoundOutcome
from .packed_drafter import FEW_PENDING_TOKENS, MOST_PENDING_TOKENS, PackedDrafter
from .packed_target import LogitsFor, PackedOutputs, PackedTarget
from .scheduler import MemoryGauge
from .statistics import StatisticsRecorder


__all__ = ["EngineRounds", "RoundReport"]

# Tokens that a new request gets room for beyond those it has, if it may grow as much.
ROOM_AHEAD = 256


@dataclass
class RoundReport:
    """
    What a round did.

    Attributes:
        num_decoding (`int`): Requests that were verified.
        num_prefilled (`int`): Tokens prefilled.
        committed (`list[tuple]`):
            Requests that grew, by how many tokens, and the seconds since they last did; None for a first token.
    """

    num_decoding: int = 0
    num_prefilled: int = 0
    committed: list[tuple[GenerationRequest, int, float | None]] = field(default_factory=list)


@dataclass
class _Drafts:
    """The drafts of a round. `lengths` are the verify lengths of all decoding requests, 1 for those without drafts."""

    lengths: list[int]
    token_ids: torch.Tensor | None = None
    probs: dict[int, torch.Tensor] = field(default_factory=dict)
    noise: dict[int, torch.Tensor] = field(default_factory=dict)
    drafted: list[int] = field(default_factory=list)
    context: RoundContext | None = None
    draft_s: float | None = None


@dataclass
class _Rows:
    """One request's part of the packed forward."""

    request: GenerationRequest
    count: int
    logits_for: LogitsFor
    length_before: int = 0
    is_followed: bool = False  # whether its features go to the drafter


class EngineRounds:
    """The models, their packed caches, and what happens between two moments at which requests may come and go.

    Args:
        target (`PreTrainedModel`): The target.
        drafter (`PreTrainedModel`, *optional*): The drafter; plain decoding without one.
        policy (`LengthPolicy`, *optional*): How many rows to verify; needed with a drafter.
        recorder (`StatisticsRecorder`): Counts rounds and times phases.
        prefill_chunk_tokens (`int`): Most prompt tokens of a request per round, for the forecast of memory.
        is_memory_limited (`bool`):
            Whether memory is counted: then features are held for a short while only, and no room is taken ahead.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: PreTrainedModel | None,
        policy: LengthPolicy | None,
        recorder: StatisticsRecorder,
        prefill_chunk_tokens: int,
        is_memory_limited: bool,
    ):
        self.target = PackedTarget(target)
        most_pending = FEW_PENDING_TOKENS if is_memory_limited else MOST_PENDING_TOKENS
        self.drafter = None if drafter is None else PackedDrafter(drafter, target, most_pending)
        self.policy = policy
        self.recorder = recorder
        self.drafter_version = 0
        self._prefill_chunk_tokens = prefill_chunk_tokens
        self._is_memory_limited = is_memory_limited
        self._layer_ids: Sequence[int] = (
            () if self.drafter is None else self.drafter.base_drafter.config.target_layer_ids
        )
        self._num_running = 0
        self._context: DrafterContext | None = None
        if self.drafter is not None and policy is not None:
            self._context = DrafterContext(self.target, self.drafter, policy, self._reopen, prefill_chunk_tokens)

    @property
    def longest_verify_length(self) -> int:
        """Most rows of a request per round, the anchor included."""
        return 1 if self.drafter is None else self.drafter.longest_verify_length

    # Slots and memory

    def open(self, request: GenerationRequest) -> None:
        """Gives a request its place in the caches."""
        expected = self._expected_tokens(request)
        request.target_slot = self.target.allocate(expected)
        if self.drafter is not None:
            request.drafter_slot = self.drafter.allocate(expected)
        request.prefilled = 0
        request.state = RequestState.PREFILLING

    def _expected_tokens(self, request: GenerationRequest) -> int:
        """Tokens to make room for at once. Room ahead saves moving the request as it grows; where memory is counted,
        it has no more than it needs."""
        ahead = 0 if self._is_memory_limited else min(request.remaining, ROOM_AHEAD)
        return request.num_tokens + ahead + self.longest_verify_length

    def close(self, request: GenerationRequest) -> None:
        """Takes a request out of the caches; its tokens stay with it."""
        if request.target_slot >= 0:
            self.target.release(request.target_slot)
        if request.drafter_slot >= 0 and self.drafter is not None:
            self.drafter.release(request.drafter_slot)
        request.target_slot = request.drafter_slot = -1
        request.prefilled = 0

    def _reopen(self, request: GenerationRequest) -> None:
        self.close(request)
        self.open(request)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the caches of target and drafter."""
        return self.target.memory_bytes + (0 if self.drafter is None else self.drafter.memory_bytes)

    def bytes_for(self, num_tokens: int) -> int:
        """Bytes that one request of so many tokens takes in both caches, features on their way included."""
        if self.drafter is None:
            return self.target.bytes_for(num_tokens)
        waiting = min(num_tokens, self.drafter.most_pending_tokens) * self.drafter.feature_bytes
        return self.target.bytes_for(num_tokens) + self.drafter.bytes_for(num_tokens) + waiting

    def forecast_bytes(self, requests: Sequence[GenerationRequest], growth: int) -> int:
        """Bytes that both caches take, at most, while these requests each grow by so many tokens."""
        opening = [request.num_tokens + growth for request in requests if request.target_slot < 0]
        growing = [request for request in requests if request.target_slot >= 0]
        lengths = {request.target_slot: request.num_tokens + growth for request in growing}
        total = self.target.cache.forecast_bytes(lengths, max(growth, self._prefill_chunk_tokens), opening)
        if self.drafter is None:
            return total
        lengths = {request.drafter_slot: request.num_tokens + growth for request in growing}
        block, most_pending = self.drafter.config.block_size, self.drafter.most_pending_tokens
        waiting = sum(min(request.num_tokens + growth, most_pending) for request in requests)
        opening = [length + block for length in opening]
        lengths = {slot: length + block for slot, length in lengths.items()}
        at_once = max(growth, self._prefill_chunk_tokens) + block + most_pending
        drafter = self.drafter.cache.forecast_bytes(lengths, at_once, opening)
        return total + drafter + waiting * self.drafter.feature_bytes

    @property
    def gauge(self) -> MemoryGauge:
        """What the scheduler asks."""
        return MemoryGauge(self.bytes_for, self.forecast_bytes)

    # One round

    def follow(self, running: Sequence[GenerationRequest]) -> None:
        """Begins a round: some requests may go back to prefill, see [`DrafterContext`]."""
        self._num_running = len(running)
        if self._context is not None and self.policy is not None:
            remaining = sum(request.prefill_remaining for request in running)
            self.policy.begin_round(min(remaining, self._prefill_chunk_tokens))
            self._context.follow(running)

    def run(
        self, decoding: list[GenerationRequest], chunks: list[tuple[GenerationRequest, int]], started_s: float | None
    ) -> RoundReport:
        """Advances requests by one round. Those that come to an end say so in their `end`.

        Args:
            decoding (`list[GenerationRequest]`): Requests to draft for and verify.
            chunks (`list[tuple]`): Requests to prefill, and tokens of each.
            started_s (`float`, *optional*): When the round began, if its time says what decoding costs; else None.

        Returns:
            `RoundReport`: What happened.
        """
        drafts = self._draft(decoding)
        rows = [_Rows(request, length, "all") for request, length in zip(decoding, drafts.lengths, strict=True)] + [
            _Rows(request, count, self._logits_for_chunk(request, count)) for request, count in chunks
        ]
        for part in rows:
            part.length_before = self.target.length(part.request.target_slot)
            part.is_followed = self._context is not None and self._context.is_complete(part.request)
        phase = "verify" if decoding else "prefill"
        with self.recorder.phase(phase):
            outputs = self._forward(rows, drafts)
        self.recorder.count_target_forward()
        blocks = self._blocks(rows, drafts)
        verdicts = judge_blocks(blocks, outputs.logits, drafts.token_ids) if blocks else []
        return self._settle(rows, drafts, outputs, dict(zip(map(_key, blocks), verdicts, strict=True)), started_s)

    @staticmethod
    def _logits_for_chunk(request: GenerationRequest, count: int) -> LogitsFor:
        # A request that was returned knows the token after its prefill already.
        is_last = count == request.prefill_remaining
        return "last" if is_last and not request.tokens else "none"

    def _draft(self, decoding: list[GenerationRequest]) -> _Drafts:
        drafts = _Drafts([1] * len(decoding))
        context, policy = self._context, self.policy
        if context is None or policy is None or not decoding or not policy.wants_draft(self._num_running):
            return drafts
        longest = [min(self.longest_verify_length, request.remaining) for request in decoding]
        complete = [context.is_complete(request) for request in decoding]
        able = [index for index, bound in enumerate(longest) if bound > 1 and complete[index]]
        most_read = policy.most_read(self._num_running)
        members = [index for index in able if context.is_worth_reading(decoding[index], most_read)]
        if 2 * len(members) <= len(able):
            return drafts
        assert self.drafter is not None
        most_drafted = policy.most_drafted(self._num_running)
        if most_drafted < len(members):
            waiting = [self.drafter.num_pending(decoding[index].drafter_slot) for index in members]
            members = _cheapest_neighbours(members, waiting, most_drafted)
        started_s = time.perf_counter()
        with self.recorder.phase("draft"):
            self._run_drafter(decoding, members, longest, drafts)
        drafts.draft_s = time.perf_counter() - started_s
        return drafts

    def _run_drafter(
        self, decoding: list[GenerationRequest], members: list[int], longest: list[int], drafts: _Drafts
    ) -> None:
        assert self.drafter is not None and self.policy is not None
        requests = [decoding[index] for index in members]
        hidden_states = self.drafter.draft(
            [request.drafter_slot for request in requests],
            [request.anchor_id for request in requests],
            self.policy.longest_wanted(self._num_running),
        )
        drafted = self.drafter.longest_in(hidden_states)
        context = RoundContext(
            longest=[min(longest[index], drafted) for index in members],
            num_active=self._num_running,
            request_ids=[request.arrival for request in requests],
            num_generated=[len(request.tokens) for request in requests],
        )
        base = self.drafter.base_drafter
        if self.policy.needs_likeliest(base):
            context.likeliest = self.drafter.likeliest(hidden_states)
        lengths = self.policy.choose(base, hidden_states, context)
        drafts.drafted, drafts.context = members, context
        for index, length in zip(members, lengths, strict=True):
            drafts.lengths[index] = length
        if max(lengths) > 1:
            self._project(requests, hidden_states, lengths, context, drafts)

    def _project(
        self,
        requests: list[GenerationRequest],
        hidden_states: torch.Tensor,
        lengths: list[int],
        context: RoundContext,
        drafts: _Drafts,
    ) -> None:
        """Turns the kept rows into drafts: the argmax, or draws for requests that sample their drafts."""
        assert self.drafter is not None
        sampling = [r.prepared.samples_drafts and length > 1 for r, length in zip(requests, lengths, strict=True)]
        packed = self.drafter.project(hidden_states, lengths, any(sampling), context.likeliest)
        drafts.token_ids = packed.token_ids
        if not any(sampling):
            return
        assert packed.logits is not None
        pieces = []
        parts = zip(packed.token_ids.split(packed.counts), packed.logits.split(packed.counts), strict=True)
        for request, length, samples, (ids, logits) in zip(requests, lengths, sampling, parts, strict=True):
            if samples:
                noise = self._noise_of(request, length, drafts)
                ids, drafts.probs[request.arrival] = sample_drafts(request, logits, noise)
            pieces.append(ids)
        drafts.token_ids = torch.cat(pieces)

    @staticmethod
    def _noise_of(request: GenerationRequest, count: int, drafts: _Drafts) -> torch.Tensor:
        """The numbers that decide a request's next tokens, taken once per round."""
        assert request.noise is not None
        if request.arrival not in drafts.noise:
            drafts.noise[request.arrival] = request.noise.take(len(request.tokens), count)
        return drafts.noise[request.arrival]

    def _forward(self, rows: list[_Rows], drafts: _Drafts) -> PackedOutputs:
        """Packs anchors, drafts and chunks. Drafts are put in on the device: the host has not seen them yet."""
        flat: list[int] = []
        draft_places: list[int] = []
        for part in rows:
            if part.request.state is RequestState.DECODING:
                begin = len(flat) + 1
                flat.append(part.request.anchor_id)
                flat.extend([0] * (part.count - 1))
                draft_places.extend(range(begin, len(flat)))
            else:
                flat.extend(part.request.next_chunk(part.count))
        follows = self._context is not None and self._context.is_wanted and any(part.is_followed for part in rows)
        ids = torch.tensor(flat, device=self.target.device)
        if draft_places:
            assert drafts.token_ids is not None
            ids[torch.tensor(draft_places, device=ids.device)] = drafts.token_ids.to(ids.device)
        return self.target.forward(
            [part.request.target_slot for part in rows],
            ids,
            [part.count for part in rows],
            layer_ids=self._layer_ids if follows else (),
            logits_for=[part.logits_for for part in rows],
        )

    def _blocks(self, rows: list[_Rows], drafts: _Drafts) -> list[Block]:
        blocks = []
        first_row = first_draft = 0
        for part in rows:
            if part.logits_for == "none":
                continue
            request, num_rows = part.request, part.count if part.logits_for == "all" else 1
            noise = None if request.noise is None else self._noise_of(request, num_rows, drafts)
            probs = drafts.probs.get(request.arrival)
            blocks.append(Block(request, first_row, num_rows, first_draft, probs, noise))
            first_row += num_rows
            first_draft += num_rows - 1
        return blocks

    # After the verdicts

    def _settle(
        self,
        rows: list[_Rows],
        drafts: _Drafts,
        outputs: PackedOutputs,
        verdicts: dict[int, Verdict],
        started_s: float | None,
    ) -> RoundReport:
        report = RoundReport(num_decoding=len(drafts.lengths))
        device = outputs.logits.device
        accepted: list[int] = []
        ended: list[bool] = []
        committed = 0
        first_row = 0
        for part in rows:
            verdict = verdicts.get(part.request.arrival)
            is_verified = part.request.state is RequestState.DECODING
            if not is_verified:
                report.num_prefilled += part.count
                part.request.prefilled += part.count
            count, is_over = self._commit(part.request, verdict, device, report)
            if is_verified:
                assert verdict is not None
                accepted.append(min(verdict.accepted, count))
                ended.append(is_over)
                part.request.rounds.append((part.count, accepted[-1]))
                self.recorder.count_round(part.count, accepted[-1], count)
                committed += count
            if not is_over:
                self._advance(part, count if is_verified else part.count, outputs.features, first_row)
            first_row += part.count
        self._tell_policy(drafts, accepted, ended, committed, started_s)
        return report

    def _commit(
        self, request: GenerationRequest, verdict: Verdict | None, device: torch.device, report: RoundReport
    ) -> tuple[int, bool]:
        """Adds tokens to a request; says how many, and whether that was its last round."""
        if verdict is None:
            return 0, False
        if verdict.error is not None:
            request.fail(verdict.error)
            return 0, True
        try:
            count, is_over = request.cut(verdict.tokens, device)
        except Exception as error:  # a stopping criterion of the user's own
            request.fail(error)
            return 0, True
        report.committed.append((request, count, request.commit(verdict.tokens[:count])))
        if is_over:
            rules = request.prepared.stop_rules
            is_cut = request.remaining <= 0 and verdict.tokens[count - 1] not in rules.eos_token_ids
            request.end = "length" if is_cut else "stop"
        return count, is_over

    def _advance(self, part: _Rows, kept: int, features: torch.Tensor | None, first_row: int) -> None:
        """Rolls back what was rejected, and hands what was kept to the drafter: rows of all features of the round."""
        request = part.request
        if kept < part.count:
            self.target.truncate(request.target_slot, part.length_before + kept)
        if self.drafter is not None and features is not None and part.is_followed:
            self.drafter.extend(request.drafter_slot, features, first_row, first_row + kept)
        if request.state is RequestState.PREFILLING and request.prefilled >= request.prefill_target:
            request.state = RequestState.DECODING
            if request.drafter_version is None:
                request.drafter_version = self.drafter_version

    def _tell_policy(
        self, drafts: _Drafts, accepted: list[int], ended: list[bool], committed: int, started_s: float | None
    ) -> None:
        if self.policy is None or not drafts.lengths:
            return
        members = drafts.drafted or list(range(len(drafts.lengths)))
        context = drafts.context or RoundContext([1] * len(members), self._num_running)
        outcome = RoundOutcome(
            verify_lengths=[drafts.lengths[index] for index in members],
            accepted=[accepted[index] for index in members],
            ended=[ended[index] for index in members],
            drafted=bool(drafts.drafted),
            committed=committed,
            round_s=None if started_s is None else time.perf_counter() - started_s,
            draft_s=drafts.draft_s,
        )
        self.policy.observe_round(context, outcome)


def _cheapest_neighbours(members: list[int], waiting: list[int], count: int) -> list[int]:
    """So many requests, one after the other, for those that lie side by side are read by one call of the attention.

    Those whose features are projected already, for the others pay for all of theirs; of equals the newest, which live
    longest.
    """
    begin = min(range(len(members) - count, -1, -1), key=lambda begin: sum(waiting[begin : begin + count]))
    return members[begin : begin + count]


def _key(block: Block) -> int:
    return block.request.arrival
