"""The target's verdict on the blocks of many requests, each by its own sampling settings.

Requests whose tokens follow from the scores alone are judged together, with one transfer to the host for all of them.
Those with processors that read the preceding tokens, or that are the user's own, are judged one by one, so that what
goes wrong in one of them stays there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from .acceptance import count_leading_matches, greedy_tokens, judge_drafts, replacement_probs, sample_tokens
from .candidate_generator import Proposal
from .engine_requests import GenerationRequest, RequestNoise
from .token_choice import BlockNoise, prefix_free_processors


__all__ = ["Block", "Verdict", "judge_blocks", "sample_drafts"]

# Scores processed at once, in elements: rows times vocabulary.
SCORES_CHUNK = 1 << 25


@dataclass
class Block:
    """Rows of one request that the target has seen: its anchor and its drafts, or the end of its prompt.

    Attributes:
        request (`GenerationRequest`): Whose.
        first_row (`int`): Where its logits begin.
        num_rows (`int`): Rows with logits.
        first_draft (`int`): Where its drafts begin.
        draft_probs (`torch.Tensor` of shape `(num_rows - 1, vocab_size)`, *optional*): Of sampled drafts.
        noise (`torch.Tensor` of shape `(num_rows, 3)`, *optional*): Numbers that decide its draws, on the CPU.
    """

    request: GenerationRequest
    first_row: int
    num_rows: int
    first_draft: int
    draft_probs: torch.Tensor | None = None
    noise: torch.Tensor | None = None

    @property
    def rows(self) -> slice:
        """Its logits."""
        return slice(self.first_row, self.first_row + self.num_rows)

    @property
    def drafts(self) -> slice:
        """Its drafts."""
        return slice(self.first_draft, self.first_draft + self.num_rows - 1)


@dataclass
class Verdict:
    """What the target says about a block.

    Attributes:
        tokens (`list[int]`): Accepted drafts and the token that follows them.
        accepted (`int`): Number of accepted drafts.
        error (`Exception`, *optional*): Why there is no verdict.
    """

    tokens: list[int] = field(default_factory=list)
    accepted: int = 0
    error: Exception | None = None


def judge_blocks(blocks: Sequence[Block], logits: torch.Tensor, draft_ids: torch.Tensor | None) -> list[Verdict]:
    """Decides which drafts stand and which token follows them.

    Args:
        blocks (`Sequence[Block]`): One per request.
        logits (`torch.Tensor` of shape `(num_rows, vocab_size)`): Of all blocks.
        draft_ids (`torch.Tensor` of shape `(num_drafts,)`, *optional*): Of all blocks; None if there are none.

    Returns:
        `list[Verdict]`: In the order of `blocks`.
    """
    verdicts = [Verdict() for _ in blocks]
    together = [index for index, block in enumerate(blocks) if block.request.prepared.settings is not None]
    if together:
        _judge_together(blocks, together, logits, draft_ids, verdicts)
    for index, block in enumerate(blocks):
        if block.request.prepared.settings is None:
            verdicts[index] = _judge_alone(block, logits, draft_ids)
    return verdicts


def _judge_together(
    blocks: Sequence[Block],
    members: list[int],
    logits: torch.Tensor,
    draft_ids: torch.Tensor | None,
    verdicts: list[Verdict],
) -> None:
    chosen = _choose(blocks, members, logits, draft_ids)
    # The only transfer to the host of a round: what was chosen, and what had been drafted.
    host = (chosen if draft_ids is None else torch.cat([chosen, draft_ids.to(chosen.device)])).tolist()
    first_draft, vocab_size = chosen.shape[0], logits.shape[-1]
    place = 0
    for index in members:
        block = blocks[index]
        choice = host[place : place + block.num_rows]
        place += block.num_rows
        drafts = host[first_draft + block.drafts.start : first_draft + block.drafts.stop]
        accepted = count_leading_matches(drafts, choice)
        tokens = choice[: accepted + 1]
        if vocab_size in tokens:
            error = ValueError("The target's scores are not finite, so that no token can be drawn from them.")
            verdicts[index] = Verdict(error=error)
        else:
            verdicts[index] = Verdict(tokens, accepted)


def _choose(
    blocks: Sequence[Block], members: list[int], logits: torch.Tensor, draft_ids: torch.Tensor | None
) -> torch.Tensor:
    """The chosen token of each row of the blocks `members`, in their order, on the device of the logits."""
    groups: dict[tuple, list[int]] = {}
    for index in members:
        prepared = blocks[index].request.prepared
        groups.setdefault((prepared.do_sample, prepared.samples_drafts, prepared.settings), []).append(index)
    is_everything = len(groups) == 1 and len(members) == len(blocks)
    pieces: dict[int, torch.Tensor] = {}
    for (do_sample, _, settings), indices in groups.items():
        if not do_sample and not settings:
            if is_everything:
                return greedy_tokens(logits)
            chosen = greedy_tokens(logits[_rows_of([blocks[index] for index in indices], logits.device)])
            pieces.update(zip(indices, chosen.split([blocks[index].num_rows for index in indices]), strict=True))
            continue
        for chunk in _chunks(blocks, indices, logits.shape[-1]):
            chosen = _choose_alike([blocks[index] for index in chunk], logits, draft_ids)
            pieces.update(zip(chunk, chosen.split([blocks[index].num_rows for index in chunk]), strict=True))
    return torch.cat([pieces[index] for index in members])


def _rows_of(blocks: Sequence[Block], device: torch.device) -> torch.Tensor:
    rows = [row for block in blocks for row in range(block.rows.start, block.rows.stop)]
    return torch.tensor(rows, device=device)


def _chunks(blocks: Sequence[Block], indices: list[int], vocab_size: int) -> Iterator[list[int]]:
    """Blocks in runs of bounded size: scores in float32, probabilities and their sums exist for one run at a time."""
    limit = max(SCORES_CHUNK // vocab_size, 1)
    chunk: list[int] = []
    rows = 0
    for index in indices:
        if chunk and rows + blocks[index].num_rows > limit:
            yield chunk
            chunk, rows = [], 0
        chunk.append(index)
        rows += blocks[index].num_rows
    yield chunk


def _choose_alike(blocks: list[Block], logits: torch.Tensor, draft_ids: torch.Tensor | None) -> torch.Tensor:
    """The chosen token of each row of blocks with the same settings."""
    prepared, device = blocks[0].request.prepared, logits.device
    scores = logits[_rows_of(blocks, device)].float()
    if prepared.logits_processor:
        no_prefix = torch.zeros(scores.shape[0], 0, dtype=torch.long, device=device)
        scores = prepared.logits_processor(no_prefix, scores)
    if not prepared.do_sample:
        return greedy_tokens(scores)
    noise = torch.cat([block.noise for block in blocks if block.noise is not None]).to(device)
    probs = scores.softmax(dim=-1)
    drafted = [block for block in blocks if block.draft_probs is not None]
    if not drafted or draft_ids is None:
        return sample_tokens(probs, noise[:, RequestNoise.CHOICE])
    return _reject(blocks, probs, draft_ids.to(device), noise)


def _reject(blocks: list[Block], probs: torch.Tensor, draft_ids: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Rejection sampling of packed rows: per row the draft if it is kept, else what replaces it.

    A replacement never equals the draft that it replaces, so counting equal tokens counts kept drafts.
    """
    rows: list[int] = []
    ids, q = [], []
    begin = 0
    for block in blocks:
        if block.draft_probs is not None:
            rows.extend(range(begin, begin + block.num_rows - 1))
            ids.append(draft_ids[block.drafts])
            q.append(block.draft_probs.to(probs.device))
        begin += block.num_rows
    draft_rows = torch.tensor(rows, device=probs.device)
    candidates, drafted_probs, target_probs = torch.cat(ids), torch.cat(q), probs[draft_rows]
    kept = judge_drafts(candidates, drafted_probs, target_probs, noise[draft_rows, RequestNoise.ACCEPTANCE])
    probs[draft_rows] = replacement_probs(target_probs, drafted_probs)
    chosen = sample_tokens(probs, noise[:, RequestNoise.CHOICE])
    chosen[draft_rows] = torch.where(kept, candidates, chosen[draft_rows])
    return chosen


