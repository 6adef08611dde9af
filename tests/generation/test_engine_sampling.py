"""Per-request settings: seeds, processors, stop rules; and what one request does wrong stays its own."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from chain_statistics import chain_target, transition_p_value
from engine_traffic import assert_nothing_left, engine_oracle, engine_target, plain_answer, prompt_ids
from stand_ins import byte_tokenizer
from tiny_models import tiny_drafter, tiny_target
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from adaflash_hf import AdaFlashEngine, RequestResult
from adaflash_hf.generation.length_policies import LengthPolicy


NEW_TOKENS = 24
SAMPLING: dict[str, dict[str, Any]] = {
    "plain": {"top_k": 0},
    "top_k": {"top_k": 5, "temperature": 2.5},
    "top_p": {"top_p": 0.9, "temperature": 3.0},
    "repetition_penalty": {"top_k": 0, "temperature": 2.0, "repetition_penalty": 1.7},
    "eta": {"top_k": 0, "eta_cutoff": 0.01, "temperature": 2.0},
}


class LengthsByConcurrency(LengthPolicy):
    """Verify lengths that depend on the neighbours, as those of real policies do."""

    def wants_draft(self, num_active: int) -> bool:
        return num_active % 4 != 3

    def verify_lengths(self, drafter: Any, hidden_states: torch.Tensor, longest: int) -> list[int]:
        return [1 + (len(hidden_states) + row) % longest for row in range(len(hidden_states))]


def sampled(engine: AdaFlashEngine, seed: int, option: str) -> list[int]:
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": True, **SAMPLING[option]}
    return engine.submit(prompt_ids(2), seed=seed, **settings).result().token_ids


@cache
def alone(option: str) -> tuple[tuple[int, ...], ...]:
    """What seeds 0 and 1 draw without drafter and neighbours."""
    engine = AdaFlashEngine(engine_target())
    return tuple(tuple(sampled(engine, seed, option)) for seed in range(2))


@pytest.mark.parametrize("option", SAMPLING)
def test_same_seed_same_tokens_whoever_is_beside(option: str) -> None:
    """With and without drafts, neighbours, other verify lengths, and a return to the queue on the way."""
    first, second = alone(option)
    assert first != second
    engine = AdaFlashEngine(
        engine_target(), engine_oracle(block_size=6), length_policy=LengthsByConcurrency(), max_concurrency=6
    )
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": True, **SAMPLING[option]}
    handles = [engine.submit(prompt_ids(2), seed=seed, **settings) for seed in (0, 1, 0)]
    beside = [
        engine.submit(prompt_ids(index), max_new_tokens=5 + index, **SAMPLING[other], do_sample=True)
        for index, other in enumerate(SAMPLING)
    ]
    for _ in range(4):
        engine.step()
    engine._return(engine._scheduler.running[2])
    beside[0].cancel()
    assert [tuple(handle.result().token_ids) for handle in handles] == [first, second, first]
    assert handles[2].result().stats.returns == 1


def test_a_seed_is_drawn_and_reported() -> None:
    engine = AdaFlashEngine(engine_target())
    torch.manual_seed(5)
    results = [engine.submit(prompt_ids(1), max_new_tokens=9, do_sample=True).result() for _ in range(2)]
    assert results[0].seed != results[1].seed
    for result in results:
        again = engine.submit(prompt_ids(1), max_new_tokens=9, do_sample=True, seed=result.seed).result()
        assert again.token_ids == result.token_ids
    torch.manual_seed(5)
    assert engine.submit(prompt_ids(1), max_new_tokens=9, do_sample=True).result().seed == results[0].seed
    assert engine.submit(prompt_ids(1), max_new_tokens=9).result().seed is None


@pytest.mark.parametrize("draft_proposal", ["argmax", "sample"])
def test_distribution_of_many_sequences(draft_proposal: str) -> None:
    """Neighbours with different settings, lengths that follow concurrency; pairs of tokens against the exact chain."""
    target = chain_target()
    drafter = tiny_drafter(target, num_hidden_layers=1, num_attention_heads=2, target_layer_ids=[0, 1], block_size=5)
    with torch.no_grad():
        drafter.norm.weight.mul_(0.5)
    engine = AdaFlashEngine(
        target, drafter, draft_proposal=draft_proposal, length_policy=LengthsByConcurrency(), max_concurrency=12
    )
    options: dict[str, dict[str, Any]] = {
        "plain": {"top_k": 0},
        "warped": {"top_k": 6, "temperature": 0.8, "top_p": 0.95},
        "in_order": {"top_k": 0, "no_repeat_ngram_size": 200},  # a processor that reads what came before
    }
    handles = {
        name: [
            engine.submit([5, 6, 7], max_new_tokens=200, do_sample=True, seed=seed, **settings) for seed in range(6)
        ]
        for name, settings in options.items()
    }
    for name, submitted in handles.items():
        sequences = [handle.result().token_ids for handle in submitted]
        warping = {key: value for key, value in options[name].items() if key != "no_repeat_ngram_size"}
        assert transition_p_value(target, sequences, warping) > 0.01, name
    stats = engine.statistics()
    assert 0.03 * stats.drafted_tokens < stats.accepted_tokens < 0.9 * stats.drafted_tokens


def test_the_chain_test_can_fail() -> None:
    target = chain_target()
    engine = AdaFlashEngine(target, max_concurrency=12)
    handles = [
        engine.submit([5, 6, 7], max_new_tokens=200, do_sample=True, seed=seed, top_k=0, temperature=0.6)
        for seed in range(6)
    ]
    assert transition_p_value(target, [handle.result().token_ids for handle in handles], {"top_k": 0}) < 1e-4


# Processors, all at once beside each other


class CountsCalls(LogitsProcessor):
    """A user's own processor with state: forbids its favourite token until it was called a few times."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.lengths.append(input_ids.shape[1])
        if len(self.lengths) % 3 == 0:
            scores = scores.scatter(1, scores.argmax(dim=-1, keepdim=True), float("-inf"))
        return scores


