"""Every verified draft is accepted."""

from __future__ import annotations

import pytest
import torch
from plain_comparison import generate, oracle_for, prompt, ragged_batch, shared_target
from tiny_models import tiny_drafter

from adaflash_hf import AdaFlashEngine, InvalidInputError, OraclePolicy, RoundContext
from adaflash_hf.generation.draft_head import LikeliestTokens


@pytest.mark.parametrize("ragged", [False, True], ids=["one", "ragged"])
def test_generate_verifies_what_is_accepted(ragged: bool) -> None:
    target, inputs = shared_target(), ragged_batch() if ragged else prompt()
    expected = generate(target, inputs, max_new_tokens=20)
    drafter = oracle_for(target, inputs, expected, block_size=6)
    policy = OraclePolicy({row: ids[-20:].tolist() for row, ids in enumerate(expected)})
    actual = generate(target, inputs, max_new_tokens=20, assistant_model=drafter, length_policy=policy)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    stats = drafter.last_generation_stats
    if not ragged:  # a padded batch verifies as much of all as of the luckiest
        assert stats.accepted_tokens == stats.drafted_tokens > 0


def test_engine_verifies_what_is_accepted() -> None:
    target = shared_target()
    prompts = [prompt(5 + n, seed=n) for n in range(3)]
    answers = [generate(target, ids, max_new_tokens=20)[0].tolist() for ids in prompts]
    drafter = oracle_for(target, prompts[0], torch.tensor([answers[0]]), block_size=6)
    drafter._references = answers
    policy = OraclePolicy()
    engine = AdaFlashEngine(target, drafter, length_policy=policy)
    handles = [engine.submit(ids, max_new_tokens=20, do_sample=False) for ids in prompts]
    for handle, ids, answer in zip(handles, prompts, answers, strict=True):
        policy.tell(handle.request_id, answer[ids.shape[1] :])
    for handle, answer in zip(handles, answers, strict=True):
        result = handle.result()
        assert result.sequence_ids == answer
        assert all(length - 1 == accepted for length, accepted in result.rounds[:-1])


def test_what_it_was_not_told() -> None:
    context = RoundContext(
        [4],
        1,
        request_ids=[7],
        num_generated=[1],
        likeliest=LikeliestTokens(torch.zeros(1, 3).long(), torch.zeros(1, 3)),
    )
    with pytest.raises(InvalidInputError, match="not told the answer to request 7"):
        OraclePolicy({1: [2, 3]}).choose(tiny_drafter(), torch.zeros(1, 4, 2), context)
    with pytest.raises(InvalidInputError, match="needs `context.likeliest`"):
        OraclePolicy().choose(tiny_drafter(), torch.zeros(1, 4, 2), RoundContext([4], 1))
    with pytest.raises(InvalidInputError, match="call `choose`"):
        OraclePolicy().verify_lengths(tiny_drafter(), torch.zeros(1, 4, 2), 4)
