"""Single steps of `generate()`'s loop on a scratch batch, for policies that weigh costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import DynamicCache
from transformers.modeling_utils import PreTrainedModel

from .acceptance import greedy_tokens
from .appending_cache import append_in_place
from .candidate_generator import AdaFlashCandidateGenerator
from .compatibility import unwrap_model
from .draft_head import LikeliestTokens
from .engine_bench import cost_fingerprint
from .length_policies import FixedLengthPolicy
from .statistics import StatisticsRecorder
from .target_runner import TargetRunner


__all__ = ["PaddedRoundBench"]

# Context of each scratch row.
CONTEXT_TOKENS = 128


class PaddedRoundBench:
    """A [`RoundBench`] for padded batches, in which every sequence verifies as many rows as the longest.

    Args:
        target (`PreTrainedModel`): The target.
        drafter (`PreTrainedModel`): The drafter.
        max_requests (`int`): Sequences of the batch; they only become fewer.
    """

    is_packed = False
    can_cut_blocks = False

    def __init__(self, target: PreTrainedModel, drafter: PreTrainedModel, max_requests: int):
        self.max_requests = max_requests
        self._target, self._drafter = target, drafter
        self.drafter = unwrap_model(drafter)
        self.reads_likeliest = False
        self.longest_verify_length = self.drafter.config.draft_length + 1
        self._token_id = min(unwrap_model(target).get_input_embeddings().weight.shape[0] - 1, 5)
        self._batch: _ScratchBatch | None = None

    def fingerprint(self) -> dict[str, str]:
        """What the costs depend on; names the cached table."""
        return {**cost_fingerprint(self._target, self._drafter, self.reads_likeliest), "loop": "generate"}

    def run_target(self, verify_lengths: Sequence[int]) -> None:
        """Verifies as many rows of every sequence as the longest has, and projects their drafts before if that is
        still to be done."""
        self._batch_of(len(verify_lengths)).verify(max(verify_lengths))

    def run_draft(self, num_requests: int, longest: int | None = None) -> None:
        """Drafts whole blocks, up to their hidden states unless `reads_likeliest`, and waits for them."""
        self._batch_of(num_requests).draft()

    def _batch_of(self, size: int) -> _ScratchBatch:
        if self._batch is None or self._batch.size != size:
            self._batch = None  # gives its caches back first
            self._batch = _ScratchBatch(self._target, self._drafter, size, self._token_id, self.reads_likeliest)
        return self._batch

    def close(self) -> None:
        """Frees the scratch state."""
        self._batch = None


class _ScratchBatch:
    """Equal prompts, as far as `generate()` would have brought them by now."""

    @torch.no_grad()
    def __init__(
        self, target: PreTrainedModel, drafter: PreTrainedModel, size: int, token_id: int, reads_likeliest: bool
    ):
        self.size = size
        self._reads_likeliest = reads_likeliest
        device = unwrap_model(target).device
        recorder = StatisticsRecorder(device)
        self._generator = AdaFlashCandidateGenerator(drafter, target, FixedLengthPolicy(1), recorder=recorder)
        self._generator.start(size)
        prompt = torch.full((size, CONTEXT_TOKENS), token_id, device=device)
        kwargs: dict[str, Any] = {"attention_mask": torch.ones_like(prompt)}
        if unwrap_model(target)._supports_logits_to_keep():
            kwargs["logits_to_keep"] = 1
        cache = DynamicCache(config=unwrap_model(target).config.get_text_config(decoder=True))
        append_in_place(cache)
        self._runner = TargetRunner(target, kwargs, cache, self._generator.config.target_layer_ids, recorder)
        positions = torch.arange(CONTEXT_TOKENS, device=device).expand(size, -1)
        for outputs in self._runner.prefill(prompt, CONTEXT_TOKENS, None):
            self._generator.extend_context(outputs.hidden_states, positions)
        self._anchors = prompt[:, 0]
        self._anchor_positions = positions[:, -1] + 1
        self._hidden_states: torch.Tensor | None = None
        self._likeliest: LikeliestTokens | None = None

    @torch.no_grad()
    def draft(self) -> None:
        """One block for every sequence."""
        self._hidden_states = self._generator.draft_hidden_states(self._anchors, self._anchor_positions)
        self._hidden_states[0, 0, 0].item()
        if self._reads_likeliest:
            self._likeliest = self._generator.likeliest(self._hidden_states)
            self._likeliest.probabilities.tolist()

    @torch.no_grad()
    def verify(self, length: int) -> None:
        """One verification of `length` rows, of which the first is committed."""
        if self._hidden_states is None:
            self.draft()
        assert self._hidden_states is not None
        drafts = self._generator.project(
            self._hidden_states, [length] * self.size, self._anchors.device, self._likeliest
        )
        outputs = self._runner.verify(torch.cat([self._anchors[:, None], drafts.candidate_ids], dim=1))
        greedy_tokens(outputs.logits).tolist()
        self._generator.extend_context(outputs.hidden_states, self._anchor_positions[:, None])
        self._runner.commit([1] * self.size)
        self._anchor_positions = self._anchor_positions + 1
