"""The target's verdict on a block: logits processors, greedy or sampled choice, acceptance, per row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers.generation import logits_process as processors
from transformers.generation.logits_process import LogitsProcessorList, PrefixConstrainedLogitsProcessor

from ..errors import UnsupportedGenerationError
from .acceptance import count_leading_matches, greedy_tokens, rejection_sample, sample_tokens
from .candidate_generator import Proposal
from .sequences import SequenceBatch


__all__ = ["BlockNoise", "BlockVerdict", "TokenChooser", "is_prefix_free", "prefix_free_processors"]


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


def is_prefix_free(logits_processor: LogitsProcessorList) -> bool:
    """Whether all processors depend on the scores alone, so that any rows may be processed together."""
    return all(type(processor) in PREFIX_FREE for processor in logits_processor)


@dataclass
class BlockNoise:
    """Numbers in [0, 1) that decide all draws about a block, so that they need no global generator.

    Attributes:
        acceptance (`torch.Tensor` of shape `(batch_size, verify_length)`): Whether a sampled draft is kept.
        choice (`torch.Tensor` of shape `(batch_size, verify_length)`): Which token is drawn at a position.
    """

    acceptance: torch.Tensor
    choice: torch.Tensor


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
    committed so far: the calls plain decoding would make. So stateful processors stay exact too. In a batch, rows of
    equal length share a call.

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
        self._is_prefix_free = is_prefix_free(logits_processor)
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
        sequences: SequenceBatch,
        rows: list[int],
        finished: Sequence[bool] | None = None,
        noise: BlockNoise | None = None,
    ) -> BlockVerdict:
        """Decides a block.

        Args:
            logits (`torch.Tensor` of shape `(batch_size, verify_length, vocab_size)`): The target's logits.
            proposal (`Proposal`): The drafts that were verified.
            sequences (`SequenceBatch`): What was committed before, for processors that read it.
            rows (`list[int]`): Which of `sequences` each row of `logits` belongs to.
            finished (`Sequence[bool]`, *optional*): Rows that have ended, whose verdict nobody needs.
            noise (`BlockNoise`, *optional*): Decides what is drawn; by default the global generator does.

        Returns:
            `BlockVerdict`: Tokens, acceptance and scores.
        """
        if self.needs_float32:
            logits = logits.float()
        if self._is_prefix_free:
            return self._choose_at_once(logits, proposal, noise)
        alive = [index for index in range(len(rows)) if finished is None or not finished[index]]
        return self._choose_in_order(logits, proposal, sequences, rows, alive, noise)

    def _choose_at_once(self, logits: torch.Tensor, proposal: Proposal, noise: BlockNoise | None) -> BlockVerdict:
        batch, length, vocab = logits.shape
        if self.processor:
            flat = logits.reshape(-1, vocab)
            no_prefix = torch.zeros(flat.shape[0], 0, dtype=torch.long, device=flat.device)
            logits = self.processor(no_prefix, flat).reshape(batch, length, vocab)
        drafts = proposal.candidate_ids
        num_drafts = drafts.shape[1]
        # Each branch ends in one `tolist`, the only device synchronisation of a round.
        if self.do_sample and proposal.candidate_probs is not None and num_drafts > 0:
            uniforms = None if noise is None else (noise.acceptance[:, :num_drafts], noise.choice)
            matches, following = rejection_sample(drafts, proposal.candidate_probs, logits.softmax(dim=-1), uniforms)
            packed = torch.cat([drafts, following[:, None], matches[:, None]], dim=1).tolist()
            accepted = [row[-1] for row in packed]
            tokens = [[*row[:count], row[num_drafts]] for row, count in zip(packed, accepted, strict=True)]
        else:
            chosen = greedy_tokens(logits) if not self.do_sample else self._draw(logits, noise)
            packed = torch.cat([chosen, drafts], dim=1).tolist()
            accepted = [count_leading_matches(row[length:], row) for row in packed]
            tokens = [row[: count + 1] for row, count in zip(packed, accepted, strict=True)]
        return BlockVerdict(tokens, accepted, logits)

    @staticmethod
    def _draw(logits: torch.Tensor, noise: BlockNoise | None) -> torch.Tensor:
        return sample_tokens(logits.softmax(dim=-1), None if noise is None else noise.choice)

    def _choose_in_order(
        self,
        logits: torch.Tensor,
        proposal: Proposal,
        sequences: SequenceBatch,
        rows: list[int],
        alive: list[int],
        noise: BlockNoise | None,
    ) -> BlockVerdict:
        tokens: list[list[int]] = [[] for _ in rows]
        accepted = [0] * len(rows)
        scores: list[list[torch.Tensor]] = [[] for _ in rows]
        while alive:
            lengths = {index: sequences.length(rows[index]) + len(tokens[index]) for index in alive}
            shortest = min(lengths.values())
            group = [index for index in alive if lengths[index] == shortest]
            positions = [len(tokens[index]) for index in group]
            prefixes = sequences.prefixes(shortest, {rows[index]: tokens[index] for index in group})
            processed = self._process(logits[group, positions], [rows[index] for index in group], prefixes)
            chosen, stands = self._pick(processed, proposal, group, positions, noise)
            for member, index in enumerate(group):
                tokens[index].append(chosen[member])
                scores[index].append(processed[member])
                accepted[index] += stands[member]
            ended = {index for member, index in enumerate(group) if not stands[member]}
            alive = [index for index in alive if index not in ended]
        return BlockVerdict(tokens, accepted, scores)

    def _process(self, scores: torch.Tensor, rows: list[int], prefixes: torch.Tensor) -> torch.Tensor:
        """Runs the processors for one step of some rows.

        Args:
            scores (`torch.Tensor` of shape `(len(rows), vocab_size)`): Raw logits.
            rows (`list[int]`): Rows of the batch that are at this step.
            prefixes (`torch.Tensor` of shape `(batch_size, length)`): Every row cut or padded to their length.

        Returns:
            `torch.Tensor` of shape `(len(rows), vocab_size)`: Processed scores.
        """
        is_whole_batch = len(rows) == prefixes.shape[0]
        own = prefixes if is_whole_batch else prefixes[rows]
        for processor in self.processor:
            if is_whole_batch or type(processor) in ROW_INDEPENDENT:
                scores = processor(own, scores)
            elif type(processor) is PrefixConstrainedLogitsProcessor:
                scores = torch.cat([self._constrain(processor, *step) for step in zip(rows, own, scores, strict=True)])
            else:
                # A processor may look its row up by batch index, so each row keeps its place.
                everyone = scores[:1].repeat(prefixes.shape[0], 1)
                everyone[rows] = scores
                scores = processor(prefixes, everyone)[rows]
        return scores

    @staticmethod
    def _constrain(
        processor: PrefixConstrainedLogitsProcessor, row: int, prefix: torch.Tensor, scores: torch.Tensor
    ) -> torch.Tensor:
        """Asks a user's `prefix_allowed_tokens_fn` about this row alone: about others it has no true prefix."""
        allowed = processor._prefix_allowed_tokens_fn
        return PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(row, ids), 1)(prefix[None], scores[None])

    def _pick(
        self,
        scores: torch.Tensor,
        proposal: Proposal,
        group: list[int],
        positions: list[int],
        noise: BlockNoise | None,
    ) -> tuple[list[int], list[bool]]:
        """Chooses a token per row, and says whether it is the row's draft, so that the next one can be looked at."""
        num_drafts = proposal.candidate_ids.shape[1]
        has_draft = torch.tensor([position < num_drafts for position in positions], device=scores.device)
        where = torch.tensor([group, positions], device=scores.device)[:, has_draft].unbind()
        drafts = torch.full((len(group),), -1, device=scores.device)
        drafts[has_draft] = proposal.candidate_ids[where]
        probs = scores.softmax(dim=-1) if self.do_sample else scores
        choice = None if noise is None else noise.choice[group, positions]
        chosen = sample_tokens(probs, choice) if self.do_sample else greedy_tokens(scores)
        if self.do_sample and proposal.candidate_probs is not None and len(drafts[has_draft]):
            # Chains of one draft; the bonus of an accepted one is drawn at the next step instead.
            p, x = probs[has_draft], drafts[has_draft]
            uniforms = None
            if noise is not None and choice is not None:
                uniforms = noise.acceptance[where][:, None], choice[has_draft, None].expand(-1, 2)
            matches, following = rejection_sample(
                x[:, None], proposal.candidate_probs[where][:, None], torch.stack([p, p], dim=1), uniforms
            )
            chosen[has_draft] = torch.where(matches > 0, x, following)
        return chosen.tolist(), (chosen == drafts).tolist()
