"""Processors, stopping criteria and other arguments of `generate()` mean with a drafter what they mean without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plain_comparison import (
    BATCHES,
    assert_same_as_plain,
    exact_target,
    generate,
    oracle_for,
    prompt,
    ragged_batch,
    shared_target,
)
from tiny_models import tiny_drafter
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)


NEW_TOKENS = 18


class RowFingerprint(LogitsProcessor):
    """Favours a token that depends on the row's index in the batch and on its last token."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        for row in range(len(scores)):
            scores[row, (input_ids[row, -1] + 11 * row + 1) % scores.shape[1]] += 3.0
        return scores


class StepCounter(LogitsProcessor):
    """Remembers the lengths it was called with: plain decoding calls it once per new token."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.lengths.append(input_ids.shape[1])
        return scores - scores * (len(self.lengths) % 3 == 0) * 2


class TestLogitsProcessors:
    @pytest.mark.parametrize("batch", BATCHES)
    @pytest.mark.parametrize(
        "options",
        [
            {"repetition_penalty": 1.3},
            {"no_repeat_ngram_size": 2},
            {"bad_words_ids": [[17], [20, 21]]},
            {"suppress_tokens": list(range(40, 60))},
            {"min_new_tokens": 14, "eos_token_id": list(range(30, 60))},
            {"exponential_decay_length_penalty": (3, 1.5), "eos_token_id": 90},
            {"sequence_bias": [[[33], 4.0], [[34, 35], -3.0]]},
            {"forced_eos_token_id": 7},
            {"watermarking_config": WatermarkingConfig(bias=4.0, context_width=1)},
            {"repetition_penalty": 1.1, "suppress_tokens": [40], "no_repeat_ngram_size": 3, "min_new_tokens": 5},
        ],
        ids=lambda options: "+".join(options),
    )
    def test_same_as_plain(self, options: dict[str, Any], batch: str) -> None:
        drafter = assert_same_as_plain(
            shared_target(),
            BATCHES[batch](),
            max_new_tokens=16,
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )
        assert drafter.last_generation_stats.accepted_tokens > 0

    def test_text_watermark_with_state(self) -> None:
        config = SynthIDTextWatermarkingConfig(ngram_len=3, keys=[3, 7, 11, 13], context_history_size=8)
        assert_same_as_plain(
            shared_target(), prompt(), max_new_tokens=NEW_TOKENS, watermarking_config=config, do_sample=True, top_k=1
        )

    @pytest.mark.parametrize("batch", BATCHES)
    def test_processor_that_looks_up_its_row(self, batch: str) -> None:
        assert_same_as_plain(
            shared_target(),
            BATCHES[batch](),
            max_new_tokens=16,
            logits_processor=LogitsProcessorList([RowFingerprint()]),
        )

    @pytest.mark.parametrize("batch", BATCHES)
    def test_prefix_allowed_tokens(self, batch: str) -> None:
        def allowed(row: int, ids: torch.Tensor) -> list[int]:
            return list(range(5 + (int(ids[-1]) + 13 * row) % 50, 80))

        assert_same_as_plain(shared_target(), BATCHES[batch](), max_new_tokens=16, prefix_allowed_tokens_fn=allowed)

    def test_stateful_processor_is_called_once_per_token(self) -> None:
        counters: list[StepCounter] = []

        def fresh() -> dict[str, Any]:
            counters.append(StepCounter())
            return {"logits_processor": LogitsProcessorList(counters[-1:])}

        assert_same_as_plain(shared_target(), prompt(), fresh=fresh, max_new_tokens=NEW_TOKENS)
        assert counters[0].lengths == counters[1].lengths


class RowBudget(StoppingCriteria):
    """Stops row i after `budgets[i]` tokens: looks its row up by index."""

    def __init__(self, prompt_tokens: int, budgets: list[int]) -> None:
        self.ends = prompt_tokens + torch.tensor(budgets)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids.shape[1] >= self.ends


class FinalScore(StoppingCriteria):
    """Stops a row whose last token had a score above a threshold: reads the scores."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self.num_scores: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.num_scores.append(len(scores))
        return scores[-1].max(dim=-1).values > self.threshold


