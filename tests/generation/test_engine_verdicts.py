"""Verdicts on blocks whose logits are made by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from chain_statistics import chi_square_tail
from engine_traffic import idle_request
from transformers import LogitsProcessorList, NoRepeatNGramLogitsProcessor, TemperatureLogitsWarper

from adaflash_hf.generation import engine_verdicts
from adaflash_hf.generation.engine_verdicts import Block, judge_blocks, sample_drafts


VOCAB_SIZE = 6
HALF = LogitsProcessorList([TemperatureLogitsWarper(0.5)])


def logits_of(tokens: list[int]) -> torch.Tensor:
    """Rows whose argmax is each of `tokens`, and that leave the others some chance."""
    return torch.nn.functional.one_hot(torch.tensor(tokens), VOCAB_SIZE).float() * 3


def blocks_of(
    *requests: tuple[list[int], list[int], dict[str, Any]],
) -> tuple[list[Block], torch.Tensor, torch.Tensor]:
    """Blocks of (target's choices, drafts, request fields), one after the other."""
    blocks, choices, drafts = [], [], []
    for chosen, drafted, fields in requests:
        assert len(chosen) == len(drafted) + 1
        request = idle_request([1, 2], **fields)
        noise = None if request.noise is None else request.noise.take(0, len(chosen))
        blocks.append(Block(request, len(choices), len(chosen), len(drafts), noise=noise))
        choices += chosen
        drafts += drafted
    return blocks, logits_of(choices), torch.tensor(drafts, dtype=torch.long)


def test_none_some_and_all_accepted() -> None:
    blocks, logits, drafts = blocks_of(
        ([3, 4, 5], [2, 4], {}), ([3, 4, 5], [3, 1], {}), ([3, 4, 5], [3, 4], {}), ([2], [], {})
    )
    verdicts = judge_blocks(blocks, logits, drafts)
    assert [(verdict.tokens, verdict.accepted) for verdict in verdicts] == [
        ([3], 0),
        ([3, 4], 1),
        ([3, 4, 5], 2),
        ([2], 0),
    ]
    blocks, logits, _ = blocks_of(([2], [], {}))
    assert judge_blocks(blocks, logits, None)[0].tokens == [2]


def test_mixed_settings_do_not_mix() -> None:
    """Greedy, warped, sampled and prefix-dependent requests in one round, in any order."""
    seeded = {"do_sample": True, "seed": 3, "settings": ("half",), "logits_processor": HALF}
    no_repeats = LogitsProcessorList([NoRepeatNGramLogitsProcessor(1)])
    cases: list[tuple[list[int], list[int], dict[str, Any]]] = [
        ([3, 4, 5], [3, 4], {}),
        ([3, 4, 5, 0], [3, 4, 5], seeded),
        ([1, 4], [4], {"settings": None, "logits_processor": no_repeats}),
        ([5, 2], [5], {"settings": ("half",), "logits_processor": HALF}),
        ([4, 3, 5, 0], [4, 3, 5], {**seeded, "seed": 4}),
        ([0, 1], [3], {}),
    ]
    alone = []
    for case in cases:
        blocks, logits, drafts = blocks_of(case)
        alone += judge_blocks(blocks, logits, drafts)
    assert alone[0].tokens == [3, 4, 5] and alone[3].tokens == [5, 2] and alone[5].tokens == [0]
    assert alone[2].tokens[0] != 1, "it stands in the prompt"
    for order in ([0, 1, 2, 3, 4, 5], [5, 2, 4, 0, 3, 1]):
        blocks, logits, drafts = blocks_of(*(cases[index] for index in order))
        assert judge_blocks(blocks, logits, drafts) == [alone[index] for index in order]


def test_large_rounds_are_judged_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded = {"do_sample": True, "settings": ()}
    cases = [([3, 4, 5], [3, 4], {**seeded, "seed": seed}) for seed in range(7)]
    blocks, logits, drafts = blocks_of(*cases)
    whole = judge_blocks(blocks, logits, drafts)
    monkeypatch.setattr(engine_verdicts, "SCORES_CHUNK", 6 * VOCAB_SIZE)
    assert judge_blocks(blocks, logits, drafts) == whole


@pytest.mark.parametrize("settings", [(), None])
def test_scores_that_are_not_finite(settings: tuple[()] | None) -> None:
    broken = {"do_sample": True, "seed": 0, "settings": settings}
    blocks, logits, drafts = blocks_of(([3, 4], [3], broken), ([3, 4], [3], {}))
    logits[0] = float("nan")
    first, second = judge_blocks(blocks, logits, drafts)
    assert "not finite" in str(first.error) and first.tokens == []
    assert (second.tokens, second.error) == ([3, 4], None)


@pytest.mark.parametrize("settings", [(), None])
def test_rejection_sampling_draws_from_the_target(settings: tuple[()] | None) -> None:
    """The first token of drafted blocks, over many seeds, against p; drafts come from another distribution."""
    p = torch.tensor([0.05, 0.4, 0.25, 0.0, 0.2, 0.1])
    q = torch.tensor([0.3, 0.1, 0.4, 0.1, 0.05, 0.05])
    count = 1000
    blocks, drafts, rows = [], [], []
    for seed in range(count):
        request = idle_request([1], do_sample=True, samples_drafts=True, seed=seed, settings=settings)
        assert request.noise is not None
        noise = request.noise.take(0, 2)
        ids, probs = sample_drafts(request, q.log()[None], noise)
        torch.testing.assert_close(probs[0], q)
        blocks.append(Block(request, len(rows), 2, len(drafts), probs, noise))
        rows += [p, p]
        drafts.append(ids)
    verdicts = judge_blocks(blocks, torch.stack(rows).log(), torch.cat(drafts))
    counts = torch.bincount(torch.tensor([verdict.tokens[0] for verdict in verdicts]), minlength=VOCAB_SIZE)
    assert counts[3] == 0
    expected = (p * count)[p > 0]
    assert chi_square_tail(((counts[p > 0] - expected) ** 2 / expected).sum(), 4) > 0.01
    # A draft is accepted with probability sum(min(p, q)) = 0.5; three standard deviations are 0.048.
    accepted = sum(verdict.accepted for verdict in verdicts) / count
    assert abs(accepted - float(torch.minimum(p, q).sum())) < 0.048
    # The token after an accepted draft is a draw from p, too.
    bonus = torch.tensor([verdict.tokens[1] for verdict in verdicts if verdict.accepted])
    counts = torch.bincount(bonus, minlength=VOCAB_SIZE)
    expected = (p * len(bonus))[p > 0]
    assert chi_square_tail(((counts[p > 0] - expected) ** 2 / expected).sum(), 4) > 0.01


def test_drafts_are_shaped_as_the_target_is() -> None:
    request = idle_request([1], do_sample=True, samples_drafts=True, seed=0, logits_processor=HALF)
    assert request.noise is not None
    logits = torch.randn(3, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    ids, probs = sample_drafts(request, logits, request.noise.take(0, 4))
    torch.testing.assert_close(probs, (logits * 2).softmax(dim=-1))
    again, _ = sample_drafts(request, logits, request.noise.take(0, 3))
    assert torch.equal(ids, again)
