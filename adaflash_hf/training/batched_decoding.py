"""Plain decoding of many prompts at once, for making training data.

Scope: one batch of prompts to their full responses with a target whose own text is wanted, greedy or sampled at a
temperature. A row that has ended leaves the batch at once: the last running row takes its place in the caches, which
copies one row instead of all, so no step pays for finished rows. Not covered: logits processors, stop strings (use
`generate()`), and refilling the batch with new prompts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel, TopPLogitsWarper
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ..errors import InvalidInputError
from ..generation.acceptance import greedy_tokens
from ..generation.context_features import concatenate_context_features, forward_with_features
from ..generation.target_runner import cache_argument_name


__all__ = [
    "DecodedResponse",
    "DecodingSettings",
    "PreallocatedLayer",
    "decode_batch",
    "eos_token_ids_of",
    "likeliest_tokens",
]


@dataclass(frozen=True)
class DecodingSettings:
    """
    What to decode and what to keep of it.

    Attributes:
        max_new_tokens: Longest response, in tokens.
        eos_token_ids: Tokens that end a response; the one that did is part of it.
        temperature: 0 is greedy; above, tokens are sampled.
        top_p: When sampling, only from the likeliest tokens that have this much probability together.
        teacher_top_k: How many of the target's likeliest tokens to keep at each response position; 0 keeps none.
        capture_layer_ids: Target layers whose outputs to keep, zero-based; empty keeps none.
    """

    max_new_tokens: int
    eos_token_ids: tuple[int, ...] = ()
    temperature: float = 0.0
    top_p: float = 1.0
    teacher_top_k: int = 0
    capture_layer_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise InvalidInputError(f"`max_new_tokens` is {self.max_new_tokens}; it must be at least 1.")
        if not 0 <= self.temperature < math.inf:
            raise InvalidInputError(f"`temperature` is {self.temperature}; it must be 0 (greedy) or a number above.")
        if not 0 < self.top_p <= 1:
            raise InvalidInputError(f"`top_p` is {self.top_p}; it must be above 0 and at most 1 (all tokens).")
        if self.top_p < 1 and self.temperature == 0:
            raise InvalidInputError(
                f"`top_p` is {self.top_p}, but `temperature` is 0, which is greedy; leave `top_p` out, or sample."
            )


@dataclass(frozen=True)
class DecodedResponse:
    """
    The target's response to one prompt. Tensors are on the CPU.

    Attributes:
        response_ids: `[n]`, int32, a final end token included.
        finished: Whether it ended by itself, not at `max_new_tokens`.
        teacher_ids: `[n, k]`, int32, likeliest first, or None.
        teacher_log_probs: `[n, k]`, float16, at temperature 1, or None.
        features: `[prompt + n - 1, layers * hidden]` in the target's dtype, or None. The last token was never run.
    """

    response_ids: torch.Tensor
    finished: bool
    teacher_ids: torch.Tensor | None = None
    teacher_log_probs: torch.Tensor | None = None
    features: torch.Tensor | None = None


class PreallocatedLayer(DynamicLayer):
    """
    Keys and values in a buffer of final size, so that a step writes one slot instead of copying everything before.

    It also stands in for sliding-window layers: the window is in the mask, and every row keeps all its slots.

    Args:
        capacity (`int`):
            Slots per row.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.rows = self.length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate the buffers for as many rows as the prefill has."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.rows = key_states.shape[0]
        self._keys, self._values = (
            states.new_empty(*states.shape[:2], self.capacity, states.shape[-1])
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append `[rows, heads, new, D]` states and return views of all slots in use."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        begin, self.length = self.length, self.length + key_states.shape[-2]
        self._keys[: self.rows, :, begin : self.length] = key_states
        self._values[: self.rows, :, begin : self.length] = value_states
        self._set_views()
        return self.keys, self.values

    def get_seq_length(self, *args: Any) -> int:
        """Slots in use."""
        return self.length

    def keep_rows(self, moves: Sequence[tuple[int, int]], rows: int) -> None:
        """
        Copy rows into the places of ended ones and forget the rest.

        Args:
            moves (`Sequence[tuple[int, int]]`):
                Pairs of destination and source.
            rows (`int`):
                How many rows remain.
        """
        for destination, source in moves:
            for states in (self._keys, self._values):
                states[destination, :, : self.length] = states[source, :, : self.length]
        self.rows = rows
        self._set_views()

    def _set_views(self) -> None:
        self.keys = self._keys[: self.rows, :, : self.length]
        self.values = self._values[: self.rows, :, : self.length]


def eos_token_ids_of(target_model: PreTrainedModel) -> tuple[int, ...]:
    """End tokens of a target, as `generate()` would use them."""
    ids = target_model.generation_config.eos_token_id
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)


