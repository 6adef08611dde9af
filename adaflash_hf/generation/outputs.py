"""Collects what `return_dict_in_generate` asks for, token by token, as plain decoding returns it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from transformers.generation import GenerationConfig
from transformers.generation.utils import GenerateDecoderOnlyOutput


__all__ = ["OutputCollector"]


class OutputCollector:
    """Per-row lists of scores, logits, hidden states and attentions, stacked into per-step tuples at the end.

    A row that ended earlier than others has zeros in its later steps.

    Args:
        generation_config (`GenerationConfig`): Says what is asked for.
        batch_size (`int`): Sequences in the call.
    """

    def __init__(self, generation_config: GenerationConfig, batch_size: int):
        asked = bool(generation_config.return_dict_in_generate)
        self.is_dict = asked
        self.wants_scores = asked and bool(generation_config.output_scores)
        self.wants_logits = asked and bool(generation_config.output_logits)
        self.wants_hidden_states = asked and bool(generation_config.output_hidden_states)
        self.wants_attentions = asked and bool(generation_config.output_attentions)
        self._scores: list[list[torch.Tensor]] = [[] for _ in range(batch_size)]
        self._logits: list[list[torch.Tensor]] = [[] for _ in range(batch_size)]
        self._hidden_states: list[list[tuple[torch.Tensor, ...]]] = [[] for _ in range(batch_size)]
        self._attentions: list[list[tuple[torch.Tensor, ...]]] = [[] for _ in range(batch_size)]

    def add_scores(
        self, row: int, scores: Sequence[torch.Tensor] | torch.Tensor, logits: torch.Tensor, count: int
    ) -> None:
        """Keeps the first `count` rows of processed scores and raw logits of one sequence.

        Args:
            row (`int`): Original batch index.
            scores (`Sequence[torch.Tensor]`): Processed scores per token, each `(vocab_size,)`.
            logits (`torch.Tensor` of shape `(>= count, vocab_size)`): Raw logits.
            count (`int`): Committed tokens.
        """
        for index in range(count):
            if self.wants_scores:
                self._scores[row].append(scores[index].float().clone())
            if self.wants_logits:
                self._logits[row].append(logits[index].float().clone())

    def add_states(self, row: int, index: int, outputs: Any, count: int, slots: int | None) -> None:
        """Keeps the hidden states and attentions of one forward pass.

        Args:
            row (`int`): Original batch index.
            index (`int`): Index of the sequence in the forward's batch.
            outputs (`ModelOutput`): The forward's outputs.
            count (`int`): Rows to keep, each as a step of its own.
            slots (`int`, *optional*): Cache slots before the block; None for the prefill, which is one step.
        """
        if self.wants_hidden_states:
            for begin, end in self._steps(count, slots):
                states = tuple(layer[index : index + 1, begin:end].clone() for layer in outputs.hidden_states)
                self._hidden_states[row].append(states)
        if self.wants_attentions:
            for begin, end in self._steps(count, slots):
                visible = None if slots is None else slots + end
                weights = tuple(
                    layer[index : index + 1, :, begin:end, :visible].clone() for layer in outputs.attentions
                )
                self._attentions[row].append(weights)

    @staticmethod
    def _steps(count: int, slots: int | None) -> list[tuple[int, int]]:
        return [(0, count)] if slots is None else [(step, step + 1) for step in range(count)]

    @staticmethod
    def _stack(rows: list[list[torch.Tensor]]) -> tuple[torch.Tensor, ...]:
        longest = max(len(row) for row in rows)
        filler = torch.zeros_like(next(row for row in rows if len(row) == longest)[-1])
        return tuple(
            torch.stack([row[step] if step < len(row) else filler for row in rows]) for step in range(longest)
        )

    @staticmethod
    def _stack_layers(rows: list[list[tuple[torch.Tensor, ...]]]) -> tuple[tuple[torch.Tensor, ...], ...]:
        longest_row = max(rows, key=len)
        return tuple(
            tuple(
                torch.cat([row[step][layer] if step < len(row) else torch.zeros_like(states) for row in rows])
                for layer, states in enumerate(longest_row[step])
            )
            for step in range(len(longest_row))
        )

    def build(self, sequences: torch.Tensor, cache: Any) -> GenerateDecoderOnlyOutput:
        """Returns the dictionary output of `generate()`.

        Args:
            sequences (`torch.Tensor` of shape `(batch_size, length)`): Prompts and generated tokens.
            cache (`Cache`): The target's cache.
        """
        names = {field.name for field in fields(GenerateDecoderOnlyOutput)}
        return GenerateDecoderOnlyOutput(
            sequences=sequences,
            scores=self._stack(self._scores) if self.wants_scores else None,
            logits=self._stack(self._logits) if self.wants_logits else None,
            hidden_states=self._stack_layers(self._hidden_states) if self.wants_hidden_states else None,
            attentions=self._stack_layers(self._attentions) if self.wants_attentions else None,
            **{"cache" if "cache" in names else "past_key_values": cache},
        )
