"""The decoding loop behind `generate(assistant_model=drafter)`: draft, verify, accept, for ragged batches."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationConfig
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel

from .cache_rollback import check_cache_can_roll_back, has_linear_attention
from .candidate_generator import AdaFlashCandidateGenerator, DraftContext, Proposal
from .compatibility import unwrap_model
from .length_policies import LengthPolicy
from .outputs import OutputCollector
from .request_checks import check_request
from .statistics import StatisticsRecorder
from .stopping import StopRules
from .target_runner import TargetRunner
from .token_choice import BlockVerdict, TokenChooser, prefix_free_processors


if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer


__all__ = ["AdaFlashDecoding"]

# What the drafter knows of a conversation, kept as long as the target's cache of that conversation lives.
_CONTEXTS: weakref.WeakKeyDictionary[Cache, tuple[weakref.ref, DraftContext]] = weakref.WeakKeyDictionary()


class AdaFlashDecoding:
    """One speculative `generate()` call.

    Args:
        model (`PreTrainedModel`): The target.
        drafter (`PreTrainedModel`): The DFlash drafter, possibly wrapped.
        generation_config (`GenerationConfig`): As prepared by `generate()`.
        logits_processor (`LogitsProcessorList`): As prepared by `generate()`.
        stopping_criteria (`StoppingCriteriaList`): As prepared by `generate()`.
        length_policy (`LengthPolicy`): How many rows to verify.
        draft_proposal (`str`): `"argmax"` or `"sample"`, how drafts are chosen when sampling.
        streamer (`BaseStreamer`, *optional*): Receives every token.
        synced_gpus (`bool`): Whether all ranks must run the same number of forward passes.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        drafter: PreTrainedModel,
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        length_policy: LengthPolicy,
        draft_proposal: str = "argmax",
        streamer: BaseStreamer | None = None,
        synced_gpus: bool = False,
    ):
        self.model = model
        self.drafter = drafter
        self.config = generation_config
        self.logits_processor = logits_processor
        self.length_policy = length_policy
        self.streamer = streamer
        self.synced_gpus = synced_gpus
        self.stop_rules = StopRules(stopping_criteria)
        self.recorder = StatisticsRecorder(model.device)
        self._samples_drafts = draft_proposal == "sample" and bool(generation_config.do_sample)

    def run(self, input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> GenerateDecoderOnlyOutput | torch.Tensor:
        """Generates.

        Args:
            input_ids (`torch.Tensor` of shape `(batch_size, prompt_length)`): Left-padded prompts; length 0 when the
                prompt was given as embeddings.
            model_kwargs (`dict`): What `generate()` prepared for the target's forward.

        Returns:
            `GenerateDecoderOnlyOutput` or `torch.Tensor`: As `generate()` returns.
        """
        batch_size = input_ids.shape[0]
        cache = check_cache_can_roll_back(model_kwargs.get("cache", model_kwargs.get("past_key_values")), batch_size)
        check_request(self.model, self.config, model_kwargs, input_ids, cache, self.synced_gpus)
        self.chooser = TokenChooser(self.logits_processor, bool(self.config.do_sample), batch_size)
        self.outputs = OutputCollector(self.config, batch_size)
        pad = self.config._pad_token_tensor
        self._sequences = _Sequences(input_ids, 0 if pad is None else int(pad))
        # A cache that outlives the call must keep all rows; one that does not may lose finished rows.
        self._keeps_rows = (
            self.outputs.is_dict or getattr(cache, "_is_user_defined", False) or cache.get_seq_length() > 0
        )
        if batch_size > 1 and has_linear_attention(cache):
            for row in range(batch_size):
                row_kwargs, row_ids = _single_row(self.model, model_kwargs, input_ids, row)
                self._decode([row], row_ids, row_kwargs, DynamicCache(config=self.model.config))
        else:
            self._decode(list(range(batch_size)), input_ids, model_kwargs, cache)
        if self.streamer is not None:
            self.streamer.end()
        unwrap_model(self.drafter).last_generation_stats = self.recorder.finish()
        sequences = self._sequences.build()
        return self.outputs.build(sequences, cache) if self.outputs.is_dict else sequences

    def _generator(self, batch_size: int, cache: Cache) -> AdaFlashCandidateGenerator:
        warper = None
        if self._samples_drafts:
            shaping = prefix_free_processors(self.logits_processor)

            def warper(logits: torch.Tensor) -> torch.Tensor:
                return shaping(torch.zeros(logits.shape[0], 0, dtype=torch.long, device=logits.device), logits)

        generator = AdaFlashCandidateGenerator(
            self.drafter, self.model, self.length_policy, draft_warper=warper, recorder=self.recorder
        )
        generator.start(batch_size, _recall_context(cache, generator))
        return generator

    def _decode(self, rows: list[int], input_ids: torch.Tensor, model_kwargs: dict[str, Any], cache: Cache) -> None:
        """Decodes the sequences `rows`, which share `cache`, to their end."""
        generator = self._generator(len(rows), cache)
        hidden_state_ids = True if self.outputs.wants_hidden_states else generator.hidden_state_ids
        runner = TargetRunner(
            self.model, model_kwargs, cache, hidden_state_ids, self.outputs.wants_attentions, self.recorder
        )
        batch = _RaggedBatch(rows, self._prefill(runner, generator, rows, input_ids, model_kwargs))
        finished = self._start(batch)
        while self.model._has_unfinished_sequences(all(finished), self.synced_gpus, device=input_ids.device):
            if all(finished):
                self.model(input_ids=self._sequences.last_ids([rows[0]])[:, None], use_cache=False)
                continue
            finished = self._round(runner, generator, batch, finished)
            if any(finished) and not all(finished) and not self._keeps_rows:
                finished = self._drop_finished(runner, generator, batch, finished)
        if self._keeps_rows and len(rows) > 1:
            runner.left_align()
        if self._keeps_rows:
            _CONTEXTS[cache] = (weakref.ref(generator.base_drafter), generator.context)

    def _prefill(
        self,
        runner: TargetRunner,
        generator: AdaFlashCandidateGenerator,
        rows: list[int],
        input_ids: torch.Tensor,
        model_kwargs: dict[str, Any],
    ) -> tuple[CausalLMOutputWithPast, torch.Tensor]:
        """Runs the prompt; returns the last chunk's outputs and the position of the first new token per sequence."""
        total = _prompt_slots(input_ids, model_kwargs, self.config)
        mask = model_kwargs.get("attention_mask")
        if mask is None:
            positions = torch.arange(total, device=input_ids.device).expand(len(rows), -1)
        else:
            positions = (mask.long().cumsum(dim=-1) - 1).clamp(min=0)
        done = runner.num_slots
        with self.recorder.phase("prefill"):
            chunks = runner.prefill(input_ids, total, self.config.prefill_chunk_size)
        for outputs in chunks:
            end = done + outputs.hidden_states[generator.hidden_state_ids[0]].shape[1]
            used = None if mask is None else mask[:, done:end].bool()
            generator.extend_context(outputs.hidden_states, positions[:, done:end], used)
            for index, row in enumerate(rows):
                self.outputs.add_states(row, index, outputs, end - done, slots=None)
            done = end
        return chunks[-1], positions[:, -1] + 1

    def _start(self, batch: _RaggedBatch) -> list[bool]:
        """Commits the token that the prefill itself predicts."""
        no_drafts = Proposal(batch.anchor_positions.new_zeros(len(batch.rows), 0), None, [1] * len(batch.rows))
        logits = batch.first_outputs.logits[:, -1:]
        verdict = self.chooser.choose(logits, no_drafts, self._sequences.prefixes, batch.rows)
        finished = []
        for index, row in enumerate(batch.rows):
            count, stop = self._commit(row, verdict.tokens[index])
            self.outputs.add_scores(row, verdict.scores[index], logits[index], count)
            finished.append(stop)
        batch.first_outputs = None
        return finished

    def _commit(self, row: int, tokens: list[int]) -> tuple[int, bool]:
        """Appends to a sequence what its stop rules let through."""
        length = self._sequences.lengths[row]
        count, stop = self.stop_rules.cut(tokens, length, lambda extra: self._sequences.prefix(row, extra))
        self._sequences.append(row, tokens[:count])
        if self.streamer is not None:
            for token in tokens[:count]:
                self.streamer.put(torch.tensor([token]))
        return count, stop

    def _longest_verify(self, batch: _RaggedBatch, finished: list[bool], cache: Cache) -> int:
        """Rows that may still be verified: never past the length limit, nor past the end of a static cache."""
        remaining = [
            self.stop_rules.remaining(self._sequences.lengths[row])
            for row, done in zip(batch.rows, finished, strict=True)
            if not done
        ]
        return max(remaining) if isinstance(cache, DynamicCache) else min(remaining)

    def _round(
        self,
        runner: TargetRunner,
        generator: AdaFlashCandidateGenerator,
        batch: _RaggedBatch,
        finished: list[bool],
    ) -> list[bool]:
        """One draft and one verification of all sequences of the batch."""
        anchors = self._sequences.last_ids(batch.rows)
        proposal = generator.propose(
            anchors, batch.anchor_positions, self._longest_verify(batch, finished, runner.cache)
        )
        block_ids = torch.cat([anchors[:, None], proposal.candidate_ids], dim=1)
        slots = runner.num_slots
        with self.recorder.phase("verify"):
            outputs = runner.verify(block_ids)
        logits = outputs.logits.to(block_ids.device)
        verdict = self.chooser.choose(logits, proposal, self._sequences.prefixes, batch.rows)
        kept, now_finished = [], []
        for index, row in enumerate(batch.rows):
            if finished[index]:
                kept.append(0)
                now_finished.append(True)
                continue
            count, stop = self._commit_round(generator, row, index, verdict, block_ids.shape[1])
            self.outputs.add_scores(row, verdict.scores[index], logits[index], count)
            self.outputs.add_states(row, index, outputs, count, slots)
            kept.append(count)
            now_finished.append(stop)
        self._learn(generator, batch, outputs, kept)
        runner.commit(kept)
        return now_finished

    def _commit_round(
        self, generator: AdaFlashCandidateGenerator, row: int, index: int, verdict: BlockVerdict, verify_length: int
    ) -> tuple[int, bool]:
        count, stop = self._commit(row, verdict.tokens[index])
        accepted = min(verdict.accepted[index], count)
        self.recorder.count_round(verify_length, accepted, count)
        generator.length_policy.observe(verify_length, accepted)
        return count, stop

    def _learn(
        self, generator: AdaFlashCandidateGenerator, batch: _RaggedBatch, outputs: Any, kept: list[int]
    ) -> None:
        """Hands the hidden states of the kept rows to the drafter and moves the anchors on."""
        most = max(kept)
        offsets = torch.arange(most, device=batch.anchor_positions.device)
        positions = batch.anchor_positions[:, None] + offsets
        used = None
        if min(kept) < most:
            kept_rows = torch.tensor(kept, device=offsets.device)
            used = offsets[None, :] < kept_rows[:, None]
            batch.anchor_positions = batch.anchor_positions + kept_rows
        else:
            batch.anchor_positions = batch.anchor_positions + most
        generator.extend_context(outputs.hidden_states, positions, used)

    def _drop_finished(
        self,
        runner: TargetRunner,
        generator: AdaFlashCandidateGenerator,
        batch: _RaggedBatch,
        finished: list[bool],
    ) -> list[bool]:
        """Takes finished sequences out of the batch, so that they cost nothing any more."""
        alive = [index for index, done in enumerate(finished) if not done]
        if not runner.select_rows(alive):
            return finished
        generator.select_rows(alive)
        batch.select(alive)
        return [False] * len(alive)


class _Sequences:
    """Prompt and generated ids of all rows in one growing buffer."""

    def __init__(self, input_ids: torch.Tensor, pad_token_id: int):
        self._pad_token_id = pad_token_id
        self._ids = input_ids.clone()
        self.lengths = [input_ids.shape[1]] * input_ids.shape[0]

    def _reserve(self, length: int) -> None:
        if length > self._ids.shape[1]:
            capacity = max(length, self._ids.shape[1] + 256)
            grown = self._ids.new_full((self._ids.shape[0], capacity), self._pad_token_id)
            grown[:, : self._ids.shape[1]] = self._ids
            self._ids = grown

    def append(self, row: int, tokens: list[int]) -> None:
        length = self.lengths[row]
        self._reserve(length + len(tokens))
        self._ids[row, length : length + len(tokens)] = torch.tensor(tokens, device=self._ids.device)
        self.lengths[row] = length + len(tokens)

    def last_ids(self, rows: list[int]) -> torch.Tensor:
        """Last token of each row, shape `(len(rows),)`."""
        return torch.stack([self._ids[row, self.lengths[row] - 1] for row in rows])

    def prefix(self, row: int, extra: list[int]) -> torch.Tensor:
        """Ids of one row with `extra` appended, shape `(1, length)`."""
        return self.prefixes(row, extra)[row : row + 1]

    def prefixes(self, row: int, extra: list[int]) -> torch.Tensor:
        """All rows cut or padded to the length of `row` with `extra` appended, shape `(batch_size, length)`."""
        length = self.lengths[row] + len(extra)
        self._reserve(length)
        if extra:
            self._ids[row, self.lengths[row] : length] = torch.tensor(extra, device=self._ids.device)
        return self._ids[:, :length]

    def build(self) -> torch.Tensor:
        """Final ids, short rows padded on the right."""
        longest = max(self.lengths)
        self._reserve(longest)
        columns = torch.arange(longest, device=self._ids.device)
        beyond = columns[None, :] >= torch.tensor(self.lengths, device=self._ids.device)[:, None]
        return self._ids[:, :longest].masked_fill(beyond, self._pad_token_id)


class _RaggedBatch:
    """The sequences still in the batch: their original rows and where their anchors stand."""

    def __init__(self, rows: list[int], prefill: tuple[CausalLMOutputWithPast, torch.Tensor]):
        self.rows = list(rows)
        self.first_outputs: Any
        self.first_outputs, self.anchor_positions = prefill

    def select(self, indices: list[int]) -> None:
        self.rows = [self.rows[index] for index in indices]
        self.anchor_positions = self.anchor_positions[torch.tensor(indices, device=self.anchor_positions.device)]


def _prompt_slots(input_ids: torch.Tensor, model_kwargs: dict[str, Any], config: GenerationConfig) -> int:
    """Length of the whole prompt; longer than `input_ids` when a cache or embeddings hold part of it."""
    if (embeds := model_kwargs.get("inputs_embeds")) is not None:
        return embeds.shape[1]
    if (mask := model_kwargs.get("attention_mask")) is not None:
        return mask.shape[1]
    return max(getattr(config, "_mask_length", None) or 0, input_ids.shape[1])


def _single_row(
    model: PreTrainedModel, model_kwargs: dict[str, Any], input_ids: torch.Tensor, row: int
) -> tuple[dict[str, Any], torch.Tensor]:
    """One sequence of a batch without its padding, for targets whose state cannot be realigned."""
    batch_size = input_ids.shape[0]
    kwargs: dict[str, Any] = {}
    for name, value in model_kwargs.items():
        is_batched = isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape[0] == batch_size
        kwargs[name] = value[row : row + 1] if is_batched else value
    mask = kwargs.pop("attention_mask", None)
    ids = input_ids[row : row + 1]
    if mask is not None:
        visible = mask[0].bool()
        ids = ids[:, visible[-ids.shape[1] :]]
        if kwargs.get("inputs_embeds") is not None:
            kwargs["inputs_embeds"] = kwargs["inputs_embeds"][:, visible]
    if kwargs.get("position_ids") is not None:
        length = kwargs["inputs_embeds"].shape[1] if kwargs.get("inputs_embeds") is not None else ids.shape[1]
        kwargs["position_ids"] = torch.arange(length, device=ids.device)[None]
    return kwargs, ids


def _recall_context(cache: Cache, generator: AdaFlashCandidateGenerator) -> DraftContext | None:
    """The drafter's context of an earlier turn on the same cache, if it is still the same drafter."""
    drafter_ref, context = _CONTEXTS.pop(cache, (None, None))
    if context is None or drafter_ref is None or drafter_ref() is not generator.base_drafter:
        return None
    if context.positions.numel() and int(context.positions.max()) >= cache.get_seq_length():
        context.truncate(cache.get_seq_length())
    return context
