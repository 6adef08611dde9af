"""Defect C of the stock loop, and more: caches that come from an earlier turn or go on to a later one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle_drafter import OracleDrafter
from plain_comparison import BATCHES, CACHE_NAME, Inputs, generate, oracle_for, prompt, ragged_batch, shared_target
from tiny_models import tiny_drafter
from transformers import DynamicCache, PreTrainedModel, StaticCache
from transformers.generation.streamers import BaseStreamer

from adaflash_hf import InvalidInputError


FIRST_TURN = 13
SECOND_TURN = 9


def cache_after(target: PreTrainedModel, inputs: Inputs, **kwargs: Any) -> tuple[torch.Tensor, Any]:
    """Ids and cache of a turn."""
    kwargs = {"max_new_tokens": FIRST_TURN, **kwargs}
    output = generate(target, inputs, return_dict_in_generate=True, **kwargs)
    return output.sequences, getattr(output, CACHE_NAME)


def next_turn(inputs: Inputs, sequences: torch.Tensor, masks_endings: bool = True) -> dict[str, torch.Tensor]:
    """`sequences` and four new tokens per row; padding after rows that ended early is masked if asked for."""
    new = torch.cat([prompt(4, seed=20 + row) for row in range(len(sequences))])
    mask = torch.ones_like(sequences)
    start = inputs.shape[1] if isinstance(inputs, torch.Tensor) else inputs["input_ids"].shape[1]
    if not isinstance(inputs, torch.Tensor):
        mask[:, :start] = inputs["attention_mask"]
    if masks_endings:
        mask[:, start:] = sequences[:, start:] != 0
    return {
        "input_ids": torch.cat([sequences, new], dim=1),
        "attention_mask": torch.cat([mask, torch.ones_like(new)], dim=1),
    }


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3_text", "qwen3_next"])
def test_three_turns(architecture: str) -> None:
    target = shared_target(architecture)
    ids, warm, drafter = prompt(), {}, None
    for turn in range(3):
        expected = generate(target, ids, max_new_tokens=FIRST_TURN)
        if drafter is None:
            drafter = oracle_for(target, ids, expected)
        drafter.memorise(target, expected.tolist(), wrong_every=5)
        sequences, cache = cache_after(target, ids, assistant_model=drafter, **warm)
        torch.testing.assert_close(sequences, expected, rtol=0, atol=0)
        assert cache.get_seq_length() == expected.shape[1] - 1
        assert drafter.last_generation_stats.acceptance_length >= 2
        ids = torch.cat([sequences, prompt(4, seed=turn + 20)], dim=1)
        warm = {CACHE_NAME: cache}


@pytest.mark.parametrize("masks_endings", [True, False])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("architecture", ["qwen3", "gemma3_text"])
def test_caches_pass_between_plain_and_ours(architecture: str, batch: str, masks_endings: bool) -> None:
    """Plain continues from our cache and we from plain's, with rows that ended early and the padding after them."""
    target, inputs = shared_target(architecture), BATCHES[batch]()
    answer = generate(target, inputs, max_new_tokens=FIRST_TURN)
    oracle = oracle_for(target, inputs, answer)
    eos = {"eos_token_id": int(answer[0, -7])}
    sequences, plain_cache = cache_after(target, inputs, **eos)
    our_sequences, our_cache = cache_after(target, inputs, assistant_model=oracle, **eos)
    torch.testing.assert_close(our_sequences, sequences, rtol=0, atol=0)
    assert our_cache.get_seq_length() == plain_cache.get_seq_length()
    second = next_turn(inputs, sequences, masks_endings)
    expected = generate(target, second, max_new_tokens=SECOND_TURN)
    from_ours = generate(target, second, max_new_tokens=SECOND_TURN, **{CACHE_NAME: our_cache})
    torch.testing.assert_close(from_ours, expected, rtol=0, atol=0)
    warm = {CACHE_NAME: plain_cache, "assistant_model": oracle}
    torch.testing.assert_close(generate(target, second, max_new_tokens=SECOND_TURN, **warm), expected, rtol=0, atol=0)