GREEDY: dict[str, dict[str, Any]] = {
    "nothing": {},
    "repetition_penalty": {"repetition_penalty": 1.8},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "min_new_tokens": {"min_new_tokens": 12, "eos_token_id": list(range(5, 50))},
    "bad_words_ids": {"bad_words_ids": [[i] for i in range(5, 30)]},
    "suppress_tokens": {"suppress_tokens": list(range(5, 40))},
    "forced_eos_token_id": {"forced_eos_token_id": 17},
    "several_eos": {"eos_token_id": list(range(5, 20))},
    "top_k_of_one": {"do_sample": True, "top_k": 1},
    "sequence_bias": {"sequence_bias": [[[7], 9.0], [[8, 9], 5.0]]},
    "guidance": {"guidance_scale": 1.5, "negative_prompt_ids": torch.tensor([[9, 8]])},
}


@pytest.mark.parametrize("has_drafter", [False, True])
def test_every_option_equals_generate(has_drafter: bool) -> None:
    target = engine_target()
    engine = AdaFlashEngine(target, engine_oracle() if has_drafter else None)
    handles, expected = {}, {}
    prompt = torch.tensor([prompt_ids(3)])
    for name, options in GREEDY.items():
        handles[name] = engine.submit(prompt, max_new_tokens=NEW_TOKENS, **options)
        expected[name] = target.generate(prompt, max_new_tokens=NEW_TOKENS, **options)[0].tolist()
    config = GenerationConfig(max_new_tokens=7, repetition_penalty=1.3, eos_token_id=5)
    handles["config"] = engine.submit(prompt, config)
    expected["config"] = target.generate(prompt, generation_config=config)[0].tolist()
    for name, handle in handles.items():
        assert handle.result().sequence_ids == expected[name], name
    reasons = {name: handle.result().finish_reason for name, handle in handles.items()}
    assert reasons["several_eos"] == "stop" and reasons["nothing"] == "length"


def test_processors_with_state_are_called_once_per_token() -> None:
    target, mine, theirs = engine_target(), CountsCalls(), CountsCalls()
    engine = AdaFlashEngine(target, engine_oracle())
    other = engine.submit(prompt_ids(1), max_new_tokens=NEW_TOKENS)
    handle = engine.submit(prompt_ids(3), max_new_tokens=NEW_TOKENS, logits_processor=LogitsProcessorList([mine]))
    prompt = torch.tensor([prompt_ids(3)])
    expected = target.generate(prompt, max_new_tokens=NEW_TOKENS, logits_processor=LogitsProcessorList([theirs]))
    assert handle.result().sequence_ids == expected[0].tolist()
    assert mine.lengths == theirs.lengths
    assert other.result().token_ids == list(plain_answer("llama", 1)[:NEW_TOKENS])