def _judge_alone(block: Block, logits: torch.Tensor, draft_ids: torch.Tensor | None) -> Verdict:
    """Runs a request's own processors, once per committed token and in order; whatever they raise is its own."""
    request, device = block.request, logits.device
    if draft_ids is None:
        drafts = torch.zeros(1, 0, dtype=torch.long, device=device)
    else:
        drafts = draft_ids[block.drafts][None].to(device)
    probs = None if block.draft_probs is None else block.draft_probs[None].to(device)
    noise = None
    if block.noise is not None:
        numbers = block.noise[None].to(device)
        noise = BlockNoise(numbers[..., RequestNoise.ACCEPTANCE], numbers[..., RequestNoise.CHOICE])
    try:
        verdict = request.chooser.choose(
            logits[block.rows][None],
            Proposal(drafts, probs, [block.num_rows]),
            request.sequences_on(device),
            [0],
            noise=noise,
        )
        if logits.shape[-1] in verdict.tokens[0]:
            raise ValueError("The processed scores are not finite, so that no token can be drawn from them.")
    except Exception as error:
        return Verdict(error=error)
    return Verdict(verdict.tokens[0], verdict.accepted[0])


def sample_drafts(
    request: GenerationRequest, logits: torch.Tensor, noise: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws a request's drafts from the drafter's distribution, shaped as far as the scores alone allow.

    Args:
        request (`GenerationRequest`): Whose drafts.
        logits (`torch.Tensor` of shape `(num_drafts, vocab_size)`): The drafter's.
        noise (`torch.Tensor` of shape `(>= num_drafts, 3)`): Numbers that decide, on the CPU.

    Returns:
        `tuple`: Draft ids `(num_drafts,)` and the probabilities they were drawn from `(num_drafts, vocab_size)`.
    """
    no_prefix = torch.zeros(logits.shape[0], 0, dtype=torch.long, device=logits.device)
    shaping = prefix_free_processors(request.prepared.logits_processor)
    probs = shaping(no_prefix, logits.float()).softmax(dim=-1)
    uniforms = noise[: logits.shape[0], RequestNoise.DRAFT].to(logits.device)
    # Scores that are not finite draw no token; whatever is put there is rejected.
    return sample_tokens(probs, uniforms).clamp(max=probs.shape[-1] - 1), probs