def test_only_the_new_tokens_are_passed() -> None:
    target, drafter = shared_target(), tiny_drafter()
    sequences, cache = cache_after(target, prompt(), assistant_model=drafter)
    second = next_turn(prompt(), sequences)
    expected = generate(target, second, max_new_tokens=SECOND_TURN)
    second["input_ids"] = second["input_ids"][:, cache.get_seq_length() :]
    actual = generate(target, second, max_new_tokens=SECOND_TURN, assistant_model=drafter, **{CACHE_NAME: cache})
    assert actual[0, -SECOND_TURN:].tolist() == expected[0, -SECOND_TURN:].tolist()


class TestContextOfTheDrafter:
    """What the drafter knows of a conversation lives as long as the target's cache of it."""

    def test_second_turn_begins_where_the_first_stopped(self) -> None:
        target = shared_target()
        oracle = oracle_for(target, prompt(), generate(target, prompt(), max_new_tokens=FIRST_TURN))
        sequences, cache = cache_after(target, prompt(), assistant_model=oracle)
        ids = next_turn(prompt(), sequences)["input_ids"]
        oracle.calls.clear()
        generate(target, ids, max_new_tokens=SECOND_TURN, assistant_model=oracle, **{CACHE_NAME: cache})
        new = oracle.calls[0]["position_ids"][0, : -oracle.config.block_size].tolist()
        # The rows of the last round of the first turn had not been projected yet.
        assert new == list(range(new[0], ids.shape[1]))
        assert sequences.shape[1] - oracle.config.block_size - 1 <= new[0] < sequences.shape[1]

    def test_another_drafter_starts_anew(self) -> None:
        target = shared_target()
        sequences, cache = cache_after(target, prompt(), assistant_model=tiny_drafter())
        ids = next_turn(prompt(), sequences)["input_ids"]
        expected = generate(target, ids, max_new_tokens=SECOND_TURN)
        other = oracle_for(target, ids, expected)
        actual = generate(target, ids, max_new_tokens=SECOND_TURN, assistant_model=other, **{CACHE_NAME: cache})
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
        # It has seen what this turn's prefill ran, and nothing of the first turn.
        new = other.calls[0]["position_ids"][0, : -other.config.block_size].tolist()
        assert new == list(range(sequences.shape[1] - 1, ids.shape[1]))

    @pytest.mark.parametrize("batch", BATCHES)
    def test_cropped_cache(self, batch: str) -> None:
        """Going back some tokens and on in another direction: the drafter forgets exactly as much as the target."""
        target, inputs = shared_target(), BATCHES[batch]()
        oracle = oracle_for(target, inputs, generate(target, inputs, max_new_tokens=FIRST_TURN))
        sequences, cache = cache_after(target, inputs, assistant_model=oracle)
        second = next_turn(inputs, sequences[:, :-8])
        cache.crop(sequences.shape[1] - 8 - cache.get_seq_length())
        expected = generate(target, second, max_new_tokens=SECOND_TURN)
        oracle.memorise(target, [])
        actual = generate(target, second, max_new_tokens=SECOND_TURN, assistant_model=oracle, **{CACHE_NAME: cache})
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
        self.assert_sees_every_token_once(oracle, second["attention_mask"])

    @staticmethod
    def assert_sees_every_token_once(oracle: OracleDrafter, attention_mask: torch.Tensor) -> None:
        """In the turn's first draft, each row sees as many slots of context as it has tokens before the anchor."""
        mask = oracle.calls[0]["attention_mask"]["full_attention"][:, 0, 0]  # (batch_size, slots + block)
        seen = mask[:, : -oracle.config.block_size].sum(dim=1)
        assert seen.tolist() == attention_mask.sum(dim=1).tolist()

    def test_rows_that_changed_between_turns(self) -> None:
        """Repeated rows no longer match what the drafter remembers: it starts anew."""
        target, drafter = shared_target(), tiny_drafter()
        sequences, cache = cache_after(target, prompt(), assistant_model=drafter)
        cache.batch_repeat_interleave(3)
        ids = next_turn(prompt(), sequences.expand(3, -1))["input_ids"]
        expected = generate(target, ids, max_new_tokens=SECOND_TURN)
        actual = generate(target, ids, max_new_tokens=SECOND_TURN, assistant_model=drafter, **{CACHE_NAME: cache})
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