def test_allowed_tokens_of_a_prefix() -> None:
    def allowed(batch_id: int, ids: torch.Tensor) -> list[int]:
        assert batch_id == 0
        return [int(ids[-1] + offset) % 90 + 5 for offset in (1, 2, 3)]

    target, prompt = engine_target(), torch.tensor([prompt_ids(2)])
    engine = AdaFlashEngine(target, engine_oracle())
    handle = engine.submit(prompt, max_new_tokens=9, prefix_allowed_tokens_fn=allowed)
    expected = target.generate(prompt, max_new_tokens=9, prefix_allowed_tokens_fn=allowed)
    assert handle.result().sequence_ids == expected[0].tolist()


# Stops


def test_stop_strings_to_the_token() -> None:
    tokenizer = byte_tokenizer()
    target = tiny_target("llama", vocab_size=len(tokenizer), num_hidden_layers=1)
    drafter = tiny_drafter(target, num_hidden_layers=1, target_layer_ids=[0])
    prompt = torch.tensor([[70, 71, 72]])
    answer = target.generate(prompt, max_new_tokens=20)[0, 3:].tolist()
    # The first character that a single token makes on its own; most tokens are bytes that only others complete.
    text = next(text for text in map(tokenizer.decode, answer[3:]) if text.isascii() and text.isalnum())
    engine = AdaFlashEngine(target, drafter, tokenizer=tokenizer)
    for strings in (text, [text, "never"]):
        expected = target.generate(prompt, max_new_tokens=20, stop_strings=strings, tokenizer=tokenizer)
        result = engine.submit(prompt, max_new_tokens=20, stop_strings=strings).result()
        assert result.sequence_ids == expected[0].tolist()
        assert result.finish_reason == "stop" and len(result.token_ids) < 20
    config = GenerationConfig(max_new_tokens=20, stop_strings=[text])
    other_engine = AdaFlashEngine(target)
    assert other_engine.submit(prompt, config, tokenizer=tokenizer).result().token_ids == result.token_ids
    assert config.stop_strings == [text]


class StopsAt(StoppingCriteria):
    def __init__(self, length: int):
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.tensor([input_ids.shape[1] >= self.length])


def test_criteria_of_the_user() -> None:
    engine = AdaFlashEngine(engine_target(), engine_oracle())
    length = len(prompt_ids(4)) + 6
    criteria = StoppingCriteriaList([StopsAt(length), EosTokenCriteria(plain_answer("llama", 4)[10])])
    result = engine.submit(prompt_ids(4), max_new_tokens=20, stopping_criteria=criteria).result()
    assert result.token_ids == list(plain_answer("llama", 4)[:6])
    assert result.finish_reason == "stop"


# What goes wrong in one request


class Breaks(LogitsProcessor):
    def __init__(self, after: int, with_what: Any):
        self.left, self.with_what = after, with_what

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left >= 0:
            return scores
        if isinstance(self.with_what, Exception):
            raise self.with_what
        return self.with_what(scores)


class BreaksWhenAsked(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        raise LookupError("no criterion")


def test_failures_stay_in_their_request() -> None:
    engine = AdaFlashEngine(engine_target(), engine_oracle())
    finished: list[RequestResult] = []
    engine.on_finished(finished.append)
    healthy = [engine.submit(prompt_ids(index), max_new_tokens=NEW_TOKENS) for index in (0, 5)]
    not_finite = {"do_sample": True, "logits_processor": [Breaks(2, lambda scores: scores * float("nan"))]}
    broken = {
        KeyError: engine.submit(prompt_ids(1), max_new_tokens=9, logits_processor=[Breaks(3, KeyError("mine"))]),
        IndexError: engine.submit(
            prompt_ids(1), max_new_tokens=9, logits_processor=[Breaks(0, IndexError("at once"))]
        ),
        LookupError: engine.submit(prompt_ids(1), max_new_tokens=9, stopping_criteria=[BreaksWhenAsked()]),
        ValueError: engine.submit(prompt_ids(1), max_new_tokens=9, **not_finite),
    }
    for error, handle in broken.items():
        with pytest.raises(error):
            handle.result()
        with pytest.raises(error):
            list(handle)
    # Of the block in which it happened nothing is kept.
    for most, handle in zip((3, 0, 0), broken.values(), strict=False):
        assert len(handle.token_ids) <= most
        assert handle.token_ids == list(plain_answer("llama", 1)[: len(handle.token_ids)])
    for index, handle in zip((0, 5), healthy, strict=True):
        assert handle.result().token_ids == list(plain_answer("llama", index)[:NEW_TOKENS])
    assert sorted(result.finish_reason for result in finished) == ["error"] * 4 + ["length"] * 2
    assert_nothing_left(engine)
