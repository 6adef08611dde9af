"""`generate()` with a batch on packed rows: the padded loop's answers, with rows of every sequence's own number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plain_comparison import (
    assert_same_as_plain,
    exact_target,
    generate,
    oracle_for,
    prompt,
    ragged_batch,
    shared_target,
)
from tiny_models import tiny_drafter
from transformers import LogitsProcessorList, PreTrainedModel, TopKLogitsWarper

from adaflash_hf.errors import UnsupportedGenerationError
from adaflash_hf.generation import packed_decoding
from adaflash_hf.generation.drafter_hooks import hooks_of
from adaflash_hf.generation.length_policies import LengthPolicy, RoundContext, RoundOutcome


NEW_TOKENS = 18


class ByRow(LengthPolicy):
    """The n-th row of the batch verifies n + 1 rows; notes what it is told."""

    def __init__(self, needs_tokens: bool = False) -> None:
        self.needs_tokens = needs_tokens
        self.packed: list[bool] = []
        self.outcomes: list[RoundOutcome] = []

    def verify_lengths(self, drafter: Any, hidden_states: torch.Tensor, longest: int) -> list[int]:
        raise AssertionError("the whole context is known")

    def choose_lengths(self, drafter: Any, hidden_states: torch.Tensor, context: RoundContext) -> list[int]:
        self.packed.append(context.is_packed)
        if self.needs_tokens:
            assert context.likeliest is not None
            assert context.likeliest.token_ids.shape == (len(context.longest), drafter.config.draft_length)
        rows = zip(context.request_ids, context.longest, strict=True)
        return [min(int(str(row)) + 1, bound) for row, bound in rows]

    def needs_likeliest(self, drafter: Any) -> bool:
        return self.needs_tokens

    def observe_round(self, context: RoundContext, outcome: RoundOutcome) -> None:
        self.outcomes.append(outcome)


@pytest.fixture
def packed_rounds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sequences of each packed round."""
    rounds: list[int] = []
    original = packed_decoding.PackedDecoding._round_packed

    def spy(self: Any, batch: Any) -> None:
        rounds.append(len(batch.alive))
        original(self, batch)

    monkeypatch.setattr(packed_decoding.PackedDecoding, "_round_packed", spy)
    return rounds


@pytest.mark.parametrize("needs_tokens", [False, True])
def test_every_row_verifies_its_own_number(needs_tokens: bool, packed_rounds: list[int]) -> None:
    policy = ByRow(needs_tokens)
    target, inputs = shared_target(), ragged_batch()
    drafter = assert_same_as_plain(target, inputs, drafting={"length_policy": policy}, max_new_tokens=NEW_TOKENS)
    stats = drafter.last_generation_stats
    assert set(policy.packed) == {True}
    assert list(policy.outcomes[0].verify_lengths) == [1, 2, 3, 4]
    assert stats.drafted_tokens == sum(sum(outcome.verify_lengths) for outcome in policy.outcomes) - stats.rounds
    assert set(stats.verify_lengths) == {1, 2, 3, 4}
    # Who is done leaves: rows that are verified more get there sooner.
    assert packed_rounds[0] == 4 and packed_rounds[-1] == 1
    assert stats.target_forwards == len(packed_rounds) + 1
    assert stats.committed_tokens == 4 * (NEW_TOKENS - 1)


@pytest.mark.parametrize("architecture", ["gemma3_text", "gpt_oss", "qwen3_moe"])
def test_other_architectures(architecture: str, packed_rounds: list[int]) -> None:
    target = shared_target(architecture)
    assert_same_as_plain(target, ragged_batch(), drafting={"length_policy": ByRow()}, max_new_tokens=NEW_TOKENS)
    assert packed_rounds


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.3},
        {"logits_processor": LogitsProcessorList([TopKLogitsWarper(5)])},
        {"eos_token_id": list(range(30, 60)), "min_new_tokens": 3},
    ],
    ids=["reads the prefix", "prefix-free", "ends"],
)
def test_processors_and_ends_with_lengths_of_every_kind(options: dict[str, Any], packed_rounds: list[int]) -> None:
    drafting = {"length_policy": ByRow()}
    assert_same_as_plain(shared_target(), ragged_batch(), drafting=drafting, max_new_tokens=NEW_TOKENS, **options)
    assert packed_rounds


def test_sampled_tokens_are_within_what_processors_allow(packed_rounds: list[int]) -> None:
    target, inputs = shared_target(), ragged_batch()
    answer = generate(target, inputs, max_new_tokens=NEW_TOKENS)
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": True, "top_k": 1, "length_policy": ByRow()}
    drafter = oracle_for(target, inputs, answer)
    assert torch.equal(generate(target, inputs, assistant_model=drafter, **settings), answer)
    assert packed_rounds


