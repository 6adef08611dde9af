"""The worker: SGLang's for DFLASH, with the length head between draft and verification."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.lora.layers import unwrap_lora_layer
from sglang.srt.runtime_context import get_exec, get_parallel, get_schedule
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2, _commit_accept
from sglang.srt.speculative.ragged_verify import read_ragged_verify_mode
from sglang.srt.speculative.spec_tp_sync import SpecTpSyncSite

from ...errors import DrafterCheckpointError
from .compact_verify import CompactTarget, check_backend
from .draft_vocabulary import VocabularyDraftSampler, why_whole_vocabulary
from .models.adaflash_draft import AdaFlashDraftModel
from .planning import LengthPlanner, cap_verdicts
from .settings import PluginSettings, VerifyMode


__all__ = ["AdaFlashWorker"]

logger = logging.getLogger(__name__)


@dataclass
class _Round:
    """What is known of the round at hand."""

    verify_lengths: torch.Tensor | None = None
    uncapped: torch.Tensor | None = None


class AdaFlashWorker(DFlashWorkerV2):
    """Drafts as DFLASH does, verifies as many rows as the length head says.

    Args:
        server_args, gpu_id, nccl_port, target_worker: As SGLang gives them to every worker.
    """

    # Classes' attributes, because the base class looks unknown names up in the target's worker.
    _planner: LengthPlanner | None = None
    _compact: CompactTarget | None = None
    _round: _Round | None = None
    _vocabulary: VocabularyDraftSampler | None = None

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any):
        super().__init__(server_args, gpu_id, nccl_port, target_worker)
        if not isinstance(self.draft_model, AdaFlashDraftModel):
            raise DrafterCheckpointError(
                f"ADAFLASH was started with a drafter of type {type(self.draft_model).__name__}, expected "
                "AdaFlashDraftModel. Export it with: adaflash export DRAFTER --to sglang-plugin OUT, or use DFLASH."
            )
        mode = read_ragged_verify_mode().value
        self._planner = LengthPlanner(
            self.draft_model.length_head,
            int(self.block_size),
            mode,
            PluginSettings.from_environment(os.environ),
            get_schedule().max_running_requests,
        )
        if mode == VerifyMode.COMPACT:
            self._compact = CompactTarget(target_worker, int(self.block_size))
        self._watch_drafts()
        if self._target_tp_rank == 0:
            logger.info("%s", self._planner.describe())

    @property
    def target_worker(self) -> Any:
        """The target; in compact mode what packs its rows."""
        return self._target_worker if self._compact is None else self._compact

    def init_attention_backends(self) -> None:
        """Once SGLang has chosen them, checks that they can do what the mode asks for."""
        super().init_attention_backends()
        if self._compact is not None:
            runner = self._target_worker.model_runner
            check_backend(runner.attn_backend, self._need_mamba_verify_commit, get_parallel().attn_dp_enabled)
        self._init_vocabulary()

    def forward_batch_generation(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """One step of SGLang's scheduler; the result carries the verify lengths."""
        is_round = not (batch.forward_mode.is_extend() or batch.is_extend_in_batch or batch.forward_mode.is_idle())
        self._round = _Round() if is_round else None
        try:
            result = super().forward_batch_generation(batch, *args, **kwargs)
            if self._round is not None and self._round.verify_lengths is not None:
                result.cap_lens = self._round.verify_lengths.to(torch.int32)
                result.block_accept_lens = self._round.uncapped
            return result
        finally:
            self._round = None

    def renew_derived_weights(self) -> None:
        """After an update: everything that is a copy of weights is made anew."""
        if self._fused_kv_helper is not None:
            self._init_fused_kv_helper()
        if self._vocabulary is not None:
            self._vocabulary.renew(self._lm_head().weight)
        logger.info("AdaFlash plugin: copies of updated weights were renewed.")

    # Between draft and verification

    def _watch_drafts(self) -> None:
        """Looks at the drafter's hidden states, which a round makes in the middle of one long method."""
        runner = self.draft_model_runner
        forward = runner.forward

        def forward_and_plan(forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
            output = forward(forward_batch, *args, **kwargs)
            if self._round is not None and forward_batch.forward_mode.is_target_verify():
                self._plan_round(self._round, output.logits_output.hidden_states, forward_batch.batch_size)
            return output

        runner.forward = forward_and_plan

    def _plan_round(self, current: _Round, hidden_states: torch.Tensor, num_requests: int) -> None:
        assert self._planner is not None
        if self._planner.why_off is None:
            lengths = self._planner.verify_lengths(hidden_states[: num_requests * self.block_size])
            # Ranks agree on what they compute; this makes sure, as SGLang does for verdicts.
            self._tp_sync.sync(SpecTpSyncSite.DFLASH_ACCEPT_GREEDY, lengths)
            current.verify_lengths = lengths
        if self._compact is not None:
            on_host = [int(self.block_size)] * num_requests
            if current.verify_lengths is not None and self._planner.is_active(num_requests):
                # The one moment at which the host waits: the size of the packed forward is the host's to choose.
                on_host = current.verify_lengths.tolist()
            self._compact.plan(on_host)

    def _accept_block(self, *, candidates: torch.Tensor, prefix_lens: torch.Tensor, **kwargs: Any) -> Any:
        """SGLang's verdict on whole blocks, cut to the rows that were asked for."""
        verdict = super()._accept_block(candidates=candidates, prefix_lens=prefix_lens, **kwargs)
        if self._round is None or self._round.verify_lengths is None:
            return verdict
        accepted, committed, bonus, _, _ = verdict
        if self._compact is None:
            # What whole blocks would have brought, which SGLang reports beside what was kept.
            self._round.uncapped = committed.clone()
        accepted, bonus = cap_verdicts(candidates, accepted, bonus, self._round.verify_lengths)
        out_tokens, committed = _commit_accept(candidates, accepted, bonus)
        return accepted, committed, bonus, out_tokens, prefix_lens + committed.to(prefix_lens.dtype)

    # Draft vocabulary

    def _lm_head(self) -> Any:
        return unwrap_lora_layer(getattr(self._target_worker.model_runner.model, "lm_head", None))

    def _init_vocabulary(self) -> None:
        token_ids, lm_head = self.draft_model.draft_token_ids, self._lm_head()
        reason = why_whole_vocabulary(token_ids, lm_head, int(get_parallel().tp_group.world_size))
        if reason is None:
            self._vocabulary = VocabularyDraftSampler(token_ids, lm_head.weight, int(self.block_size))
        elif token_ids is not None and self._target_tp_rank == 0:
            logger.warning("AdaFlash drafts among all tokens, not the %d it should: %s.", len(token_ids), reason)

    def _greedy_sample_from_vocab_parallel_head(self, *, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if self._vocabulary is None:
            return super()._greedy_sample_from_vocab_parallel_head(hidden_states=hidden_states, **kwargs)
        return self._vocabulary.argmax(hidden_states)

    def _maybe_build_draft_sampler(self) -> Any:
        # None where SGLang keeps sampling out of the graph, for reasons of its own.
        sampler = super()._maybe_build_draft_sampler()
        if sampler is None or self._vocabulary is None:
            return sampler
        self._vocabulary.reserve(max(get_exec().graph.cuda_graph_config.decode.bs))
        return self._vocabulary
