"""Runs the target: prefill, verification of drafted blocks, and the roll-back of what was rejected."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer, StaticLayer
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel

from ..errors import InvalidInputError
from .cache_rollback import (
    RecurrentSnapshot,
    has_linear_attention,
    remove_slots,
    remove_slots_beyond,
    restore_recurrent,
    rows_by_shift,
    select_cache_rows,
    shift_rows,
    start_recording,
    stop_recording,
    take_recurrent_snapshot,
)
from .context_features import forward_with_features
from .grouped_attention import GroupedAttention
from .statistics import StatisticsRecorder
from .step_bounds import StepBounds


__all__ = ["TargetRunner", "cache_argument_name"]

# Belong to the prompt as a whole: consumed by the prefill, meaningless for a block of new tokens.
PROMPT_ONLY_KWARGS = (
    "attention_mask",
    "position_ids",
    "inputs_embeds",
    "token_type_ids",
    "mm_token_type_ids",
    "logits_to_keep",
    "cache",
    "past_key_values",
    "cache_position",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
)


def cache_argument_name(model: PreTrainedModel) -> str:
    """The forward argument that carries the cache: `cache` since transformers 5.24, `past_key_values` before."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


class TargetRunner:
    """The target and its cache for one batch of sequences.

    All rows end at the same cache slot: after a round in which rows accepted different numbers of tokens, the rows
    that accepted fewer are moved right and the slots freed on the left are masked. This is ordinary left padding, so
    every attention implementation and sliding window stays exact.

    Args:
        model (`PreTrainedModel`): The target.
        model_kwargs (`dict`): What `generate()` prepared for the forward pass.
        cache (`Cache`): Empty, or warm from an earlier call.
        layer_ids (`Sequence[int]`): Layers whose outputs each forward keeps.
        recorder (`StatisticsRecorder`): Counts forwards and time.
        output_hidden_states (`bool`, defaults to `False`): Whether those of all layers are asked for.
        output_attentions (`bool`, defaults to `False`): Whether attention weights are asked for.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        model_kwargs: dict[str, Any],
        cache: Cache,
        layer_ids: Sequence[int],
        recorder: StatisticsRecorder,
        *,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
    ):
        self.model = model
        self.cache = cache
        self.recorder = recorder
        self._attention = GroupedAttention(model)
        self._step_bounds = StepBounds(model)
        self._cache_name = cache_argument_name(model)
        self._prompt_kwargs = model_kwargs
        self._step_kwargs = {key: value for key, value in model_kwargs.items() if key not in PROMPT_ONLY_KWARGS}
        self._layer_ids = () if output_hidden_states else layer_ids
        self._outputs_kwargs = {"output_hidden_states": True} if output_hidden_states else {}
        if output_attentions:
            self._outputs_kwargs["output_attentions"] = True
        self._is_recurrent = has_linear_attention(cache)
        self._has_sliding_window = any(isinstance(layer, DynamicSlidingWindowLayer) for layer in cache.layers)
        self._recording: list[DynamicSlidingWindowLayer] = []
        self._slot_mask: torch.Tensor | None = model_kwargs.get("attention_mask")
        self._device = torch.device("cpu")  # of the ids, known from the prompt on
        self._cached: list[int] = []  # slots of each row that count, the prompt's own padding included
        self._next_position: torch.Tensor | None = None  # (..., batch_size, 1), absent if the model takes no positions
        self._block: torch.Tensor | None = None
        self._steps: torch.Tensor | None = None
        self._snapshots: list[RecurrentSnapshot] = []

    @property
    def num_slots(self) -> int:
        """Cache slots in use, masked ones included."""
        # Of a static cache it is a tensor that the next forward changes in place.
        return int(self.cache.get_seq_length())

    @property
    def attention_windows(self) -> list[int | None] | None:
        """Cache slots that one row sees at most, per attention layer; None if every row sees the whole buffer."""
        if any(isinstance(layer, StaticLayer) for layer in self.cache.layers):
            return None
        layers = [layer for layer in self.cache.layers if isinstance(layer, DynamicLayer)]
        return [layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None for layer in layers]

    def _forward(self, input_ids: torch.Tensor, **kwargs: Any) -> CausalLMOutputWithPast:
        inputs = self.model.prepare_inputs_for_generation(
            input_ids, **{self._cache_name: self.cache}, use_cache=True, **kwargs, **self._step_kwargs
        )
        # Some models prepare themselves for the logits of one row, which is all that plain decoding wants.
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = kwargs.get("logits_to_keep", 0)
        self.recorder.count_target_forward()
        with self._attention.active():
            return forward_with_features(self.model, self._layer_ids, **inputs, **self._outputs_kwargs)

    def prefill(
        self, input_ids: torch.Tensor, total_slots: int, chunk_size: int | None
    ) -> Iterator[CausalLMOutputWithPast]:
        """Runs the prompt, or what a warm cache does not hold of it yet, chunk by chunk.

        Args:
            input_ids (`torch.Tensor` of shape `(batch_size, sequence_length)`):
                Prompt ids; may be shorter than `total_slots` when only new tokens or embeddings were passed.
            total_slots (`int`): Length of the whole prompt, cached part included.
            chunk_size (`int`, *optional*): Rows per forward pass.

        Yields:
            `CausalLMOutputWithPast`: The output of each chunk, in order; logits of its last row only.

        Raises:
            InvalidInputError: If the cache already holds the whole prompt.
        """
        new_rows = total_slots - self.num_slots
        if new_rows < 1:
            raise InvalidInputError(
                f"`cache` already holds {self.num_slots} tokens but the prompt has {total_slots}, so there is nothing "
                "left to predict from. Crop the cache by at least one token, or append new tokens to the prompt."
            )
        chunk_size = chunk_size or new_rows
        for begin in range(0, new_rows, chunk_size):
            rows_left = new_rows - begin
            with self.recorder.phase("prefill"):
                outputs = self._prefill_chunk(input_ids, rows_left, min(chunk_size, rows_left), first=begin == 0)
            yield outputs
            del outputs  # the next chunk must not find this one's hidden states still there
        self._device = input_ids.device
        self._cached = [total_slots] * input_ids.shape[0]
        if len(self._cached) > 1 and self._slot_mask is None:
            self._slot_mask = torch.ones(len(self._cached), total_slots, dtype=torch.long, device=input_ids.device)
        # Only now: recording during the prefill would keep the whole prompt in sliding-window layers.
        self._recording = start_recording(self.cache)
        position_ids = self._prompt_kwargs.get("position_ids")
        self._next_position = None if position_ids is None else position_ids[..., -1:] + 1

    def _prefill_chunk(
        self, input_ids: torch.Tensor, rows_left: int, rows: int, first: bool
    ) -> CausalLMOutputWithPast:
        end = self.num_slots + rows
        kwargs: dict[str, Any] = {"is_first_iteration": first}
        if "logits_to_keep" in self._prompt_kwargs:
            kwargs["logits_to_keep"] = 1

        def columns(tensor: torch.Tensor) -> torch.Tensor:
            """This chunk's columns of a tensor whose last `rows_left` columns are still to do."""
            begin = tensor.shape[-1] - rows_left
            return tensor[..., begin : begin + rows]

        if self._slot_mask is not None:
            kwargs["attention_mask"] = self._slot_mask[:, :end]
        if (position_ids := self._prompt_kwargs.get("position_ids")) is not None:
            kwargs["position_ids"] = columns(position_ids)
        for name in ("token_type_ids", "mm_token_type_ids"):
            if (ids := self._prompt_kwargs.get(name)) is not None:
                kwargs[name] = columns(ids)
        if (embeds := self._prompt_kwargs.get("inputs_embeds")) is not None:
            begin = embeds.shape[1] - rows_left
            kwargs["inputs_embeds"] = embeds[:, begin : begin + rows]
            kwargs["is_first_iteration"] = True  # the flag that makes transformers read the embeddings at all
            return self._forward(input_ids, **kwargs)
        return self._forward(columns(input_ids), **kwargs)

    def verify(self, block_ids: torch.Tensor) -> CausalLMOutputWithPast:
        """Runs a block of `[anchor, draft, …]` rows on top of the cache.

        Args:
            block_ids (`torch.Tensor` of shape `(batch_size, verify_length)`): Anchor and drafts.

        Returns:
            `CausalLMOutputWithPast`: Logits of every row, and the hidden states asked for.
        """
        if self._is_recurrent:
            self._snapshots = take_recurrent_snapshot(self.cache)
        self._block = block_ids
        with self.recorder.phase("verify"):
            return self._run_block(block_ids)

    def catch_up(self, block_ids: torch.Tensor) -> CausalLMOutputWithPast:
        """Runs tokens whose logits nobody needs, to have them in the cache; call [`commit`] afterwards.

        Args:
            block_ids (`torch.Tensor` of shape `(batch_size, n)`): Tokens.

        Returns:
            `CausalLMOutputWithPast`: The hidden states asked for, and logits of the last row only.
        """
        self._block = block_ids
        kwargs = {"logits_to_keep": 1} if "logits_to_keep" in self._prompt_kwargs else {}
        with self.recorder.phase("verify"):
            return self._run_block(block_ids, **kwargs)

    def _run_block(self, block_ids: torch.Tensor, **kwargs: Any) -> CausalLMOutputWithPast:
        length = block_ids.shape[1]
        if self._slot_mask is not None:
            ones = self._slot_mask.new_ones(block_ids.shape)
            kwargs["attention_mask"] = torch.cat([self._slot_mask, ones], dim=1)
        if self._next_position is not None:
            kwargs["position_ids"] = self._next_position + self._steps_up_to(length)
        with self._step_bounds.lifted():
            return self._forward(block_ids, **kwargs)

    def _steps_up_to(self, length: int) -> torch.Tensor:
        """0, 1, … `length` - 1, made once."""
        if self._steps is None or self._steps.shape[0] < length:
            self._steps = torch.arange(max(length, 32), device=self._device)
        return self._steps[:length]

    def commit(self, kept: list[int]) -> None:
        """Keeps the first `kept[i]` rows of the verified block for sequence i and forgets the rest.

        Args:
            kept (`list[int]`): Rows to keep per sequence, the anchor included.
        """
        if self._block is None:
            raise RuntimeError("`commit` was called before `verify`")
        length = self._block.shape[1]
        if self._is_recurrent:
            self._replay(kept[0], length)
        elif len(kept) == 1:
            remove_slots(self.cache, length - kept[0])
        else:
            self._realign(kept, length)
        self._cached = [cached + count for cached, count in zip(self._cached, kept, strict=True)]
        self._advance(kept)
        self._block = None

    def _advance(self, kept: list[int]) -> None:
        if self._next_position is not None:
            step = kept[0] if len(kept) == 1 else torch.tensor(kept, device=self._next_position.device)[:, None]
            self._next_position = self._next_position + step
        if self._slot_mask is not None:
            missing = self.num_slots - self._slot_mask.shape[1]
            if missing > 0:
                ones = self._slot_mask.new_ones(self._slot_mask.shape[0], missing)
                self._slot_mask = torch.cat([self._slot_mask, ones], dim=1)

    def _replay(self, kept: int, length: int) -> None:
        """Recurrent states cannot forget a token: go back to before the block and run the kept rows again."""
        if kept < length:
            assert self._block is not None
            remove_slots(self.cache, length)
            restore_recurrent(self._snapshots)
            with self.recorder.phase("verify"):
                self._run_block(self._block[:, :kept])
        self._snapshots = []
        remove_slots(self.cache, 0)

    def _realign(self, kept: list[int], length: int) -> None:
        """Lets all rows end at the same slot again, the first that leaves room for the longest row."""
        assert self._slot_mask is not None
        end = self.num_slots
        before = end - length
        edge = max(cached + count for cached, count in zip(self._cached, kept, strict=True))
        if self._has_sliding_window:
            edge = max(edge, before)  # sliding layers have forgotten the slots that a shorter cache would need
        shifts = [edge - before - count for count in kept]
        is_kept = self._steps_up_to(length) < torch.tensor(kept, device=self._slot_mask.device)[:, None]
        mask = torch.cat([self._slot_mask, is_kept.to(self._slot_mask.dtype)], dim=1)
        for shift, rows in rows_by_shift(shifts).items():
            mask[rows] = torch.roll(mask[rows], shift, dims=1)
        shift_rows(self.cache, shifts)
        remove_slots(self.cache, end - edge)
        self._slot_mask = mask[:, :edge]

    def select_rows(self, rows: list[int]) -> bool:
        """Drops finished sequences from the batch where the cache allows it.

        Args:
            rows (`list[int]`): Batch indices to keep.

        Returns:
            `bool`: Whether the rows were dropped.
        """
        if any(not isinstance(layer, DynamicLayer) for layer in self.cache.layers):
            return False
        index = torch.tensor(rows, device="cpu")
        batch_size = len(self._cached)
        self._cached = [self._cached[row] for row in rows]
        select_cache_rows(self.cache, index)
        if self._slot_mask is not None:
            self._slot_mask = self._slot_mask[index.to(self._slot_mask.device)]
        # One row of positions may stand for the whole batch.
        if self._next_position is not None and self._next_position.shape[-2] == batch_size:
            self._next_position = self._next_position.index_select(-2, index.to(self._next_position.device))
        for name, value in self._step_kwargs.items():
            if isinstance(value, torch.Tensor) and value.ndim and value.shape[0] == batch_size:
                self._step_kwargs[name] = value[index.to(value.device)]
        return True

    def abandon(self) -> None:
        """Takes an uncommitted block back out: after an interruption the cache of one sequence holds only tokens that
        stand, as in plain decoding. Of several sequences nobody could say which slots belong to what."""
        if self._block is not None and len(self._cached) == 1:
            remove_slots_beyond(self.cache, self._cached[0])
            restore_recurrent(self._snapshots)
        self.close()

    def close(self) -> None:
        """Leaves the cache as plain decoding would: sliding-window layers keep their window only."""
        stop_recording(self._recording)