def test_autocast(packed_rounds: list[int]) -> None:
    """Prompt and blocks take other ways through the linear layers and meet in one cache: their dtypes are the same."""
    target, inputs = exact_target(), ragged_batch((150, 120))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        answer = generate(target, inputs, max_new_tokens=6, assistant_model=tiny_drafter(target))
    assert answer.shape == (2, 156)
    assert packed_rounds


def test_layers_that_are_numbered_and_have_no_configuration(packed_rounds: list[int]) -> None:
    """As the decoder layers of Hunyuan and AFMoE."""
    target = exact_target()
    for index, layer in enumerate(target.model.layers):
        layer.layer_idx = index
    assert_same_as_plain(target, ragged_batch(), max_new_tokens=NEW_TOKENS)
    assert packed_rounds


def test_prompts_in_several_passes(monkeypatch: pytest.MonkeyPatch, packed_rounds: list[int]) -> None:
    monkeypatch.setattr(packed_decoding, "PREFILL_TOKENS", 10)  # 7 and 3, 11 alone, 5
    drafter = assert_same_as_plain(shared_target(), ragged_batch(), max_new_tokens=NEW_TOKENS)
    assert drafter.last_generation_stats.target_forwards == len(packed_rounds) + 3


def test_several_answers_per_prompt_and_no_mask(packed_rounds: list[int]) -> None:
    ids = torch.cat([prompt(6, seed=1), prompt(6, seed=2)])
    assert_same_as_plain(shared_target(), ids, max_new_tokens=NEW_TOKENS)
    assert len(packed_rounds) > 0
    target, one = shared_target(), prompt(6, seed=1)
    answer = generate(target, one, max_new_tokens=NEW_TOKENS)
    sampled = generate(
        target,
        one,
        max_new_tokens=NEW_TOKENS,
        do_sample=True,
        top_k=1,
        num_return_sequences=3,
        assistant_model=oracle_for(target, one, answer),
    )
    assert torch.equal(sampled, answer.expand(3, -1))


def test_hooks_are_told_of_rounds_and_results(packed_rounds: list[int]) -> None:
    target, inputs = exact_target(), ragged_batch()
    answer = generate(target, inputs, max_new_tokens=NEW_TOKENS)
    drafter = oracle_for(target, inputs, answer)
    calls: list[int] = []
    results: list[Any] = []
    hooks_of(drafter).between_rounds(lambda: calls.append(1))
    hooks_of(drafter).on_finished(results.append)
    generate(target, inputs, max_new_tokens=NEW_TOKENS, assistant_model=drafter, length_policy=ByRow())
    assert len(calls) == len(packed_rounds)
    assert [result.prompt_ids for result in results] == [
        prompt(n, seed=i + 1)[0].tolist() for i, n in enumerate((7, 3, 11, 5))
    ]
    assert [max(length for length, _ in result.rounds) for result in results] == [1, 2, 3, 4]
    assert all(sum(accepted + 1 for _, accepted in result.rounds) == NEW_TOKENS - 1 for result in results)


def prepares_inputs_itself(target: PreTrainedModel) -> None:
    original = target.prepare_inputs_for_generation
    target.prepare_inputs_for_generation = lambda *args, **kwargs: original(*args, **kwargs)  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "options",
    [
        {"return_dict_in_generate": True, "output_scores": True},
        {"prefill_chunk_size": 4},
        {"cache_implementation": "static"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_left_to_the_padded_loop(options: dict[str, Any], packed_rounds: list[int]) -> None:
    assert_same_as_plain(exact_target(), ragged_batch(), max_new_tokens=NEW_TOKENS, **options)
    assert not packed_rounds


def test_one_prompt_and_sampled_drafts_are_left_to_the_padded_loop(packed_rounds: list[int]) -> None:
    target, inputs = shared_target(), ragged_batch()
    drafter = oracle_for(target, inputs, generate(target, inputs, max_new_tokens=4))
    generate(target, inputs, max_new_tokens=4, do_sample=True, draft_proposal="sample", assistant_model=drafter)
    generate(target, prompt(), max_new_tokens=4, assistant_model=drafter)
    assert not packed_rounds


def test_a_model_that_prepares_its_inputs_is_left_to_the_padded_loop(packed_rounds: list[int]) -> None:
    target = exact_target()
    prepares_inputs_itself(target)
    assert_same_as_plain(target, ragged_batch(), max_new_tokens=NEW_TOKENS)
    assert not packed_rounds


def test_what_turns_out_to_be_impossible_in_the_prefill(
    monkeypatch: pytest.MonkeyPatch, packed_rounds: list[int]
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise UnsupportedGenerationError("a layer attends by itself")

    monkeypatch.setattr(packed_decoding.PackedTarget, "forward", refuse)
    drafter = assert_same_as_plain(exact_target(), ragged_batch(), max_new_tokens=NEW_TOKENS)
    assert not packed_rounds and drafter.last_generation_stats.rounds > 0
