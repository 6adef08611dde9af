"""The defects A to N of transformers 5.24's own assisted decoding: each is a test that passes here."""

from __future__ import annotations

from functools import cache
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
    rows_per_forward,
    shared_target,
)
from tiny_models import tiny_drafter
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, StoppingCriteria, StoppingCriteriaList
from transformers.cache_utils import StaticLayer
from transformers.generation.streamers import BaseStreamer

from adaflash_hf import FixedLengthPolicy, InvalidInputError


NEW_TOKENS = 24


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """One printable character per token id of the tiny targets."""
    backend = Tokenizer(models.WordLevel({chr(32 + i): i for i in range(96)}, unk_token=" "))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=chr(32))


class EndsWith(StoppingCriteria):
    """Stops a row whose last token is `token_id`; counts how often it was asked."""

    def __init__(self, token_id: int) -> None:
        self.token_id = token_id
        self.lengths: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.lengths.append(input_ids.shape[1])
        return input_ids[:, -1] == self.token_id


class CollectingStreamer(BaseStreamer):
    """Keeps everything it is given."""

    def __init__(self) -> None:
        self.puts: list[list[Any]] = []
        self.ends = 0

    def put(self, value: torch.Tensor) -> None:
        assert value.device.type == "cpu"
        self.puts.append(value.tolist())

    def end(self) -> None:
        self.ends += 1


