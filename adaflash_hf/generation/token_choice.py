"""The target's verdict on a block: logits processors, greedy or sampled choice, acceptance, per row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers.generation import logits_process as processors
from transformers.generation.logits_process import LogitsProcessorList

from ..errors import UnsupportedGenerationError
from .acceptance import count_leading_matches, rejection_sample, sample_tokens
from .candidate_generator import Proposal


__all__ = ["BlockVerdict", "TokenChooser", "prefix_free_processors"]


def _classes(*names: str) -> tuple[type, ...]:
    """Processor classes that this transformers release has."""
    return tuple(getattr(processors, name) for name in names if hasattr(processors, name))


# Look at the scores alone, so all positions of a block can be processed at once.
PREFIX_FREE = _classes(
    "TemperatureLogitsWarper",
    "TopPLogitsWarper",
    "TopKLogitsWarper",
    "TopHLogitsWarper",
    "MinPLogitsWarper",
    "TypicalLogitsWarper",
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "InfNanRemoveLogitsProcessor",
    "LogitNormalization",
    "SuppressTokensLogitsProcessor",
)
# Look at the tokens of their own row only, so a row can be processed apart from its batch. The repetition penalty is
# not here: newer releases of transformers give it one padding length per row.
ROW_INDEPENDENT = PREFIX_FREE + _classes(
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "SequenceBiasLogitsProcessor",
    "NoBadWordsLogitsProcessor",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "ExponentialDecayLengthPenalty",
    "SuppressTokensAtBeginLogitsProcessor",
    "WatermarkLogitsProcessor",
)
# Carry state of the whole batch from step to step, which rows of different lengths would mix up.
BATCH_STATEFUL = _classes(
    "ClassifierFreeGuidanceLogitsProcessor",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor",
    "SynthIDTextWatermarkLogitsProcessor",
)


def prefix_free_processors(logits_processor: LogitsProcessorList) -> LogitsProcessorList:
    """The processors that depend on the scores alone; what the drafter's own distribution is shaped with."""
    return LogitsProcessorList([processor for processor in logits_processor if type(processor) in PREFIX_FREE])


@dataclass
class BlockVerdict:
    """The target's choice for every row of a verified block.

    Attributes:
        tokens (`list[list[int]]`): Per sequence: the accepted drafts and the token that follows them.
        accepted (`list[int]`): Per sequence: number of accepted drafts, bonus excluded.
        scores (`Sequence`): `scores[row][i]` are the processed scores of committed token i, shape `(vocab_size,)`.
    """

    tokens: list[list[int]]
    accepted: list[int]
    scores: Sequence[Sequence[torch.Tensor]] | torch.Tensor


