"""The growing sequences of a batch whose rows advance by different numbers of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch


if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer


__all__ = ["SequenceBatch", "StepStreamer"]


class SequenceBatch:
    """Prompts and generated tokens of all rows.

    Tokens are kept as lists; a tensor of them is brought up to date only for processors and criteria that read it.

    Args:
        input_ids (`torch.Tensor` of shape `(batch_size, prompt_length)`): Left-padded prompts.
        pad_token_id (`int`): Fills up rows that ended early.
    """

    def __init__(self, input_ids: torch.Tensor, pad_token_id: int):
        self._pad_token_id = pad_token_id
        self._prompt_length = input_ids.shape[1]
        self._prompt = input_ids
        self._generated: list[list[int]] = [[] for _ in range(input_ids.shape[0])]
        self._ids = input_ids
        self._unwritten: dict[int, int] = {}  # first generated token of a row that `_ids` lacks

    def __len__(self) -> int:
        return len(self._generated)

    @property
    def prompt_length(self) -> int:
        """Tokens of every prompt, padding included."""
        return self._prompt_length

    def length(self, row: int) -> int:
        """Tokens of a row, the prompt's padding included."""
        return self._prompt_length + len(self._generated[row])

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return self._prompt_length + max(len(tokens) for tokens in self._generated)

    def generated_ids(self, row: int) -> list[int]:
        """Generated tokens of a row; not to be changed."""
        return self._generated[row]

    def append(self, row: int, tokens: list[int]) -> None:
        """Adds tokens to a row."""
        self._unwritten.setdefault(row, len(self._generated[row]))
        self._generated[row].extend(tokens)

    def last_ids(self, rows: list[int]) -> torch.Tensor:
        """Newest token of each of `rows`, shape `(len(rows),)`."""
        return torch.tensor([self._generated[row][-1] for row in rows], device=self._prompt.device)

    def missing_from_cache(self, rows: list[int]) -> tuple[torch.Tensor, list[int]]:
        """What plain decoding would have cached of rows that ended before the longest: the last token, then padding.

        Args:
            rows (`list[int]`): Rows to look at.

        Returns:
            `tuple`: Ids of shape `(len(rows), n)`, and how many of the n belong to each row.
        """
        counts = [self.longest - self.length(row) for row in rows]
        ids = self._prompt.new_full((len(rows), max(counts)), self._pad_token_id)
        if ids.shape[1]:
            ids[:, 0] = self.last_ids(rows)
        return ids, counts

    def prefixes(self, length: int, pending: Mapping[int, list[int]]) -> torch.Tensor:
        """What processors and criteria see: all rows cut or padded to one length.

        Args:
            length (`int`): Length of the result.
            pending (`Mapping[int, list[int]]`): Per row, tokens that follow but are not committed yet.

        Returns:
            `torch.Tensor` of shape `(batch_size, length)`: A view that is valid until the next call.
        """
        self._reserve(max(length, self.longest))
        committed = {
            row: (self._prompt_length + begin, self._generated[row][begin:]) for row, begin in self._unwritten.items()
        }
        self._unwritten.clear()
        self._write(committed)
        self._write({row: (self.length(row), tokens) for row, tokens in pending.items()})
        return self._ids[:, :length]

    def _reserve(self, length: int) -> None:
        if length > self._ids.shape[1]:
            grown = self._ids.new_full((len(self), length + 256), self._pad_token_id)
            grown[:, : self._ids.shape[1]] = self._ids
            self._ids = grown

    def _write(self, tokens_of: dict[int, tuple[int, list[int]]]) -> None:
        """Puts each row's tokens from its column on into `_ids`; rows that write the same columns do so together."""
        groups: dict[tuple[int, int], list[int]] = {}
        for row, (begin, tokens) in tokens_of.items():
            groups.setdefault((begin, begin + len(tokens)), []).append(row)
        for (begin, end), rows in groups.items():
            new = torch.tensor([tokens_of[row][1] for row in rows], dtype=self._ids.dtype, device=self._ids.device)
            self._ids[rows, begin:end] = new

    def build(self) -> torch.Tensor:
        """Final ids of shape `(batch_size, longest)`, short rows padded on the right."""
        width = self.longest - self._prompt_length
        padded = [tokens + [self._pad_token_id] * (width - len(tokens)) for tokens in self._generated]
        generated = torch.tensor(padded, dtype=torch.long, device=self._prompt.device)
        return torch.cat([self._prompt, generated], dim=1)


class StepStreamer:
    """Hands tokens to a streamer as plain decoding does: one step of the whole batch at a time.

    Args:
        streamer (`BaseStreamer`): Receives tensors of shape `(batch_size,)`.
        batch_size (`int`): Rows in the batch.
        pad_token_id (`int`): What rows contribute once they have ended.
    """

    def __init__(self, streamer: BaseStreamer, batch_size: int, pad_token_id: int):
        self._streamer = streamer
        self._pad_token_id = pad_token_id
        self._waiting: list[list[int]] = [[] for _ in range(batch_size)]
        self._is_finished = [False] * batch_size

    def add(self, row: int, tokens: list[int], is_finished: bool) -> None:
        """Takes new tokens of a row, and passes on the steps that are now complete."""
        self._waiting[row].extend(tokens)
        self._is_finished[row] = is_finished
        rows = list(zip(self._waiting, self._is_finished, strict=True))
        while any(tokens for tokens, _ in rows) and all(tokens or finished for tokens, finished in rows):
            step = [tokens.pop(0) if tokens else self._pad_token_id for tokens, _ in rows]
            self._streamer.put(torch.tensor(step, device="cpu"))

    def end(self) -> None:
        """Tells the streamer that generation is over."""
        self._streamer.end()
