"""Drafting: the context the drafter is given, its masks, the projection, and transformers' own protocol."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle_drafter import oracle_drafter
from plain_comparison import exact_target, generate, oracle_for, prompt, ragged_batch, shared_target
from tiny_models import tiny_drafter

from adaflash_hf import AdaFlashCandidateGenerator, FixedLengthPolicy
from adaflash_hf.generation.candidate_generator import DraftContext


def features(batch_size: int, rows: int, size: int = 64) -> torch.Tensor:
    return torch.randn(batch_size, rows, size, generator=torch.Generator().manual_seed(rows))


class TestDraftContext:
    def test_append(self) -> None:
        context = DraftContext.empty(2, torch.device("cpu"))
        context.append(features(2, 3), torch.tensor([[0, 1, 2], [0, 1, 2]]), None)
        assert context.is_dense
        context.append(features(2, 2), torch.tensor([[3, 4], [3, 4]]), torch.tensor([[True, True], [True, False]]))
        assert not context.is_dense
        assert context.used.sum(dim=1).tolist() == [5, 4]
        assert [pending.shape[1] for pending in context.pending] == [3, 2]

    def test_truncate(self) -> None:
        context = DraftContext.empty(2, torch.device("cpu"))
        context.append(features(2, 4), torch.arange(4).expand(2, -1), None)
        context.truncate(torch.tensor([4, 9]))
        assert context.is_dense
        context.truncate(torch.tensor([2, 4]))
        assert not context.is_dense
        assert context.used.tolist() == [[True, True, False, False], [True] * 4]

    def test_select_rows(self) -> None:
        context = DraftContext.empty(3, torch.device("cpu"))
        context.append(features(3, 2), torch.tensor([[0, 1], [2, 3], [4, 5]]), None)
        context.select_rows(torch.tensor([2, 0]))
        assert context.positions.tolist() == [[4, 5], [0, 1]]
        torch.testing.assert_close(context.pending[0], features(3, 2)[[2, 0]])


@torch.no_grad()
def hidden_states_of_block(
    generator: AdaFlashCandidateGenerator,
    contexts: list[tuple[torch.Tensor, Any, Any]],
    position: torch.Tensor,
) -> torch.Tensor:
    for states, positions, used in contexts:
        generator.context.append(states, torch.tensor(positions), None if used is None else torch.tensor(used))
        block = generator.draft_hidden_states(torch.full((len(states),), 7), position)
    return block


@pytest.mark.parametrize(
    "variant",
    [
        {},
        {"is_causal": True},
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4},
        {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4, "is_causal": False},
    ],
    ids=["full", "causal", "sliding", "sliding_bidirectional"],
)
def test_unevenly_filled_context_is_the_dense_one(variant: dict[str, Any]) -> None:
    """Rows with holes and with tokens that came one by one draft what a row given everything at once drafts."""
    target = shared_target()
    drafter = tiny_drafter(target, **variant)
    known = features(1, 9)
    dense = AdaFlashCandidateGenerator(drafter, target)
    dense.start(1)
    expected = hidden_states_of_block(dense, [(known, [list(range(9))], None)], torch.tensor([9]))

    ragged = AdaFlashCandidateGenerator(drafter, target)
    ragged.start(2)
    hole = torch.full((1, 1, 64), 50.0)

    def both(first: list[torch.Tensor], second: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([torch.cat(first, dim=1), torch.cat(second, dim=1)])

    yes, no = True, False
    # Row 0: padding, then 0-3; 4 and a hole; 5-8. Row 1: the same tokens in other portions.
    chunks = [
        (
            both([hole, known[:, :4]], [known[:, :5]]),
            [[0, 0, 1, 2, 3], [0, 1, 2, 3, 4]],
            [[no, yes, yes, yes, yes], [yes] * 5],
        ),
        (both([known[:, 4:5], hole], [known[:, 5:7]]), [[4, 5], [5, 6]], [[yes, no], [yes, yes]]),
        (
            both([known[:, 5:9]], [known[:, 7:9], hole, hole]),
            [[5, 6, 7, 8], [7, 8, 9, 10]],
            [[yes] * 4, [yes, yes, no, no]],
        ),
    ]
    actual = hidden_states_of_block(ragged, chunks, torch.tensor([9, 9]))
    torch.testing.assert_close(actual, expected.expand(2, -1, -1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("block_layout", "drafts"), [("anchor_then_masks", 3), ("anchor_first", 4)])
def test_proposal(block_layout: str, drafts: int) -> None:
    target = shared_target()
    answer = generate(target, prompt(), max_new_tokens=9)
    drafter = oracle_drafter(target, answer.tolist(), block_layout=block_layout)
    generator = AdaFlashCandidateGenerator(drafter, target)
    generator.start(1)
    assert generator.longest_verify_length == drafts + 1
    generator.context.append(features(1, 9), torch.arange(9)[None], None)
    with torch.no_grad():
        proposal = generator.propose(answer[:, 9], torch.tensor([9]), longest=99)
        assert proposal.candidate_ids.tolist() == answer[:, 10 : 10 + drafts].tolist()
        assert proposal.verify_lengths == [drafts + 1]
        proposal = generator.propose(answer[:, 9], torch.tensor([9]), longest=3)
        assert proposal.candidate_ids.tolist() == answer[:, 10:12].tolist()
        proposal = generator.propose(answer[:, 9], torch.tensor([9]), longest=1)
    assert (proposal.candidate_ids.shape, proposal.candidate_probs, proposal.verify_lengths) == ((1, 0), None, [1])


def test_sampled_proposal() -> None:
    target = shared_target()
    generator = AdaFlashCandidateGenerator(tiny_drafter(target), target, draft_warper=lambda logits: logits / 0.5)
    generator.start(2)
    generator.context.append(features(2, 9), torch.arange(9).expand(2, -1), None)
    with torch.no_grad():
        proposal = generator.propose(torch.tensor([5, 6]), torch.tensor([9, 9]), longest=3)
    assert proposal.candidate_probs.shape == (2, 2, 96)
    torch.testing.assert_close(proposal.candidate_probs.sum(dim=-1), torch.ones(2, 2))
    assert (proposal.candidate_probs.gather(-1, proposal.candidate_ids[..., None]) > 0).all()


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_block_is_embedded_with_raw_rows(scale: float) -> None:
    """Gemma's embedding multiplies by sqrt(hidden size); the drafter wants the matrix's own rows times its scale."""
    target = shared_target("gemma3_text")
    drafter = tiny_drafter(target, input_embedding_scale=scale)
    seen: dict[str, torch.Tensor] = {}
    drafter.register_forward_pre_hook(lambda module, args, kwargs: seen.update(kwargs), with_kwargs=True)
    generate(target, prompt(), max_new_tokens=3, assistant_model=drafter)
    rows = target.get_input_embeddings().weight * scale
    torch.testing.assert_close(seen["noise_embeds"][0, 1], rows[drafter.config.mask_token_id])


class TestTransformersProtocol:
    """Our generator inside transformers' own assisted loop."""

    @pytest.mark.parametrize("do_sample", [False, True])
    @pytest.mark.parametrize("verify_length", [None, 3, 1])
    def test_stock_loop(self, verify_length: int | None, do_sample: bool) -> None:
        target = exact_target()
        expected = generate(target, prompt(), max_new_tokens=16)
        oracle = oracle_for(target, prompt(), expected)
        generator = AdaFlashCandidateGenerator(oracle, target, FixedLengthPolicy(verify_length))
        matches: list[int] = []
        generator.length_policy.observe = lambda length, accepted: matches.append(accepted)
        target._get_candidate_generator = lambda **kwargs: generator
        sampling = {"do_sample": True, "top_k": 1} if do_sample else {}
        actual = generate(
            target, prompt(), max_new_tokens=16, assistant_model=oracle, speculation_type="dflash", **sampling
        )
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
        assert sum(matches) >= (0 if verify_length == 1 else 6)

    def test_random_drafter(self) -> None:
        target = exact_target()
        generator = AdaFlashCandidateGenerator(tiny_drafter(target), target)
        expected = generate(target, prompt(), max_new_tokens=9)
        target._get_candidate_generator = lambda **kwargs: generator
        actual = generate(
            target, prompt(), max_new_tokens=9, assistant_model=tiny_drafter(target), speculation_type="dflash"
        )
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_rows_of_the_batch_are_drafted_independently() -> None:
    """A row's drafts are the same alone and beside others."""
    target, inputs = shared_target(), ragged_batch()
    drafter = tiny_drafter(target)
    drafts: dict[str, list[torch.Tensor]] = {"alone": [], "together": []}
    project = AdaFlashCandidateGenerator.project

    def watch(self: Any, hidden_states: torch.Tensor, *args: Any) -> Any:
        proposal = project(self, hidden_states, *args)
        drafts[mode].append(proposal.candidate_ids)
        return proposal

    AdaFlashCandidateGenerator.project = watch
    try:
        mode = "together"
        # Without dict outputs a batch is decoded in packed rounds, which have a drafter's front of their own.
        generate(target, inputs, max_new_tokens=4, assistant_model=drafter, return_dict_in_generate=True)
        mode = "alone"
        for row, length in enumerate((7, 3, 11, 5)):
            generate(target, inputs["input_ids"][row : row + 1, -length:], max_new_tokens=4, assistant_model=drafter)
            assert torch.equal(drafts["alone"][0][0], drafts["together"][0][row])
            drafts["alone"].clear()
    finally:
        AdaFlashCandidateGenerator.project = project


def test_drafter_whose_configuration_asks_for_tuples() -> None:
    target = shared_target()
    drafter = tiny_drafter(target)
    drafter.config.return_dict = False
    answers = [generate(target, prompt(), max_new_tokens=6, assistant_model=model) for model in (None, drafter)]
    assert torch.equal(*answers)