class TokenChooser:
    """Applies logits processors and decides which drafts stand.

    Processors that read the preceding tokens are called once per committed token, in order, on exactly the tokens
    committed so far: the calls plain decoding would make. So stateful processors stay exact too.

    Args:
        logits_processor (`LogitsProcessorList`): As prepared by `generate()`.
        do_sample (`bool`): Sample, or take the argmax.
        batch_size (`int`): Sequences in the call.

    Raises:
        UnsupportedGenerationError: If a processor keeps batch state and the batch holds several sequences.
    """

    def __init__(self, logits_processor: LogitsProcessorList, do_sample: bool, batch_size: int):
        self.do_sample = do_sample
        self.processor = logits_processor
        self._is_prefix_free = all(type(processor) in PREFIX_FREE for processor in logits_processor)
        self._is_row_independent = all(type(processor) in ROW_INDEPENDENT for processor in logits_processor)
        stateful = [
            type(processor).__name__ for processor in logits_processor if isinstance(processor, BATCH_STATEFUL)
        ]
        if stateful and batch_size > 1:
            raise UnsupportedGenerationError(
                f"{stateful[0]} keeps the state of a whole batch from step to step, and this batch of {batch_size} "
                "advances by different numbers of tokens per row. Generate one prompt at a time, or without "
                "`assistant_model`."
            )

    @property
    def needs_float32(self) -> bool:
        """Whether scores are used for more than an argmax."""
        return self.do_sample or len(self.processor) > 0

    def choose(
        self,
        logits: torch.Tensor,
        proposal: Proposal,
        prefixes_of: Callable[[int, list[int]], torch.Tensor],
        rows: list[int],
        finished: Sequence[bool] = (),
    ) -> BlockVerdict:
        """Decides a block.

        Args:
            logits (`torch.Tensor` of shape `(batch_size, verify_length, vocab_size)`): The target's logits.
            proposal (`Proposal`): The drafts that were verified.
            prefixes_of (`Callable`): Gives what a processor sees, see [`SequenceBatch.prefixes`].
            rows (`list[int]`): Original batch index of each sequence.
            finished (`Sequence[bool]`, *optional*): Sequences that have ended, whose verdict nobody needs.

        Returns:
            `BlockVerdict`: Tokens, acceptance and scores.
        """
        if self.needs_float32:
            logits = logits.float()
        if self._is_prefix_free:
            return self._choose_at_once(logits, proposal)
        return self._choose_in_order(logits, proposal, prefixes_of, rows, finished)

    def _choose_at_once(self, logits: torch.Tensor, proposal: Proposal) -> BlockVerdict:
        batch, length, vocab = logits.shape
        if self.processor:
            flat = logits.reshape(-1, vocab)
            no_prefix = torch.zeros(flat.shape[0], 0, dtype=torch.long, device=flat.device)
            logits = self.processor(no_prefix, flat).reshape(batch, length, vocab)
        drafts = proposal.candidate_ids
        if self.do_sample and proposal.candidate_probs is not None and drafts.shape[1] > 0:
            accepted, following = rejection_sample(drafts, proposal.candidate_probs, logits.softmax(dim=-1))
            chosen = torch.cat([drafts, following[:, None]], dim=1).scatter(1, accepted[:, None], following[:, None])
        else:
            chosen = sample_tokens(logits.softmax(dim=-1)) if self.do_sample else logits.argmax(dim=-1)
            accepted = count_leading_matches(drafts, chosen)
        packed = torch.cat([accepted[:, None], chosen], dim=1).tolist()  # the only device synchronisation of a round
        return BlockVerdict([row[1 : row[0] + 2] for row in packed], [row[0] for row in packed], logits)

    def _choose_in_order(
        self,
        logits: torch.Tensor,
        proposal: Proposal,
        prefixes_of: Callable[[int, list[int]], torch.Tensor],
        rows: list[int],
        finished: Sequence[bool],
    ) -> BlockVerdict:
        drafts = proposal.candidate_ids.tolist()
        tokens, accepted, scores = [], [], []
        for index, row in enumerate(rows):
            row_tokens: list[int] = []
            row_scores: list[torch.Tensor] = []
            matched = 0
            is_finished = index < len(finished) and finished[index]
            for position in range(0 if is_finished else logits.shape[1]):
                processed = self._process(logits[index, position], row, prefixes_of(row, row_tokens))
                draft = drafts[index][position] if position < len(drafts[index]) else None
                probs = None if proposal.candidate_probs is None else proposal.candidate_probs[index]
                draft_probs = None if probs is None or draft is None else probs[position]
                token, is_accepted = self._pick(processed, draft, draft_probs)
                row_tokens.append(token)
                row_scores.append(processed)
                if not is_accepted:
                    break
                matched += 1
            tokens.append(row_tokens)
            accepted.append(matched)
            scores.append(row_scores)
        return BlockVerdict(tokens, accepted, scores)

    def _process(self, logits: torch.Tensor, row: int, prefixes: torch.Tensor) -> torch.Tensor:
        """Runs the processors for one position.

        Args:
            logits (`torch.Tensor` of shape `(vocab_size,)`): Raw logits.
            row (`int`): Original batch index of the sequence.
            prefixes (`torch.Tensor` of shape `(batch_size, length)`): Every row cut or padded to this row's length.

        Returns:
            `torch.Tensor` of shape `(vocab_size,)`: Processed scores.
        """
        if prefixes.shape[0] == 1 or self._is_row_independent:
            return self.processor(prefixes[row : row + 1], logits[None].clone())[0]
        # A processor may look its row up by batch index, so the row keeps its place among copies.
        return self.processor(prefixes, logits[None].repeat(prefixes.shape[0], 1))[row]

    def _pick(self, scores: torch.Tensor, draft: int | None, draft_probs: torch.Tensor | None) -> tuple[int, bool]:
        if not self.do_sample:
            token = int(scores.argmax())
            return token, token == draft
        probs = scores.softmax(dim=-1)
        if draft is None or draft_probs is None:
            token = int(sample_tokens(probs))
            return token, token == draft
        no_bonus = torch.stack([probs, probs])[None]  # a chain of one draft; its bonus is drawn at the next position
        draft_ids = torch.tensor([[draft]], device=scores.device)
        accepted, following = rejection_sample(draft_ids, draft_probs[None, None], no_bonus)
        return (draft, True) if int(accepted) else (int(following), False)