class TestCachesOfTheUser:
    @pytest.mark.parametrize("kind", ["dynamic", "static"])
    @pytest.mark.parametrize("batch", BATCHES)
    def test_empty_cache_is_filled(self, batch: str, kind: str) -> None:
        """It holds all rows to the end, those that ended early too, and the next turn goes on from it."""
        target, inputs = shared_target("llama"), BATCHES[batch]()
        answer = generate(target, inputs, max_new_tokens=FIRST_TURN)
        oracle = oracle_for(target, inputs, answer)
        if kind == "static":
            cache = StaticCache(config=target.config, max_cache_len=answer.shape[1] + 4 + SECOND_TURN)
        else:
            cache = DynamicCache(config=target.config)
        warm = {CACHE_NAME: cache, "assistant_model": oracle, "disable_compile": True}
        sequences = generate(target, inputs, max_new_tokens=FIRST_TURN, eos_token_id=int(answer[0, -7]), **warm)
        assert cache.layers[0].keys.shape[0] == len(answer)
        assert int(cache.get_seq_length()) == sequences.shape[1] - 1
        second = next_turn(inputs, sequences)
        expected = generate(target, second, max_new_tokens=SECOND_TURN)
        actual = generate(target, second, max_new_tokens=SECOND_TURN, **warm)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
        assert int(cache.get_seq_length()) == expected.shape[1] - 1

    def test_sliding_layers_stop_recording(self) -> None:
        """Later plain decoding on the cache must not keep more than the window."""
        target = shared_target("gemma3_text")
        sequences, cache = cache_after(target, prompt(), assistant_model=tiny_drafter(target))
        assert not any(getattr(layer, "record_past", False) for layer in cache.layers)
        generate(target, sequences, max_new_tokens=SECOND_TURN, **{CACHE_NAME: cache})
        assert cache.layers[0].keys.shape[-2] == target.config.sliding_window - 1

    def test_cache_that_holds_the_whole_prompt(self) -> None:
        target, drafter = shared_target(), tiny_drafter()
        sequences, cache = cache_after(target, prompt(), assistant_model=drafter)
        with pytest.raises(InvalidInputError, match="`cache` already holds 21 tokens but the prompt has 21"):
            generate(target, sequences[:, :-1], max_new_tokens=9, assistant_model=drafter, **{CACHE_NAME: cache})

    def test_recurrent_batch_returns_no_cache(self) -> None:
        """Each row has a cache of its own, so there is none to hand out."""
        target = shared_target("qwen3_next")
        _, cache = cache_after(target, ragged_batch((4, 6)), max_new_tokens=3, assistant_model=tiny_drafter(target))
        assert cache is None


class Interrupted(BaseStreamer):
    """Ctrl-C at the seventh token; plain decoding streams the prompt first."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        if len(value.flatten()) == 1:
            self.tokens.extend(value.tolist())
        if len(self.tokens) == 7:
            raise KeyboardInterrupt

    def end(self) -> None:
        raise AssertionError("generation was not interrupted")


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3_text", "qwen3_next"])
def test_an_interrupted_call_leaves_a_cache_to_go_on_with(architecture: str) -> None:
    """It holds nothing but tokens that were streamed, whatever else was being verified."""
    target = shared_target(architecture)
    expected = generate(target, prompt(), max_new_tokens=20)
    drafter = oracle_for(target, prompt(), expected, wrong_every=3)
    cache, streamer = DynamicCache(config=target.config), Interrupted()
    with pytest.raises(KeyboardInterrupt):
        generate(
            target, prompt(), max_new_tokens=20, assistant_model=drafter, streamer=streamer, **{CACHE_NAME: cache}
        )
    known = torch.cat([prompt(), torch.tensor([streamer.tokens])], dim=1)
    assert torch.equal(known, expected[:, : known.shape[1]])
    assert prompt().shape[1] <= cache.get_seq_length() < known.shape[1]
    assert not any(getattr(layer, "record_past", False) for layer in cache.layers)
    answer = generate(target, known, max_new_tokens=20 - len(streamer.tokens), **{CACHE_NAME: cache})
    assert torch.equal(answer, expected)
