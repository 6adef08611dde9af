"""The decoding loop behind `generate(assistant_model=drafter)`: draft, verify, accept, for ragged batches."""

from __future__ import annotations

import time
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

from .appending_cache import append_in_place
from .cache_rollback import check_cache_can_roll_back, has_linear_attention, working_cache, write_back
from .candidate_generator import AdaFlashCandidateGenerator, DraftContext, Proposal
from .compatibility import unwrap_model
from .drafter_hooks import RequestLog, hooks_of
from .length_policies import LengthPolicy, RoundContext, RoundOutcome
from .outputs import OutputCollector
from .padded_bench import PaddedRoundBench
from .request_checks import check_request
from .sequences import SequenceBatch, StepStreamer
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
        is_users_cache (`bool`): Whether the caller passed the cache, and so may go on using it.
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
        is_users_cache: bool = False,
    ):
        self.model = model
        self.drafter = drafter
        self.config = generation_config
        self.logits_processor = logits_processor
        self.length_policy = length_policy
        self.synced_gpus = synced_gpus
        self.stop_rules = StopRules(stopping_criteria)
        self.recorder = StatisticsRecorder(model.device)
        self._streamer = streamer
        self._samples_drafts = draft_proposal == "sample" and bool(generation_config.do_sample)
        self._is_users_cache = is_users_cache
        # A cache that outlives the call must keep all rows; one that does not may lose finished rows.
        self._keeps_rows = is_users_cache or bool(generation_config.return_dict_in_generate)
        self._caught_up = False

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
        cache = check_cache_can_roll_back(
            model_kwargs.get("cache", model_kwargs.get("past_key_values")), batch_size, bool(self.config.use_cache)
        )
        check_request(
            self.model,
            self.config,
            model_kwargs,
            input_ids,
            cache,
            self.logits_processor,
            self.synced_gpus,
            self._is_users_cache,
        )
        self.chooser = TokenChooser(self.logits_processor, bool(self.config.do_sample), batch_size)
        self.outputs = OutputCollector(self.config, batch_size)
        pad = 0 if self.config._pad_token_tensor is None else int(self.config._pad_token_tensor)
        self._sequences = SequenceBatch(input_ids, pad)
        self._steps = None if self._streamer is None else StepStreamer(self._streamer, batch_size, pad)
        hooks_of(self.drafter).add_policy(self.length_policy)
        self._log = RequestLog.start(self.drafter, batch_size)
        returned_cache: Cache | None = cache
        if batch_size > 1 and has_linear_attention(cache):
            self._decode_one_by_one(input_ids, model_kwargs)
            returned_cache = None
        else:
            working = working_cache(cache, self.model.config, batch_size, self._keeps_rows)
            self._decode(list(range(batch_size)), input_ids, model_kwargs, working, key=cache)
            if working is not cache and self._keeps_rows:
                write_back(working, cache)
        if self._steps is not None:
            self._steps.end()
        unwrap_model(self.drafter).last_generation_stats = self.recorder.finish()
        if self._log is not None:
            self._log.finish(input_ids, model_kwargs.get("attention_mask"), self._sequences, self.stop_rules)
        sequences = self._sequences.build()
        return self.outputs.build(sequences, returned_cache) if self.outputs.is_dict else sequences

    def _decode_one_by_one(self, input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> None:
        """Recurrent states cannot be realigned, so each row gets a cache of its own, which nobody can be given."""
        for row in range(input_ids.shape[0]):
            row_kwargs, row_ids = _single_row(model_kwargs, input_ids, row)
            cache = DynamicCache(config=self.model.config.get_text_config(decoder=True))
            append_in_place(cache)
            self._decode([row], row_ids, row_kwargs, cache, key=cache)

    def _generator(self, batch_size: int, cache: Cache) -> AdaFlashCandidateGenerator:
        warper = None
        if self._samples_drafts:
            shaping = prefix_free_processors(self.logits_processor)

            def warper(logits: torch.Tensor) -> torch.Tensor:
                return shaping(torch.zeros(logits.shape[0], 0, dtype=torch.long, device=logits.device), logits)

        generator = AdaFlashCandidateGenerator(
            self.drafter, self.model, self.length_policy, draft_warper=warper, recorder=self.recorder
        )
        generator.start(batch_size, _recall_context(cache, generator, batch_size))
        return generator

    def _decode(
        self, rows: list[int], input_ids: torch.Tensor, model_kwargs: dict[str, Any], cache: Cache, key: Cache
    ) -> None:
        """Decodes the sequences `rows`, which share `cache`, to their end. `key` is the cache the caller knows."""
        self.length_policy.prepare(PaddedRoundBench(self.model, self.drafter, len(rows)))
        generator = self._generator(len(rows), key)
        runner = TargetRunner(
            self.model,
            model_kwargs,
            cache,
            generator.config.target_layer_ids,
            self.recorder,
            output_hidden_states=self.outputs.wants_hidden_states,
            output_attentions=self.outputs.wants_attentions,
        )
        try:
            self._run_rounds(rows, input_ids, model_kwargs, runner, generator)
        except BaseException:
            runner.abandon()
            raise
        runner.close()
        if self._keeps_rows:
            _CONTEXTS[key] = (weakref.ref(generator.base_drafter), generator.context)

    def _run_rounds(
        self,
        rows: list[int],
        input_ids: torch.Tensor,
        model_kwargs: dict[str, Any],
        runner: TargetRunner,
        generator: AdaFlashCandidateGenerator,
    ) -> None:
        batch = _RaggedBatch(rows, self._prefill(runner, generator, rows, input_ids, model_kwargs))
        finished = self._start(batch)
        self._round_end_s = time.perf_counter()
        while self.model._has_unfinished_sequences(
            all(finished) and not self._lags(rows), self.synced_gpus, device=input_ids.device
        ):
            if not all(finished):
                if self._log is not None:
                    self._log.before_round()
                finished = self._round(runner, generator, batch, finished)
            elif self._lags(rows):
                self._catch_up(runner, generator, batch)
            else:
                self.model(input_ids=self._sequences.last_ids(rows[:1])[:, None], use_cache=False)
            if any(finished) and not all(finished) and not self._keeps_rows:
                finished = self._drop_finished(runner, generator, batch, finished)

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
        done = runner.num_slots
        if mask is None:
            positions = torch.arange(total, device=input_ids.device).expand(len(rows), -1)
            seen = positions.new_full((len(rows),), done)
        else:
            positions = (mask.long().cumsum(dim=-1) - 1).clamp(min=0)
            seen = mask[:, :done].long().sum(dim=-1)
        generator.context.truncate(seen)
        for outputs in runner.prefill(input_ids, total, self.config.prefill_chunk_size):
            end = runner.num_slots
            used = None if mask is None else mask[:, done:end].bool()
            generator.extend_context(outputs.hidden_states, positions[:, done:end], used)
            last_outputs = outputs if end == total else None
            done = end
            del outputs  # the next chunk must not find this one's hidden states still there
        for index, row in enumerate(rows):
            self.outputs.add_prefill_states(row, index, last_outputs)
        return last_outputs, positions[:, -1] + 1

    def _start(self, batch: _RaggedBatch) -> list[bool]:
        """Commits the token that the prefill itself predicts."""
        no_drafts = Proposal(batch.anchor_positions.new_zeros(len(batch.rows), 0), None, [1] * len(batch.rows))
        logits = batch.first_outputs.logits[:, -1:]
        verdict = self.chooser.choose(logits, no_drafts, self._sequences, batch.rows)
        batch.first_outputs = None
        return [self._commit(row, index, verdict, logits)[1] for index, row in enumerate(batch.rows)]

    def _commit(self, row: int, index: int, verdict: BlockVerdict, logits: torch.Tensor) -> tuple[int, bool]:
        """Appends to a sequence what its stop rules let through."""
        tokens = verdict.tokens[index]
        count, stop = self.stop_rules.cut(
            tokens,
            self._sequences.length(row),
            row,
            self._sequences.prefixes,
            lambda count: self.outputs.scores_so_far(row, verdict.scores[index][:count]),
        )
        self._sequences.append(row, tokens[:count])
        if self._steps is not None:
            self._steps.add(row, tokens[:count], stop)
        if self.outputs.wants_scores or self.outputs.wants_logits:
            self.outputs.add_scores(row, verdict.scores[index], logits[index], count)
        return count, stop

    def _round_context(self, batch: _RaggedBatch, finished: list[bool]) -> RoundContext:
        """What the length policy is told; no sequence may verify rows past its length limit, an ended one none."""
        lengths = [self._sequences.length(row) for row in batch.rows]
        return RoundContext(
            longest=[
                1 if done else self.stop_rules.remaining(length)
                for length, done in zip(lengths, finished, strict=True)
            ],
            num_active=len(batch.rows),
            is_packed=False,
            request_ids=batch.rows,
            num_generated=[length - self._sequences.prompt_length for length in lengths],
        )

    def _lags(self, rows: list[int]) -> bool:
        """Whether a cache that is kept lacks tokens of rows that ended before others."""
        return self._keeps_rows and len({self._sequences.length(row) for row in rows}) > 1 and not self._caught_up

    def _catch_up(self, runner: TargetRunner, generator: AdaFlashCandidateGenerator, batch: _RaggedBatch) -> None:
        """Caches the last token and the padding of rows that ended early, as plain decoding does along the way."""
        block_ids, counts = self._sequences.missing_from_cache(batch.rows)
        outputs = runner.catch_up(block_ids)
        self._learn(generator, batch, outputs, [min(count, 1) for count in counts])
        runner.commit(counts)
        self._caught_up = True

    def _round(
        self,
        runner: TargetRunner,
        generator: AdaFlashCandidateGenerator,
        batch: _RaggedBatch,
        finished: list[bool],
    ) -> list[bool]:
        """One draft and one verification of all sequences of the batch."""
        anchors = self._sequences.last_ids(batch.rows)
        context = self._round_context(batch, finished)
        proposal = generator.propose(anchors, batch.anchor_positions, max(context.longest), context)
        block_ids = torch.cat([anchors[:, None], proposal.candidate_ids], dim=1)
        outputs = runner.verify(block_ids)
        logits = outputs.logits.to(block_ids.device)
        verdict = self.chooser.choose(logits, proposal, self._sequences, batch.rows, finished)
        kept, now_finished, accepted_counts = [], [], []
        windows = runner.attention_windows if self.outputs.wants_attentions else None
        for index, row in enumerate(batch.rows):
            if finished[index]:
                kept.append(0)
                now_finished.append(True)
                accepted_counts.append(0)
                continue
            count, stop = self._commit(row, index, verdict, logits)
            accepted = min(verdict.accepted[index], count)
            self.recorder.count_round(block_ids.shape[1], accepted, count)
            accepted_counts.append(accepted)
            if self._log is not None:
                self._log.rounds[row].append((block_ids.shape[1], accepted))
            self.outputs.add_states(row, index, outputs, count, windows)
            kept.append(count)
            now_finished.append(stop)
        self._learn(generator, batch, outputs, kept)
        runner.commit(kept)
        self._report(context, proposal, accepted_counts, now_finished, finished, kept)
        return now_finished

    def _report(
        self,
        context: RoundContext,
        proposal: Proposal,
        accepted: list[int],
        ended: list[bool],
        ended_before: list[bool],
        kept: list[int],
    ) -> None:
        """Tells the length policy how the round went."""
        now_s = time.perf_counter()
        width = proposal.candidate_ids.shape[1] + 1
        self.length_policy.observe_round(
            context,
            RoundOutcome(
                verify_lengths=[0 if done else width for done in ended_before],
                accepted=accepted,
                ended=ended,
                drafted=proposal.drafted,
                committed=sum(kept),
                round_s=now_s - self._round_end_s,
            ),
        )
        self._round_end_s = now_s

    def _learn(
        self, generator: AdaFlashCandidateGenerator, batch: _RaggedBatch, outputs: Any, kept: list[int]
    ) -> None:
        """Hands the hidden states of the kept rows to the drafter and moves the anchors on."""
        most = max(kept)
        positions = batch.anchor_positions[:, None] + batch.offsets(most)
        used = None
        if min(kept) < most:
            kept_rows = torch.tensor(kept, device=positions.device)
            used = batch.offsets(most) < kept_rows[:, None]
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


class _RaggedBatch:
    """The sequences still in the batch: their original rows and where their anchors stand."""

    def __init__(self, rows: list[int], prefill: tuple[CausalLMOutputWithPast, torch.Tensor]):
        self.rows = list(rows)
        self.first_outputs: Any
        self.first_outputs, self.anchor_positions = prefill
        self._offsets = torch.arange(64, device=self.anchor_positions.device)

    def offsets(self, count: int) -> torch.Tensor:
        """0, 1, … `count` - 1."""
        if count > self._offsets.shape[0]:
            self._offsets = torch.arange(count, device=self._offsets.device)
        return self._offsets[:count]

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
    model_kwargs: dict[str, Any], input_ids: torch.Tensor, row: int
) -> tuple[dict[str, Any], torch.Tensor]:
    """One sequence of a batch without its padding, for targets whose state cannot be realigned."""
    batch_size = input_ids.shape[0]
    kwargs: dict[str, Any] = {}
    for name, value in model_kwargs.items():
        is_batched = isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape[0] == batch_size
        kwargs[name] = value[row : row + 1] if is_batched else value
    mask = kwargs.pop("attention_mask", None)
    ids = input_ids[row : row + 1]
    embeds = kwargs.get("inputs_embeds")
    visible = None
    if mask is not None:
        begin = int(mask[0].long().argmax())
        visible = mask[:, begin:]
        if not bool(visible.all()):
            kwargs["attention_mask"] = visible  # recurrent states go on over what is masked after the first token
        if embeds is not None:
            kwargs["inputs_embeds"] = embeds = embeds[:, begin:]
        if ids.shape[1] == mask.shape[1]:
            ids = ids[:, begin:]
    if kwargs.get("position_ids") is not None:
        length = ids.shape[1] if embeds is None else embeds.shape[1]
        ones = torch.ones(1, length, dtype=torch.long, device=ids.device) if visible is None else visible.long()
        kwargs["position_ids"] = ones.cumsum(dim=-1) - 1
    return kwargs, ids


def _recall_context(cache: Cache, generator: AdaFlashCandidateGenerator, batch_size: int) -> DraftContext | None:
    """The drafter's context of an earlier turn on the same cache, if drafter and rows are still the same."""
    drafter_ref, context = _CONTEXTS.pop(cache, (None, None))
    if context is None or drafter_ref is None or drafter_ref() is not generator.base_drafter:
        return None
    return context if context.positions.shape[0] == batch_size else None
