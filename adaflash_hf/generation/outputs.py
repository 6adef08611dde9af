"""Collects what `return_dict_in_generate` asks for, token by token, as plain decoding returns it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from transformers.generation import GenerationConfig
from transformers.generation.utils import GenerateDecoderOnlyOutput


__all__ = ["OutputCollector"]


def _visible_columns(weights: torch.Tensor, later_rows: int, window: int | None) -> torch.Tensor:
    """Cuts a row's attention weights to the keys that plain decoding would have at its step.

    Args:
        weights (`torch.Tensor` of shape `(1, num_heads, 1, num_keys)`): Keys end with the last row of the block.
        later_rows (`int`): Rows of the block after this one.
        window (`int`, *optional*): Most keys that a row sees.
    """
    end = weights.shape[-1] - later_rows
    return weights[..., 0 if window is None else max(end - window, 0) : end]


def _stack_rows(rows: list[torch.Tensor | None]) -> torch.Tensor:
    """Joins `(1, n, …)` tensors along the batch; shorter and missing ones are filled with zeros on the left."""
    longest = max((states for states in rows if states is not None), key=lambda states: states.shape[1])
    filled = []
    for states in rows:
        padded = torch.zeros_like(longest)
        if states is not None:
            padded[:, longest.shape[1] - states.shape[1] :] = states
        filled.append(padded)
    return torch.cat(filled)


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

    def scores_so_far(self, row: int, new: Sequence[torch.Tensor] | torch.Tensor) -> tuple[torch.Tensor, ...] | None:
        """What stopping criteria receive as `scores`: one tensor per step, None unless scores were asked for.

        Args:
            row (`int`): Original batch index.
            new (`Sequence[torch.Tensor]`): Scores of this round's tokens, each `(vocab_size,)`.

        Returns:
            `tuple` of `torch.Tensor` of shape `(batch_size, vocab_size)`: Every row holds the scores of this one.
        """
        if not self.wants_scores:
            return None
        steps = [*self._scores[row], *(scores.float() for scores in new)]
        return tuple(scores.expand(len(self._scores), -1) for scores in steps)

    def add_prefill_states(self, row: int, index: int, outputs: Any) -> None:
        """Keeps the hidden states and attentions of the prompt's forward pass, the last one if it came in chunks.

        Args:
            row (`int`): Original batch index.
            index (`int`): Index of the sequence in the forward's batch.
            outputs (`ModelOutput`): The forward's outputs.
        """
        if self.wants_hidden_states:
            self._hidden_states[row].append(tuple(layer[index : index + 1].clone() for layer in outputs.hidden_states))
        if self.wants_attentions:
            self._attentions[row].append(tuple(layer[index : index + 1].clone() for layer in outputs.attentions))

    def add_states(
        self, row: int, index: int, outputs: Any, count: int, windows: list[int | None] | None = None
    ) -> None:
        """Keeps the hidden states and attentions of a block's rows, each as a step of its own.

        Args:
            row (`int`): Original batch index.
            index (`int`): Index of the sequence in the forward's batch.
            outputs (`ModelOutput`): The forward's outputs.
            count (`int`): Rows to keep.
            windows (`list`, *optional*): See [`TargetRunner.attention_windows`].
        """
        if not (self.wants_hidden_states or self.wants_attentions):
            return
        for step in range(count):
            if self.wants_hidden_states:
                states = tuple(layer[index : index + 1, step : step + 1].clone() for layer in outputs.hidden_states)
                self._hidden_states[row].append(states)
            if self.wants_attentions:
                weights = [layer[index : index + 1, :, step : step + 1] for layer in outputs.attentions]
                if windows is not None and weights:  # there are none from sdpa, as in plain decoding
                    later_rows = outputs.attentions[0].shape[2] - 1 - step
                    weights = [
                        _visible_columns(layer, later_rows, window)
                        for layer, window in zip(weights, windows, strict=True)
                    ]
                self._attentions[row].append(tuple(layer.clone() for layer in weights))

    @staticmethod
    def _stack(rows: list[list[torch.Tensor]]) -> tuple[torch.Tensor, ...]:
        longest = max(len(row) for row in rows)
        filler = torch.zeros_like(next(row for row in rows if len(row) == longest)[-1])
        return tuple(
            torch.stack([row[step] if step < len(row) else filler for row in rows]) for step in range(longest)
        )

    @staticmethod
    def _stack_layers(rows: list[list[tuple[torch.Tensor, ...]]]) -> tuple[tuple[torch.Tensor, ...], ...]:
        num_steps, num_layers = max(len(row) for row in rows), len(rows[0][0])
        return tuple(
            tuple(
                _stack_rows([row[step][layer] if step < len(row) else None for row in rows])
                for layer in range(num_layers)
            )
            for step in range(num_steps)
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
