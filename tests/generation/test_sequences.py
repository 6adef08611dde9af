"""Growing sequences and streaming of a batch whose rows advance unevenly, by hand."""

from __future__ import annotations

from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from adaflash_hf.generation.sequences import SequenceBatch, StepStreamer


def batch() -> SequenceBatch:
    sequences = SequenceBatch(torch.tensor([[0, 7], [8, 9]]), pad_token_id=0)
    sequences.append(0, [1, 2, 3])
    sequences.append(1, [4])
    return sequences


def test_lengths_and_last_tokens() -> None:
    sequences = batch()
    assert (sequences.length(0), sequences.length(1), sequences.longest, len(sequences)) == (5, 3, 5, 2)
    assert sequences.last_ids([1, 0]).tolist() == [4, 3]


def test_final_ids_are_padded_on_the_right() -> None:
    assert batch().build().tolist() == [[0, 7, 1, 2, 3], [8, 9, 4, 0, 0]]
    assert SequenceBatch(torch.tensor([[5]]), 0).build().tolist() == [[5]]


def test_prompt_without_ids() -> None:
    sequences = SequenceBatch(torch.zeros(2, 0, dtype=torch.long), pad_token_id=6)
    sequences.append(0, [1])
    sequences.append(1, [2, 3])
    assert sequences.build().tolist() == [[1, 6], [2, 3]]


def test_prefixes_are_cut_padded_and_extended() -> None:
    sequences = batch()
    assert sequences.prefixes(3, {}).tolist() == [[0, 7, 1], [8, 9, 4]]
    assert sequences.prefixes(5, {1: [5, 6]}).tolist() == [[0, 7, 1, 2, 3], [8, 9, 4, 5, 6]]
    # What was only pending is gone once something else is committed.
    sequences.append(1, [7])
    assert sequences.prefixes(4, {}).tolist() == [[0, 7, 1, 2], [8, 9, 4, 7]]
    sequences.append(0, list(range(300)))
    assert sequences.prefixes(305, {})[0].tolist() == [0, 7, 1, 2, 3, *range(300)]


def test_prefixes_leave_the_prompt_alone() -> None:
    ids = torch.tensor([[1, 2]])
    sequences = SequenceBatch(ids, pad_token_id=0)
    assert sequences.prefixes(3, {0: [5]}).tolist() == [[1, 2, 5]]
    assert ids.tolist() == [[1, 2]]


def test_missing_from_cache() -> None:
    ids, counts = batch().missing_from_cache([0, 1])
    assert counts == [0, 2]
    assert ids.tolist() == [[3, 0], [4, 0]]
    ids, counts = batch().missing_from_cache([0])
    assert (counts, ids.shape) == ([0], (1, 0))


class Collector(BaseStreamer):
    def __init__(self) -> None:
        self.puts: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.puts.append(value.tolist())

    def end(self) -> None:
        self.puts.append("end")


def test_streamer_gets_whole_steps_in_order() -> None:
    collector = Collector()
    streamer = StepStreamer(collector, batch_size=2, pad_token_id=0)
    streamer.add(0, [1, 2, 3], is_finished=False)
    assert collector.puts == []
    streamer.add(1, [4], is_finished=False)
    assert collector.puts == [[1, 4]]
    streamer.add(1, [5], is_finished=True)
    assert collector.puts == [[1, 4], [2, 5], [3, 0]]
    streamer.add(0, [6], is_finished=True)
    streamer.end()
    assert collector.puts == [[1, 4], [2, 5], [3, 0], [6, 0], "end"]