class TestStopping:
    def test_criterion_that_looks_up_its_row(self) -> None:
        inputs = ragged_batch()
        criteria = StoppingCriteriaList([RowBudget(inputs["input_ids"].shape[1], [3, 11, 7, 12])])
        assert_same_as_plain(
            shared_target(), inputs, max_new_tokens=NEW_TOKENS, stopping_criteria=criteria, eos_token_id=95
        )

    def test_criterion_that_reads_the_scores(self) -> None:
        target = shared_target()
        outputs = {"return_dict_in_generate": True, "output_scores": True, "max_new_tokens": NEW_TOKENS}
        scores = torch.stack([step.max() for step in generate(target, prompt(), **outputs).scores])
        threshold = float(scores[:7].max()) - 1e-3
        criteria: list[FinalScore] = []

        def fresh() -> dict[str, Any]:
            criteria.append(FinalScore(threshold))
            return {"stopping_criteria": StoppingCriteriaList(criteria[-1:])}

        assert_same_as_plain(target, prompt(), fresh=fresh, **outputs)
        assert criteria[0].num_scores == criteria[1].num_scores
        assert len(criteria[0].num_scores) < NEW_TOKENS

    def test_max_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """With a clock that ticks once per look, both ways of decoding stop at the same token."""

        class TickingClock:
            def __init__(self) -> None:
                self.now = 0.0

            def time(self) -> float:
                self.now += 1.0
                return self.now

        for inputs in (prompt(),):
            monkeypatch.setattr("transformers.generation.stopping_criteria.time", TickingClock())
            assert_same_as_plain(shared_target(), inputs, max_new_tokens=NEW_TOKENS, max_time=9.5)

    def test_prompt_of_one_token_and_default_prompt(self) -> None:
        target = shared_target()
        assert_same_as_plain(target, prompt(1), max_new_tokens=NEW_TOKENS)
        drafter = tiny_drafter(target)
        expected = target.generate(max_new_tokens=8, do_sample=False, bos_token_id=1)
        got = target.generate(max_new_tokens=8, do_sample=False, bos_token_id=1, assistant_model=drafter)
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


class TestOtherArguments:
    def test_config_object_and_positional_arguments(self) -> None:
        target = shared_target()
        config = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False)
        expected = target.generate(prompt(), config)
        oracle = oracle_for(target, prompt(), expected)
        processors, criteria = LogitsProcessorList([RowFingerprint()]), StoppingCriteriaList()
        got = target.generate(prompt(), config, None, criteria, None, False, oracle)
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
        assert oracle.last_generation_stats.acceptance_length > 2
        expected = target.generate(prompt(), config, processors)
        for rest in ((None,), (None, None, None), (None, None, None, None)):
            got = target.generate(prompt(), config, processors, criteria, None, False, oracle, *rest)
            torch.testing.assert_close(got, expected, rtol=0, atol=0)

    def test_left_padding_of_one_prompt(self) -> None:
        inputs = ragged_batch((4, 9))
        one = {name: value[:1] for name, value in inputs.items()}
        assert_same_as_plain(shared_target("gemma3_text"), one, max_new_tokens=NEW_TOKENS)

    def test_target_generation_config_applies(self) -> None:
        target = exact_target()
        answer = generate(target, prompt(), max_new_tokens=NEW_TOKENS)
        target.generation_config.eos_token_id = int(answer[0, -10])
        target.generation_config.max_new_tokens = NEW_TOKENS
        assert_same_as_plain(target, prompt())

    @pytest.mark.parametrize("cache_implementation", ["dynamic", None])
    def test_cache_implementation(self, cache_implementation: str | None) -> None:
        assert_same_as_plain(shared_target(), prompt(), max_new_tokens=9, cache_implementation=cache_implementation)

    def test_statistics_are_of_the_last_call(self) -> None:
        target = shared_target()
        drafter = assert_same_as_plain(target, prompt(), max_new_tokens=NEW_TOKENS)
        stats = drafter.last_generation_stats
        assert stats.rounds == drafter.expected_rounds(prompt().shape[1], NEW_TOKENS)
        assert stats.target_forwards == stats.rounds + 1
        assert stats.committed_tokens == NEW_TOKENS - 1
        assert stats.committed_tokens == stats.accepted_tokens + stats.rounds
        assert sum(stats.verify_lengths.values()) == stats.rounds
        assert sum((length - 1) * count for length, count in stats.verify_lengths.items()) == stats.drafted_tokens
        assert 0 < stats.draft_s + stats.verify_s + stats.prefill_s <= stats.total_s
        generate(target, prompt(), max_new_tokens=1, assistant_model=drafter)
        assert drafter.last_generation_stats.rounds == 0
        assert drafter.last_generation_stats.acceptance_length == 0.0
