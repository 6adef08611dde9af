"""Sampling with a drafter draws from the target's own distribution: chi-square tests with fixed seeds."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from chain_statistics import VOCAB_SIZE, chain_target, chi_square_tail, transition_p_value
from plain_comparison import prompt
from tiny_models import tiny_drafter, tiny_target
from torch import nn
from transformers import PreTrainedModel

from adaflash_hf import DFlashDrafterModel, LengthHeadPolicy
from adaflash_hf.generation import candidate_generator, token_choice


DRAWS = 40_960
BATCH = 2_048
PROMPT = prompt(5, vocab_size=VOCAB_SIZE)
TOKENS = 3
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"top_k": 0},
    "temperature_and_top_k": {"top_k": 4, "temperature": 0.7},
    "top_p": {"top_k": 0, "top_p": 0.8},
    "all_and_repetition_penalty": {"top_k": 6, "top_p": 0.95, "temperature": 1.2, "repetition_penalty": 1.6},
}


@cache
def target() -> PreTrainedModel:
    model = tiny_target(
        "llama", vocab_size=VOCAB_SIZE, num_hidden_layers=2, hidden_size=16, num_attention_heads=2, head_dim=8, seed=1
    )
    with torch.no_grad():
        model.lm_head.weight.mul_(0.7)  # a distribution in which every token has a chance
    return model


def new_drafter(model: PreTrainedModel, **overrides: Any) -> DFlashDrafterModel:
    drafter = tiny_drafter(
        model, num_hidden_layers=1, num_attention_heads=2, target_layer_ids=[0, 1], block_size=5, **overrides
    )
    with torch.no_grad():
        drafter.norm.weight.mul_(0.5)
    return drafter


@cache
def drafter() -> DFlashDrafterModel:
    return new_drafter(target())


@torch.no_grad()
def drafter_with_length_head(model: PreTrainedModel) -> DFlashDrafterModel:
    """The head's last layer is rescaled so that its ratios cover (0, 1) on what the drafter really sees."""
    drafter = new_drafter(model, length_head_config={"bottleneck_size": 8})
    layer, raw = drafter.length_head.out, []
    hook = layer.register_forward_hook(lambda module, args, output: raw.append(output.flatten()))
    torch.manual_seed(0)
    options = {"max_new_tokens": 60, "do_sample": True, "top_k": 0, "length_policy": "length_head"}
    model.generate(PROMPT, assistant_model=drafter, **options)
    hook.remove()
    values = torch.cat(raw)
    scale = 1.5 / values.std()
    layer.weight.mul_(scale)
    layer.bias.copy_((layer.bias - values.mean()) * scale)
    return drafter


@cache
def exact_joint(option: str) -> torch.Tensor:
    """Probabilities `[8 ** TOKENS]` of the first tokens, from plain one-step scores of every possible prefix."""
    joint, prefixes = torch.ones(1, dtype=torch.float64), PROMPT
    for _ in range(TOKENS):
        output = target().generate(
            prefixes,
            attention_mask=torch.ones_like(prefixes),  # token 0 would be taken for padding
            max_new_tokens=1,
            do_sample=True,
            return_dict_in_generate=True,
            output_scores=True,
            **OPTIONS[option],
        )
        joint = (joint[:, None] * output.scores[0].double().softmax(dim=-1)).flatten()
        every_token = torch.arange(VOCAB_SIZE).repeat(len(prefixes))[:, None]
        prefixes = torch.cat([prefixes.repeat_interleave(VOCAB_SIZE, dim=0), every_token], dim=1)
    return joint


