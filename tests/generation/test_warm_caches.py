"""Defect C of the stock loop, and more: caches that come from an earlier turn or go on to a later one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from oracle_drafter import OracleDrafter, oracle_drafter
from plain_comparison import BATCHES, CACHE_NAME, generate, oracle_for, prompt, ragged_batch, shared_target
from tiny_models import tiny_drafter
from transformers import PreTrainedModel

from adaflash_hf import InvalidInputError


def cache_after(target: PreTrainedModel, inputs: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
    output = generate(target, inputs, return_dict_in_generate=True, **kwargs)
    return output.sequences, getattr(output, CACHE_NAME)


class TestWarmCaches:
    """Defect C: a cache of an earlier turn."""

    @pytest.mark.parametrize("architecture", ["qwen3", "gemma3_text", "qwen3_next"])
    def test_three_turns(self, architecture: str) -> None:
        target = shared_target(architecture)
        ids, caches = prompt(), {"plain": None, "ours": None}
        for turn in range(3):
            kwargs = {"max_new_tokens": 13, "return_dict_in_generate": True}
            expected = generate(target, ids, **kwargs, **self._cache_kwarg(caches["plain"]))
            oracle = self._oracle_of_turn(target, expected.sequences, turn)
            actual = generate(target, ids, assistant_model=oracle, **kwargs, **self._cache_kwarg(caches["ours"]))
            torch.testing.assert_close(actual.sequences, expected.sequences, rtol=0, atol=0)
            caches = {"plain": getattr(expected, CACHE_NAME), "ours": getattr(actual, CACHE_NAME)}
            assert caches["ours"].get_seq_length() == expected.sequences.shape[1] - 1
            assert oracle.last_generation_stats.acceptance_length >= 2
            ids = torch.cat([expected.sequences, prompt(4, seed=turn + 20)], dim=1)

    @staticmethod
    def _cache_kwarg(cache: Any) -> dict[str, Any]:
        return {} if cache is None else {CACHE_NAME: cache}

    _drafter: OracleDrafter | None = None

    def _oracle_of_turn(self, target: PreTrainedModel, sequences: torch.Tensor, turn: int) -> OracleDrafter:
        """The same drafter object in every turn, knowing one turn more each time."""
        if turn == 0:
            self._drafter = oracle_drafter(target, sequences.tolist(), wrong_every=5)
        else:
            self._drafter.memorise(target, sequences.tolist(), wrong_every=5)
        return self._drafter

    def test_drafter_remembers_the_context(self) -> None:
        target = shared_target()
        answer = generate(target, prompt(), max_new_tokens=13)
        oracle = oracle_for(target, prompt(), answer)
        sequences, cache = cache_after(target, prompt(), max_new_tokens=13, assistant_model=oracle)
        ids = torch.cat([sequences, prompt(4, seed=20)], dim=1)
        oracle.calls.clear()
        generate(target, ids, max_new_tokens=9, assistant_model=oracle, **{CACHE_NAME: cache})
        positions = oracle.calls[0]["position_ids"][0, : -oracle.config.block_size].tolist()
        # The drafter saw all but the last verified rows in the first turn, so the second begins where it stopped.
        assert positions == list(range(positions[0], ids.shape[1]))
        assert sequences.shape[1] - oracle.config.block_size - 1 <= positions[0] < sequences.shape[1]
        other = tiny_drafter(target)
        sequences, cache = cache_after(target, prompt(), max_new_tokens=13, assistant_model=oracle)
        generate(target, ids, max_new_tokens=9, assistant_model=other, **{CACHE_NAME: cache})

    def test_cropped_cache(self) -> None:
        """Going back some tokens and on in another direction: the drafter forgets exactly as much as the target."""
        target = shared_target()
        for inputs in (prompt(), ragged_batch()):
            answer = generate(target, inputs, max_new_tokens=13)
            oracle = oracle_for(target, inputs, answer)
            padding = {} if isinstance(inputs, torch.Tensor) else dict(inputs)
            sequences, cache = cache_after(target, inputs, max_new_tokens=13, assistant_model=oracle)
            cache.crop(-6)
            new = prompt(4, seed=21).expand(len(sequences), -1)
            ids = torch.cat([sequences[:, :-8], new], dim=1)
            if padding:
                mask = padding["attention_mask"]
                padding = {"attention_mask": torch.cat([mask, mask.new_ones(4, ids.shape[1] - mask.shape[1])], dim=1)}
            expected = generate(target, {"input_ids": ids, **padding}, max_new_tokens=9)
            oracle.calls.clear()
            oracle.memorise(target, [])
            got = generate(
                target,
                {"input_ids": ids, **padding},
                max_new_tokens=9,
                assistant_model=oracle,
                **{CACHE_NAME: self._cropped_to(cache, ids.shape[1] - 4)},
            )
            torch.testing.assert_close(got, expected, rtol=0, atol=0)
            self._assert_context_is_exact(oracle, ids, padding)

    @staticmethod
    def _cropped_to(cache: Any, length: int) -> Any:
        if cache.get_seq_length() > length:
            cache.crop(length - cache.get_seq_length())
        return cache

    @staticmethod
    def _assert_context_is_exact(oracle: OracleDrafter, ids: torch.Tensor, padding: dict[str, torch.Tensor]) -> None:
        """In the turn's first draft, each row sees as many context slots as it has tokens before the anchor."""
        mask = oracle.calls[0]["attention_mask"]["full_attention"][:, 0, 0]  # (batch_size, slots + block)
        seen = mask[:, : -oracle.config.block_size].sum(dim=1)
        tokens = padding["attention_mask"].sum(dim=1) if padding else torch.tensor([ids.shape[1]])
        assert seen.tolist() == tokens.tolist()

    @pytest.mark.parametrize("batch", BATCHES)
    @pytest.mark.parametrize("architecture", ["qwen3", "gemma3_text"])
    def test_caches_pass_between_plain_and_ours(self, architecture: str, batch: str) -> None:
        """Plain continues from our cache and we from plain's, rows that ended early included."""
        target, inputs = shared_target(architecture), BATCHES[batch]()
        answer = generate(target, inputs, max_new_tokens=13)
        eos_token_id = int(answer[0, -7])
        oracle = oracle_for(target, inputs, answer)
        first = {"max_new_tokens": 13, "eos_token_id": eos_token_id}
        sequences, plain_cache = cache_after(target, inputs, **first)
        our_sequences, our_cache = cache_after(target, inputs, assistant_model=oracle, **first)
        torch.testing.assert_close(our_sequences, sequences, rtol=0, atol=0)
        assert our_cache.get_seq_length() == plain_cache.get_seq_length()
        ids = torch.cat([sequences, prompt(3, seed=9).expand(len(sequences), -1)], dim=1)
        second = {"input_ids": ids, "attention_mask": self._second_mask(inputs, sequences, ids)}
        fresh = generate(target, second, max_new_tokens=9)
        from_ours = generate(target, second, max_new_tokens=9, **{CACHE_NAME: our_cache})
        from_plain = generate(target, second, max_new_tokens=9, assistant_model=oracle, **{CACHE_NAME: plain_cache})
        torch.testing.assert_close(from_ours, fresh, rtol=0, atol=0)
        torch.testing.assert_close(from_plain, fresh, rtol=0, atol=0)

    @staticmethod
    def _second_mask(inputs: Any, sequences: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        mask = torch.ones_like(ids)
        if not isinstance(inputs, torch.Tensor):
            prompt_mask = inputs["attention_mask"]
            mask[:, : prompt_mask.shape[1]] = prompt_mask
            mask[:, prompt_mask.shape[1] : sequences.shape[1]] = sequences[:, prompt_mask.shape[1] :] != 0
        return mask

    def test_only_the_new_tokens_are_passed(self) -> None:
        target = shared_target()
        drafter = tiny_drafter(target)
        sequences, cache = cache_after(target, prompt(), max_new_tokens=6, assistant_model=drafter)
        ids = torch.cat([sequences, prompt(3, seed=9)], dim=1)
        expected = generate(target, ids, max_new_tokens=9)
        new = {"input_ids": ids[:, cache.get_seq_length() :], "attention_mask": torch.ones_like(ids)}
        got = generate(target, new, max_new_tokens=9, assistant_model=drafter, **{CACHE_NAME: cache})
        assert got[0, -9:].tolist() == expected[0, -9:].tolist()

    def test_empty_cache_of_the_user_is_filled(self) -> None:
        target, inputs = shared_target(), ragged_batch()
        answer = generate(target, inputs, max_new_tokens=13)
        oracle = oracle_for(target, inputs, answer)
        cache = transformers.DynamicCache(config=target.config)
        options = {"max_new_tokens": 13, "eos_token_id": int(answer[0, -7])}
        generate(target, inputs, assistant_model=oracle, **options, **{CACHE_NAME: cache})
        assert cache.layers[0].keys.shape[0] == 4
        assert cache.get_seq_length() == answer.shape[1] - 1

    def test_cache_whose_rows_changed_between_turns(self) -> None:
        """Repeated or selected rows no longer match what the drafter remembers: it starts anew."""
        target, drafter = shared_target(), tiny_drafter()
        sequences, cache = cache_after(target, prompt(), max_new_tokens=6, assistant_model=drafter)
        cache.batch_repeat_interleave(3)
        ids = torch.cat([sequences.expand(3, -1), torch.cat([prompt(2, seed=s) for s in range(3)])], dim=1)
        expected = generate(target, ids, max_new_tokens=9)
        got = generate(target, ids, max_new_tokens=9, assistant_model=drafter, **{CACHE_NAME: cache})
        torch.testing.assert_close(got, expected, rtol=0, atol=0)

    def test_sliding_layers_stop_recording(self) -> None:
        """Later plain decoding on the cache must not keep more than the window."""
        target = shared_target("gemma3_text")
        sequences, cache = cache_after(target, prompt(), max_new_tokens=9, assistant_model=tiny_drafter(target))
        window = target.config.sliding_window
        assert not any(getattr(layer, "record_past", False) for layer in cache.layers)
        generate(target, sequences, max_new_tokens=9, **{CACHE_NAME: self._cropped_copy(cache)})
        assert cache.layers[0].keys.shape[-2] == window - 1

    @staticmethod
    def _cropped_copy(cache: Any) -> Any:
        return cache

    def test_cache_that_holds_the_whole_prompt(self) -> None:
        target, drafter = shared_target(), tiny_drafter()
        sequences, cache = cache_after(target, prompt(), max_new_tokens=6, assistant_model=drafter)
        with pytest.raises(InvalidInputError, match="`cache` already holds 14 tokens but the prompt has 14"):
            generate(target, sequences[:, :14], max_new_tokens=9, assistant_model=drafter, **{CACHE_NAME: cache})

    def test_recurrent_batch_refuses_a_cache(self) -> None:
        target = shared_target("qwen3_next")
        cache = transformers.DynamicCache(config=target.config)
        with pytest.raises(ValueError, match="`cache`"):
            generate(
                target, ragged_batch(), max_new_tokens=3, assistant_model=tiny_drafter(target), **{CACHE_NAME: cache}
            )
