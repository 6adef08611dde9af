"""The target's verdict on hand-made logits: none, some and all drafts accepted, with and without processors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, RepetitionPenaltyLogitsProcessor
from transformers.generation.logits_process import (
    ClassifierFreeGuidanceLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from adaflash_hf import UnsupportedGenerationError
from adaflash_hf.generation.candidate_generator import Proposal
from adaflash_hf.generation.sequences import SequenceBatch
from adaflash_hf.generation.token_choice import TokenChooser, prefix_free_processors


VOCAB_SIZE = 6


def logits_for(*rows: list[int]) -> torch.Tensor:
    """Logits whose argmax are these tokens and whose runner-up is the next token."""
    ids = torch.tensor(rows)
    best = torch.nn.functional.one_hot(ids, VOCAB_SIZE) * 9.0
    return best + torch.nn.functional.one_hot((ids + 1) % VOCAB_SIZE, VOCAB_SIZE) * 8.0


def proposal(*rows: list[int], probs: torch.Tensor | None = None) -> Proposal:
    ids = torch.tensor(rows, dtype=torch.long).reshape(len(rows), -1)
    return Proposal(ids, probs, [ids.shape[1] + 1] * len(rows))


def sequences(*rows: list[int]) -> SequenceBatch:
    """Sequences with a prompt of one token 0; `rows` are what was generated since."""
    batch = SequenceBatch(torch.zeros(len(rows), 1, dtype=torch.long), pad_token_id=0)
    for row, tokens in enumerate(rows):
        batch.append(row, tokens)
    return batch


class Recorder(LogitsProcessor):
    """Changes nothing; remembers the prefixes it was called with."""

    def __init__(self) -> None:
        self.prefixes: list[list[list[int]]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert input_ids.shape[0] == scores.shape[0]
        self.prefixes.append(input_ids.tolist())
        return scores


def choose(logits: torch.Tensor, drafts: Proposal, *processors: Any, generated: Any = None, **kwargs: Any) -> Any:
    chooser = TokenChooser(LogitsProcessorList(processors), kwargs.pop("do_sample", False), len(logits))
    batch = sequences(*(generated or [[]] * len(logits)))
    return chooser.choose(logits, drafts, batch, list(range(len(logits))), **kwargs)


@pytest.mark.parametrize("with_prefix_processor", [False, True], ids=["at_once", "in_order"])
@pytest.mark.parametrize(
    ("drafts", "tokens", "accepted"),
    [([1, 2], [1, 2, 3], 2), ([1, 5], [1, 2], 1), ([5, 2], [1], 0), ([], [1], 0)],
)
def test_greedy(drafts: list[int], tokens: list[int], accepted: int, with_prefix_processor: bool) -> None:
    logits = logits_for([1, 2, 3])[:, : len(drafts) + 1]
    processors = [Recorder()] if with_prefix_processor else []
    verdict = choose(logits, proposal(drafts), *processors)
    assert (verdict.tokens, verdict.accepted) == ([tokens], [accepted])
    for position in range(len(tokens)):
        assert torch.equal(verdict.scores[0][position], logits[0, position])


def test_prefix_free_processors_apply_at_every_position() -> None:
    verdict = choose(logits_for([1, 2, 3]), proposal([2, 2]), SuppressTokensLogitsProcessor([1], device="cpu"))
    assert verdict.tokens == [[2, 2, 3]]


def test_prefix_processor_sees_exactly_the_committed_tokens() -> None:
    recorder = Recorder()
    verdict = choose(logits_for([1, 2, 3, 4]), proposal([1, 2, 5]), recorder, generated=[[5]])
    assert verdict.tokens == [[1, 2, 3]]
    assert recorder.prefixes == [[[0, 5]], [[0, 5, 1]], [[0, 5, 1, 2]]]


def test_prefix_processor_changes_what_is_accepted() -> None:
    """Token 1 was said, so its logit 9 is halved and token 2 with 8 wins; then 2 was said, and 3 wins over it."""
    verdict = choose(logits_for([1, 2]), proposal([2]), RepetitionPenaltyLogitsProcessor(2.0), generated=[[1]])
    assert verdict.tokens == [[2, 3]]


def test_rows_of_equal_length_share_a_call() -> None:
    recorder = Recorder()
    logits = logits_for([1, 2, 3], [1, 2, 3])
    verdict = choose(logits, proposal([1, 2], [1, 5]), recorder, generated=[[4], [5, 5]])
    assert verdict.tokens == [[1, 2, 3], [1, 2]]
    # Lengths 2, 3 (both rows), 4 (both), with rows cut or padded to the length of the call.
    assert recorder.prefixes == [
        [[0, 4], [0, 5]],
        [[0, 4, 1], [0, 5, 5]],
        [[0, 4, 1, 2], [0, 5, 5, 1]],
    ]


def test_finished_rows_are_left_out() -> None:
    recorder = Recorder()
    logits = logits_for([1, 2], [3, 4])
    verdict = choose(logits, proposal([1], [3]), recorder, generated=[[4, 4, 4], [5]], finished=[True, False])
    assert verdict.tokens == [[], [3, 4]]
    assert [len(prefixes[0]) for prefixes in recorder.prefixes] == [2, 3]


def test_prefix_constraint_is_asked_about_true_prefixes_only() -> None:
    asked: list[tuple[int, list[int]]] = []

    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        asked.append((row, ids.tolist()))
        return [row + 1]

    constraint = PrefixConstrainedLogitsProcessor(allowed, num_beams=1)
    verdict = choose(logits_for([4, 4], [4, 4]), proposal([1], [5]), constraint, generated=[[3], [3, 3]])
    assert verdict.tokens == [[1, 1], [2]]
    assert asked == [(0, [0, 3]), (0, [0, 3, 1]), (1, [0, 3, 3])]


@pytest.mark.parametrize("with_prefix_processor", [False, True], ids=["at_once", "in_order"])
def test_sampling_with_certain_distributions(with_prefix_processor: bool) -> None:
    processors = [Recorder()] if with_prefix_processor else []
    logits = logits_for([1, 2, 3]) * 100
    verdict = choose(logits, proposal([1, 5]), *processors, do_sample=True)
    assert (verdict.tokens, verdict.accepted) == ([[1, 2]], [1])
    q = torch.nn.functional.one_hot(torch.tensor([[1, 2]]), VOCAB_SIZE).float()
    verdict = choose(logits, proposal([1, 2], probs=q), *processors, do_sample=True)
    assert (verdict.tokens, verdict.accepted) == ([[1, 2, 3]], [2])
    q = torch.nn.functional.one_hot(torch.tensor([[1, 5]]), VOCAB_SIZE).float()
    verdict = choose(logits, proposal([1, 5], probs=q), *processors, do_sample=True)
    assert (verdict.tokens, verdict.accepted) == ([[1, 2]], [1])


def test_rejection_in_order_agrees_with_rejection_at_once() -> None:
    """The same shares of accepted drafts, from 20,000 rows of equal distributions."""
    torch.manual_seed(0)
    rows = 20_000
    logits = torch.tensor([1.0, 0.5, 0.0, -1.0, -1.0, -2.0]).expand(rows, 3, -1)
    q = torch.tensor([0.1, 0.4, 0.3, 0.1, 0.05, 0.05]).expand(rows, 2, -1)
    shares = []
    for processors in ([], [Recorder()]):
        drafts = torch.multinomial(q[0, 0], rows * 2, replacement=True).reshape(rows, 2)
        verdict = choose(logits, Proposal(drafts, q, [3] * rows), *processors, do_sample=True)
        shares.append(torch.tensor(verdict.accepted).bincount(minlength=3) / rows)
        first = torch.tensor([tokens[0] for tokens in verdict.tokens]).bincount(minlength=6) / rows
        torch.testing.assert_close(first, logits[0, 0].softmax(dim=-1), atol=0.012, rtol=0)
    torch.testing.assert_close(*shares, atol=0.015, rtol=0)


def test_only_prefix_free_processors_shape_the_drafts() -> None:
    processors = LogitsProcessorList(
        [
            TemperatureLogitsWarper(0.5),
            RepetitionPenaltyLogitsProcessor(1.2),
            TopKLogitsWarper(3),
            MinNewTokensLengthLogitsProcessor(1, 2, 3, device="cpu"),
        ]
    )
    kept = prefix_free_processors(processors)
    assert [type(processor) for processor in kept] == [TemperatureLogitsWarper, TopKLogitsWarper]


def test_processor_with_the_state_of_a_batch() -> None:
    processors = LogitsProcessorList([ClassifierFreeGuidanceLogitsProcessor(1.5)])
    TokenChooser(processors, False, 1)
    with pytest.raises(UnsupportedGenerationError, match="ClassifierFreeGuidanceLogitsProcessor .* batch of 2"):
        TokenChooser(processors, False, 2)