def likeliest_tokens(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """
    What is kept of a distribution for training.

    Args:
        logits (`torch.Tensor` of shape `[n, V]`):
            In float32.
        top_k (`int`):
            Tokens of each row.

    Returns:
        `tuple`: ids, int32, and log-probabilities, float16, both `[n, top_k]`, likeliest first.
    """
    top = logits.topk(top_k, dim=-1)
    return top.indices.int(), (top.values - logits.logsumexp(dim=-1, keepdim=True)).half()


@torch.inference_mode()
def decode_batch(
    target_model: PreTrainedModel,
    prompt_ids: Sequence[Sequence[int]],
    settings: DecodingSettings,
    generator: torch.Generator | None = None,
) -> list[DecodedResponse]:
    """
    Decode one batch of prompts to the end.

    Args:
        target_model (`PreTrainedModel`):
            A decoder-only model in evaluation mode.
        prompt_ids (`Sequence[Sequence[int]]`):
            Prompts of any lengths; memory and time go with the longest.
        settings (`DecodingSettings`):
            What to decode and what to keep.
        generator (`torch.Generator`, *optional*):
            Source of randomness on the target's device when sampling.

    Returns:
        `list[DecodedResponse]`: in the order of the prompts.
    """
    if not prompt_ids or any(len(ids) == 0 for ids in prompt_ids):
        raise InvalidInputError(
            f"`prompt_ids` has lengths {[len(ids) for ids in prompt_ids]}; give one or more prompts, none empty."
        )
    batch = _RunningBatch(target_model, prompt_ids, settings)
    logits = batch.prefill()
    for _ in range(settings.max_new_tokens):
        tokens = batch.choose(logits, generator)
        tokens = batch.drop_ended(tokens)
        if batch.is_done:
            break
        logits = batch.step(tokens)
    return list(batch.responses())


class _RunningBatch:
    """Rows still running are the first `live` of every per-row tensor; `order` says which prompts they belong to."""

    def __init__(
        self, target_model: PreTrainedModel, prompt_ids: Sequence[Sequence[int]], settings: DecodingSettings
    ) -> None:
        self.model, self.settings, device = target_model, settings, target_model.device
        self.prompt_lengths = torch.tensor([len(ids) for ids in prompt_ids], device=device)
        rows, self.width = len(prompt_ids), max(map(len, prompt_ids))
        self.input_ids = torch.zeros(rows, self.width, dtype=torch.long, device=device)
        self.slot_mask = torch.ones(rows, self.width + settings.max_new_tokens, dtype=torch.long, device=device)
        for row, ids in enumerate(prompt_ids):  # left padding: all rows decode into the same slot
            self.input_ids[row, self.width - len(ids) :] = torch.tensor(ids, device=device)
            self.slot_mask[row, : self.width - len(ids)] = 0
        self.live, self.steps = rows, 0
        self.order = torch.arange(rows, device=device)
        self.lengths = torch.zeros(rows, dtype=torch.long, device=device)
        self.finished = torch.zeros(rows, dtype=torch.bool, device=device)
        self.tokens = torch.zeros(rows, settings.max_new_tokens, dtype=torch.long, device=device)
        self.eos = torch.tensor(settings.eos_token_ids, dtype=torch.long, device=device)
        self.cache = _build_cache(target_model, self.width + settings.max_new_tokens)
        self._cache_name = cache_argument_name(target_model)
        self._features: torch.Tensor | None = None
        self._nucleus = TopPLogitsWarper(settings.top_p) if settings.top_p < 1 else None
        shape = (rows, settings.max_new_tokens, settings.teacher_top_k)
        self._teacher_ids = torch.zeros(shape, dtype=torch.int32, device=device)
        self._teacher_log_probs = torch.zeros(shape, dtype=torch.float16, device=device)

    @property
    def is_done(self) -> bool:
        return self.live == 0 or self.steps == self.settings.max_new_tokens

    def prefill(self) -> torch.Tensor:
        """Run the prompts; returns logits `[live, V]` of the first response token."""
        positions = (self.slot_mask[:, : self.width].cumsum(1) - 1).clamp(min=0)
        logits, features = self._forward(self.input_ids, positions)
        if features is not None:
            slots = self.width + self.settings.max_new_tokens - 1
            self._features = features.new_empty(self.live, slots, features.shape[-1])
            for row, length in enumerate(self.prompt_lengths.tolist()):
                self._features[row, :length] = features[row, self.width - length :]
        return logits

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Run the tokens `[live]` chosen last; returns logits `[live, V]`."""
        prompts = self.order[: self.live]
        positions = self.prompt_lengths[prompts] + self.steps - 1
        logits, features = self._forward(tokens[:, None], positions[:, None])
        if features is not None and self._features is not None:
            self._features[prompts, positions] = features[:, 0]
        return logits

    def choose(self, logits: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
        """Pick the next token of each running row and keep it with the teacher's likeliest."""
        prompts = self.order[: self.live]
        logits = logits.float()
        if self.settings.teacher_top_k:
            ids, log_probs = likeliest_tokens(logits, self.settings.teacher_top_k)
            self._teacher_ids[prompts, self.steps] = ids
            self._teacher_log_probs[prompts, self.steps] = log_probs
        if self.settings.temperature > 0:
            logits = logits / self.settings.temperature
            if self._nucleus is not None:
                logits = self._nucleus(torch.empty(0), logits)
            probabilities = torch.softmax(logits, dim=-1)
            tokens = torch.multinomial(probabilities, 1, generator=generator)[:, 0]
        else:
            tokens = greedy_tokens(logits)
        self.tokens[prompts, self.steps] = tokens
        self.lengths[prompts] += 1
        self.steps += 1
        return tokens

    def drop_ended(self, tokens: torch.Tensor) -> torch.Tensor:
        """Take rows that just ended out of the batch; returns the tokens of the others."""
        ended = torch.isin(tokens, self.eos)
        ended_rows = ended.nonzero()[:, 0].tolist()
        if not ended_rows:
            return tokens
        self.finished[self.order[: self.live][ended]] = True
        remaining = self.live - len(ended_rows)
        # The running rows behind the new end move into the gaps before it.
        movable = [row for row in range(remaining, self.live) if row not in set(ended_rows)]
        moves = list(zip([row for row in ended_rows if row < remaining], movable, strict=True))
        for destination, source in moves:
            for state in (self.order, self.slot_mask, tokens):
                state[destination] = state[source]
        self.live = remaining
        if remaining:
            self._keep_cache_rows(moves)
        return tokens[:remaining]

    def responses(self) -> Iterator[DecodedResponse]:
        """What was decoded, prompt by prompt."""
        features = None if self._features is None else self._features.cpu()
        tokens, lengths, finished = self.tokens.int().cpu(), self.lengths.tolist(), self.finished.tolist()
        teacher_ids, teacher_log_probs = self._teacher_ids.cpu(), self._teacher_log_probs.cpu()
        has_teacher = self.settings.teacher_top_k > 0
        for row, (length, prompt) in enumerate(zip(lengths, self.prompt_lengths.tolist(), strict=True)):
            yield DecodedResponse(
                response_ids=tokens[row, :length],
                finished=finished[row],
                teacher_ids=teacher_ids[row, :length] if has_teacher else None,
                teacher_log_probs=teacher_log_probs[row, :length] if has_teacher else None,
                features=None if features is None else features[row, : prompt + length - 1],
            )

    def _forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits `[live, V]` of the last position and, if wanted, features `[live, new, layers * hidden]`."""
        layer_ids = self.settings.capture_layer_ids
        output = forward_with_features(
            self.model,
            layer_ids,
            input_ids=input_ids,
            attention_mask=self.slot_mask[: self.live, : self.width + self.steps],
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_name: self.cache},
        )
        features = None
        if layer_ids:
            depth = self.model.config.get_text_config().num_hidden_layers
            features = concatenate_context_features(output.hidden_states, layer_ids, depth)
        return output.logits[:, -1], features

    def _keep_cache_rows(self, moves: Sequence[tuple[int, int]]) -> None:
        index = None
        for layer in self.cache.layers:
            if isinstance(layer, PreallocatedLayer):
                layer.keep_rows(moves, self.live)
                continue
            if index is None:
                rows = list(range(self.live))
                for destination, source in moves:
                    rows[destination] = source
                index = torch.tensor(rows, device=self.order.device)
            # Recurrent states are small and of fixed size: selecting copies them all, which is cheap.
            layer.reorder_cache(index)


def _build_cache(target_model: PreTrainedModel, capacity: int) -> DynamicCache:
    cache = DynamicCache(config=target_model.config)
    for index, layer in enumerate(cache.layers):
        if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
            cache.layers[index] = PreallocatedLayer(capacity)
    if not cache.layers:
        # Some configurations do not say how many layers need a cache; transformers then adds them as they come.
        layers = target_model.config.get_text_config().num_hidden_layers
        cache.layers = [PreallocatedLayer(capacity) for _ in range(layers)]
    return cache
