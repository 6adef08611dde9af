"""What `return_dict_in_generate` returns, built by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plain_comparison import CACHE_NAME
from transformers import GenerationConfig

from adaflash_hf.generation.outputs import OutputCollector


def collector(batch_size: int, **asked: bool) -> OutputCollector:
    return OutputCollector(GenerationConfig(return_dict_in_generate=True, **asked), batch_size)


def test_nothing_is_kept_unless_asked_for() -> None:
    outputs = collector(1)
    outputs.add_scores(0, torch.ones(1, 3), torch.ones(1, 3), 1)
    outputs.add_states(0, 0, None, 1)
    built = outputs.build(torch.tensor([[1]]), "cache")
    assert (built.scores, built.logits, built.hidden_states, built.attentions) == (None, None, None, None)
    assert getattr(built, CACHE_NAME) == "cache"
    silent = OutputCollector(GenerationConfig(output_scores=True), 1)
    assert not silent.is_dict
    assert not silent.wants_scores


def test_scores_and_logits_of_uneven_rows() -> None:
    outputs = collector(2, output_scores=True, output_logits=True)
    outputs.add_scores(0, torch.tensor([[1.0, 2.0], [3.0, 4.0], [9.0, 9.0]]), torch.ones(3, 2), 2)
    outputs.add_scores(1, [torch.tensor([5.0, 6.0])], torch.full((1, 2), 7.0), 1)
    built = outputs.build(torch.zeros(2, 2), None)
    assert [step.tolist() for step in built.scores] == [[[1, 2], [5, 6]], [[3, 4], [0, 0]]]
    assert [step.tolist() for step in built.logits] == [[[1, 1], [7, 7]], [[1, 1], [0, 0]]]
    assert built.scores[0].dtype == torch.float32


def test_scores_for_criteria() -> None:
    outputs = collector(2, output_scores=True)
    outputs.add_scores(1, torch.tensor([[1.0, 2.0]]), torch.ones(1, 2), 1)
    seen = outputs.scores_so_far(1, torch.tensor([[3.0, 4.0]]))
    assert [step.tolist() for step in seen] == [[[1, 2]] * 2, [[3, 4]] * 2]
    assert collector(2).scores_so_far(1, []) is None


def forward(*layers: torch.Tensor, attentions: Any = None) -> SimpleNamespace:
    return SimpleNamespace(hidden_states=layers, attentions=attentions)


def test_hidden_states_of_uneven_rows() -> None:
    outputs = collector(2, output_hidden_states=True)
    prefill = forward(torch.tensor([[[1.0], [2.0]], [[3.0], [4.0]]]))
    block = forward(torch.tensor([[[5.0], [6.0]], [[7.0], [8.0]]]))
    for row in range(2):
        outputs.add_prefill_states(row, row, prefill)
    outputs.add_states(0, 0, block, 2)
    outputs.add_states(1, 1, block, 1)
    built = outputs.build(torch.zeros(2, 5), None)
    assert [step[0].flatten(1).tolist() for step in built.hidden_states] == [
        [[1, 2], [3, 4]],
        [[5], [7]],
        [[6], [0]],
    ]


def test_prefills_of_different_lengths_are_padded_on_the_left() -> None:
    outputs = collector(2, output_hidden_states=True)
    outputs.add_prefill_states(0, 0, forward(torch.tensor([[[1.0]]])))
    outputs.add_prefill_states(1, 0, forward(torch.tensor([[[2.0], [3.0]]])))
    built = outputs.build(torch.zeros(2, 3), None)
    assert built.hidden_states[0][0].flatten(1).tolist() == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("windows", "columns"),
    [(None, [(0, 6), (0, 6)]), ([None], [(0, 4), (0, 5)]), ([3], [(1, 4), (2, 5)]), ([9], [(0, 4), (0, 5)])],
)
def test_attention_weights_end_with_their_own_row(
    windows: list[int | None] | None, columns: list[tuple[int, int]]
) -> None:
    """A block of three rows on three cached slots: row i may see slots up to 3 + i."""
    weights = torch.arange(18.0).reshape(1, 1, 3, 6)
    outputs = collector(1, output_attentions=True)
    outputs.add_states(0, 0, forward(attentions=(weights,)), 2, windows)
    built = outputs.build(torch.zeros(1, 2), None)
    for step, (begin, end) in enumerate(columns):
        assert torch.equal(built.attentions[step][0], weights[:, :, step : step + 1, begin:end])