class TestDefectsOfTheStockLoop:
    @pytest.mark.parametrize("batch", BATCHES)
    def test_a_criteria_on_the_last_token(self, batch: str) -> None:
        target, inputs = shared_target(), BATCHES[batch]()
        answer = generate(target, inputs, max_new_tokens=NEW_TOKENS)
        stop_id = int(answer[0, -NEW_TOKENS + 6])
        oracle = oracle_for(target, inputs, answer, wrong_every=None, block_size=8)
        criteria: list[EndsWith] = []

        def fresh() -> dict[str, Any]:
            criteria.append(EndsWith(stop_id))
            return {"stopping_criteria": StoppingCriteriaList(criteria[-1:])}

        # A criterion of one's own does not say what fills rows that end early, so plain decoding runs them on.
        assert_same_as_plain(
            target,
            inputs,
            oracle,
            fresh,
            max_new_tokens=NEW_TOKENS,
            **({} if batch == "one" else {"eos_token_id": 95}),
        )
        plain_lengths, our_lengths = (criterion.lengths for criterion in criteria)
        assert plain_lengths == sorted(set(our_lengths))

    @pytest.mark.parametrize("batch", BATCHES)
    def test_a_and_b_stop_strings(self, batch: str) -> None:
        target, inputs = shared_target(), BATCHES[batch]()
        answer = generate(target, inputs, max_new_tokens=NEW_TOKENS)
        stop_string = tokenizer().decode(answer[0, -NEW_TOKENS + 6 : -NEW_TOKENS + 9])
        oracle = oracle_for(target, inputs, answer, wrong_every=None, block_size=8)
        options = {"max_new_tokens": NEW_TOKENS, "tokenizer": tokenizer(), "eos_token_id": 95}
        assert_same_as_plain(target, inputs, oracle, stop_strings=stop_string, **options)
        got = generate(target, inputs, assistant_model=oracle, stop_strings=[stop_string, "never said"], **options)
        assert tokenizer().decode(got[0]).rstrip(chr(32)).endswith(stop_string)

    def test_b_stop_strings_of_the_generation_config(self) -> None:
        target = exact_target()
        answer = generate(target, prompt(), max_new_tokens=NEW_TOKENS)
        stop_string = tokenizer().decode(answer[0, -17:-12])
        assert stop_string not in tokenizer().decode(answer[0, :-13])
        oracle = oracle_for(target, prompt(), answer)
        config = GenerationConfig(max_new_tokens=NEW_TOKENS, stop_strings=[stop_string], do_sample=False)
        got = target.generate(prompt(), generation_config=config, tokenizer=tokenizer(), assistant_model=oracle)
        assert got.tolist() == answer[:, :-12].tolist()
        target.generation_config.stop_strings = [stop_string]
        got = generate(target, prompt(), max_new_tokens=NEW_TOKENS, tokenizer=tokenizer(), assistant_model=oracle)
        assert got.tolist() == answer[:, :-12].tolist()
        assert target.generation_config.stop_strings == [stop_string]

    def test_b_stop_strings_without_a_tokenizer(self) -> None:
        with pytest.raises(ValueError, match="tokenizer"):
            generate(shared_target(), prompt(), max_new_tokens=4, stop_strings="x", assistant_model=tiny_drafter())

    @pytest.mark.parametrize("batch", BATCHES)
    def test_d_synced_gpus(self, batch: str) -> None:
        """A rank that has finished keeps its answer while others go on, and runs one forward per step with them."""
        target, inputs = exact_target(), BATCHES[batch]()
        expected = generate(target, inputs, max_new_tokens=NEW_TOKENS)
        oracle = oracle_for(target, inputs, expected)
        generate(target, inputs, max_new_tokens=NEW_TOKENS, assistant_model=oracle)
        own_forwards = oracle.last_generation_stats.target_forwards
        steps: list[bool] = []

        def unfinished(this_peer_finished: bool, synced_gpus: bool, device: torch.device) -> bool:
            assert synced_gpus
            steps.append(this_peer_finished)
            return steps.count(True) < 6

        target._has_unfinished_sequences = unfinished
        rows = rows_per_forward(target)
        actual = generate(target, inputs, max_new_tokens=NEW_TOKENS, assistant_model=oracle, synced_gpus=True)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
        assert steps == [False] * (own_forwards - 1) + [True] * 6
        assert len(rows) == own_forwards + 5

    @pytest.mark.parametrize("batch", BATCHES)
    @pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
    def test_e_static_cache(self, architecture: str, batch: str) -> None:
        """Exact to the last token although the cache has not one slot to spare."""
        target, inputs = shared_target(architecture), BATCHES[batch]()
        static = {"cache_implementation": "static", "disable_compile": True}
        for new_tokens in (1, 2, 9, NEW_TOKENS):
            drafter = assert_same_as_plain(target, inputs, max_new_tokens=new_tokens, **static)
        assert drafter.last_generation_stats.acceptance_length > 2
        answer = generate(target, inputs, max_new_tokens=NEW_TOKENS)
        eos_token_id = [int(answer[0, -12]), int(answer[-1, -20])]
        assert_same_as_plain(target, inputs, max_new_tokens=NEW_TOKENS, eos_token_id=eos_token_id, **static)

    @pytest.mark.parametrize("batch", BATCHES)
    def test_e_static_cache_and_everything_in_a_dictionary(self, batch: str) -> None:
        target = exact_target("llama", attn_implementation="eager")
        outputs = {"output_scores": True}
        if batch == "one":  # what the states of padding are depends on the cache, and nobody looks at them
            outputs["output_hidden_states"] = True
            # Before transformers 5.24 a static cache cannot be cropped and has a dynamic stand-in without empty slots.
            outputs["output_attentions"] = hasattr(StaticLayer, "crop")
        assert_same_as_plain(
            target,
            BATCHES[batch](),
            max_new_tokens=9,
            cache_implementation="static",
            disable_compile=True,
            return_dict_in_generate=True,
            **outputs,
        )

    @pytest.mark.parametrize("architecture", ["qwen3", "gemma3_text", "qwen3_next"])
    def test_f_everything_in_a_dictionary(self, architecture: str) -> None:
        target = exact_target(architecture, attn_implementation="eager")
        everything = dict.fromkeys(
            ("return_dict_in_generate", "output_scores", "output_logits", "output_hidden_states", "output_attentions"),
            True,
        )
        assert_same_as_plain(target, prompt(), max_new_tokens=NEW_TOKENS, eos_token_id=-1, **everything)
        assert_same_as_plain(
            target, prompt(), max_new_tokens=9, prefill_chunk_size=4, repetition_penalty=1.2, **everything
        )

    def test_f_attentions_that_sdpa_does_not_give(self) -> None:
        target = exact_target(attn_implementation="sdpa")
        outputs = {"return_dict_in_generate": True, "output_attentions": True}
        drafter = assert_same_as_plain(target, prompt(), max_new_tokens=6, **outputs)
        answer = generate(target, prompt(), max_new_tokens=6, assistant_model=drafter, **outputs)
        assert answer.attentions == ((),) * 6

    @pytest.mark.parametrize("architecture", ["gemma3_text", "qwen3_next"])
    def test_f_hidden_states_of_a_batch(self, architecture: str) -> None:
        target, inputs = shared_target(architecture), ragged_batch((6, 6, 6))
        outputs = {"return_dict_in_generate": True, "output_hidden_states": True, "output_scores": True}
        assert_same_as_plain(target, inputs, max_new_tokens=12, **outputs)

    @pytest.mark.parametrize("batch", BATCHES)
    @pytest.mark.parametrize("architecture", ["qwen3", "gemma3_text", "qwen3_next"])
    def test_g_prompt_given_as_embeddings(self, architecture: str, batch: str) -> None:
        target = shared_target(architecture)
        inputs = ragged_batch() if batch == "ragged" else {"input_ids": prompt()}
        answer = generate(target, inputs, max_new_tokens=NEW_TOKENS)
        oracle = oracle_for(target, inputs, answer)
        input_ids = inputs.pop("input_ids")
        inputs["inputs_embeds"] = target.get_input_embeddings()(input_ids)
        assert_same_as_plain(target, inputs, oracle, max_new_tokens=NEW_TOKENS)
        got = generate(target, inputs, max_new_tokens=NEW_TOKENS, assistant_model=oracle)
        torch.testing.assert_close(got, answer[:, -NEW_TOKENS:], rtol=0, atol=0)
        assert oracle.last_generation_stats.acceptance_length > 2
        # With both, the ids are what processors and the result see.
        assert_same_as_plain(
            target, {**inputs, "input_ids": input_ids}, oracle, max_new_tokens=NEW_TOKENS, repetition_penalty=1.01
        )

    def test_h_classifier_free_guidance(self) -> None:
        target = shared_target()
        assert_same_as_plain(target, prompt(), max_new_tokens=NEW_TOKENS, guidance_scale=1.5)
        negative = {"negative_prompt_ids": prompt(5, seed=7)}
        assert_same_as_plain(target, prompt(), max_new_tokens=NEW_TOKENS, guidance_scale=2.0, **negative)

    @pytest.mark.parametrize("draft_proposal", ["argmax", "sample"])
    @pytest.mark.parametrize("batch", BATCHES)
    def test_i_verify_length_of_one_when_sampling(self, batch: str, draft_proposal: str) -> None:
        target, inputs = shared_target(), BATCHES[batch]()
        drafter = tiny_drafter(target)
        for processors in ({}, {"repetition_penalty": 1.2}):
            drafting = {"length_policy": FixedLengthPolicy(1), "draft_proposal": draft_proposal}
            torch.manual_seed(0)
            got = generate(
                target, inputs, assistant_model=drafter, max_new_tokens=9, do_sample=True, **processors, **drafting
            )
            assert got.shape[1] == BATCHES[batch]().shape[1] + 9 if batch == "one" else got.shape[0] == 4
            assert drafter.last_generation_stats.verify_lengths.keys() == {1}
            assert drafter.last_generation_stats.drafted_tokens == 0

    @pytest.mark.parametrize("batch", BATCHES)
    def test_j_streamer(self, batch: str) -> None:
        target, inputs = shared_target(), BATCHES[batch]()
        answer = generate(target, inputs, max_new_tokens=NEW_TOKENS)
        streamers: list[CollectingStreamer] = []

        def fresh() -> dict[str, Any]:
            streamers.append(CollectingStreamer())
            return {"streamer": streamers[-1]}

        eos_token_id = [int(answer[0, -10]), int(answer[-1, -16])]
        assert_same_as_plain(target, inputs, fresh=fresh, max_new_tokens=NEW_TOKENS, eos_token_id=eos_token_id)
        expected, actual = streamers
        assert actual.puts == expected.puts
        assert actual.ends == expected.ends == 1

    @pytest.mark.parametrize("new_tokens", [2, 9, 10, 17])
    def test_k_and_l_no_row_beyond_the_budget(self, new_tokens: int) -> None:
        target = exact_target()
        expected = generate(target, prompt(11), max_new_tokens=new_tokens)
        oracle = oracle_for(target, prompt(11), expected, wrong_every=7, block_size=8)
        rows = rows_per_forward(target)
        generate(target, prompt(11), max_new_tokens=new_tokens, assistant_model=oracle)
        assert rows[0] == 11
        length, end = 12, 11 + new_tokens
        for verified in rows[1:]:
            assert verified <= end - length
            length += 1 + next((i for i in range(verified - 1) if oracle.is_mistake(length + i)), verified - 1)
        assert length == end

    @pytest.mark.parametrize("architecture", ["qwen3", "gemma3_text", "qwen3_next"])
    def test_m_chunked_prefill(self, architecture: str) -> None:
        target = exact_target(architecture)
        for inputs in (prompt(11), ragged_batch()):
            assert_same_as_plain(target, inputs, max_new_tokens=12, prefill_chunk_size=4)
        drafter = tiny_drafter(target)
        rows = rows_per_forward(target)
        generate(target, prompt(11), max_new_tokens=3, prefill_chunk_size=4, assistant_model=drafter)
        assert rows[:3] == [4, 4, 3]

    def test_n_unknown_speculation_type(self) -> None:
        target, drafter = exact_target(), tiny_drafter()
        with pytest.raises(InvalidInputError, match="`speculation_type` is 'dflsh'"):
            generate(target, prompt(), assistant_model=drafter, speculation_type="dflsh")
        config = GenerationConfig(max_new_tokens=4, speculation_type="eagle")
        with pytest.raises(InvalidInputError, match="`speculation_type` is 'eagle'"):
            target.generate(prompt(), config, assistant_model=drafter)
        target.generation_config.speculation_type = "eagle"
        with pytest.raises(InvalidInputError, match="`speculation_type` is 'eagle'"):
            generate(target, prompt(), assistant_model=drafter)
        assert_same_as_plain(target, prompt(), max_new_tokens=4, drafting={"speculation_type": "adaflash"})