def count_draws(option: str, seed: int, model: nn.Module, draws: int = DRAWS, **drafting: Any) -> torch.Tensor:
    """How often each of the `8 ** TOKENS` beginnings was drawn."""
    torch.manual_seed(seed)
    counts = torch.zeros(VOCAB_SIZE**TOKENS)
    for _ in range(draws // BATCH):
        ids = target().generate(
            PROMPT,
            max_new_tokens=TOKENS + 1,
            do_sample=True,
            num_return_sequences=BATCH,
            assistant_model=model,
            **OPTIONS[option],
            **drafting,
        )[:, PROMPT.shape[1] :]
        index = (ids[:, 0] * VOCAB_SIZE + ids[:, 1]) * VOCAB_SIZE + ids[:, 2]
        counts += torch.bincount(index, minlength=len(counts))
    return counts


def p_value(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Of Pearson's chi-square test; cells with an expectation below five are pooled."""
    assert not counts[probabilities == 0].any(), "an impossible sequence was drawn"
    expected = probabilities * counts.sum()
    is_rare = expected < 5
    observed = torch.cat([counts[~is_rare].double(), counts[is_rare].sum()[None].double()])
    expected = torch.cat([expected[~is_rare], expected[is_rare].sum()[None]])
    observed, expected = observed[expected > 0], expected[expected > 0]
    return chi_square_tail(((observed - expected) ** 2 / expected).sum(), len(observed) - 1)


@pytest.mark.parametrize("draft_proposal", ["argmax", "sample"])
@pytest.mark.parametrize("option", OPTIONS)
def test_joint_distribution_of_the_first_tokens(option: str, draft_proposal: str) -> None:
    counts = count_draws(option, 0, drafter(), draft_proposal=draft_proposal)
    assert p_value(counts, exact_joint(option)) > 0.01
    stats = drafter().last_generation_stats
    assert 0.1 * stats.drafted_tokens < stats.accepted_tokens < 0.9 * stats.drafted_tokens


@pytest.mark.parametrize("draft_proposal", ["argmax", "sample"])
def test_with_the_length_head(draft_proposal: str) -> None:
    """The batch verifies as many rows as its most hopeful sequence, so the length depends on what was drawn."""
    model = drafter_with_length_head(target())
    seen: set[int] = set()

    class Watched(LengthHeadPolicy):
        def observe(self, verify_length: int, accepted: int) -> None:
            seen.add(verify_length)

    policy = Watched(length_scale=0.7, min_verify_length=1)
    counts = count_draws("top_p", 1, model, draft_proposal=draft_proposal, length_policy=policy)
    assert p_value(counts, exact_joint("top_p")) > 0.01
    assert len(seen) > 1


@pytest.mark.parametrize("draft_proposal", ["argmax", "sample"])
def test_one_long_sequence_with_the_length_head(draft_proposal: str) -> None:
    """Without attention the target is a Markov chain: each pair of neighbours is a draw from a known distribution."""
    chain = chain_target()
    model = drafter_with_length_head(chain)
    torch.manual_seed(2)
    ids = chain.generate(
        PROMPT,
        max_new_tokens=800,
        do_sample=True,
        top_k=0,
        assistant_model=model,
        draft_proposal=draft_proposal,
        length_policy=LengthHeadPolicy(length_scale=1.0, min_verify_length=1),
    )[0, PROMPT.shape[1] :]
    rounds_of_length = model.last_generation_stats.verify_lengths
    assert sum(rounds > 30 for rounds in rounds_of_length.values()) > 2, rounds_of_length
    assert transition_p_value(chain, [ids.tolist()], {"top_k": 0}) > 0.01


class TestTheTestCanFail:
    """Two known ways of being biased, each in place of the right one, are found out by the same test."""

    def test_argmax_drafts_treated_as_samples(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(candidate_generator, "sample_tokens", lambda probs: probs.argmax(dim=-1))
        counts = count_draws("plain", 0, drafter(), draws=10_240, draft_proposal="sample")
        assert p_value(counts, exact_joint("plain")) < 1e-6

    def test_acceptance_that_is_slightly_too_generous(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def generous(
            ids: torch.Tensor, q: torch.Tensor, p: torch.Tensor, *uniforms: None
        ) -> tuple[torch.Tensor, torch.Tensor]:
            return rejection_sample(ids, 0.8 * q, p)

        rejection_sample = token_choice.rejection_sample
        monkeypatch.setattr(token_choice, "rejection_sample", generous)
        counts = count_draws("plain", 0, drafter(), draws=10_240, draft_proposal="sample")
        assert p_value(counts, exact_joint("plain")) < 1e-6
