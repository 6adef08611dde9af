from __future__ import annotations

import pytest
import torch
from tiny_models import ARCHITECTURES, tiny_target
from transformers import DynamicCache

from adaflash_hf.errors import InvalidInputError
from adaflash_hf.training.batched_decoding import (
    DecodingSettings,
    PreallocatedLayer,
    decode_batch,
    eos_token_ids_of,
)


PROMPTS = [[5, 6, 7], [9], [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21], [30, 31], [40, 41, 42, 43]]
MAX_NEW_TOKENS = 14


def greedy_by_generate(target, prompt, eos):
    ids = torch.tensor([prompt])
    sequence = target.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=MAX_NEW_TOKENS,
        do_sample=False,
        eos_token_id=list(eos) or None,
    )
    return sequence[0, len(prompt) :].tolist()


def common_tokens(target):
    """Two tokens that end rows of the batch at different steps."""
    responses = [greedy_by_generate(target, prompt, ()) for prompt in PROMPTS]
    return responses[0][3], responses[2][7]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_responses_equal_generate_while_rows_end_at_different_steps(architecture):
    target = tiny_target(architecture)
    eos = common_tokens(target)
    responses = decode_batch(target, PROMPTS, DecodingSettings(MAX_NEW_TOKENS, eos_token_ids=eos))
    expected = [greedy_by_generate(target, prompt, eos) for prompt in PROMPTS]
    assert [response.response_ids.tolist() for response in responses] == expected
    assert [response.finished for response in responses] == [row[-1] in eos for row in expected]
    assert len({len(row) for row in expected}) > 1, "the rows must end at different steps for this test to mean much"


def test_features_and_teacher_equal_a_forward_over_the_whole_text():
    target = tiny_target("llama")
    settings = DecodingSettings(
        MAX_NEW_TOKENS, eos_token_ids=common_tokens(target), teacher_top_k=3, capture_layer_ids=(0, 2)
    )
    for prompt, response in zip(PROMPTS, decode_batch(target, PROMPTS, settings), strict=True):
        text = torch.tensor([prompt + response.response_ids.tolist()])
        output = target(text, output_hidden_states=True)
        features = torch.cat([output.hidden_states[1], output.hidden_states[3]], dim=-1)[0, :-1]
        torch.testing.assert_close(response.features, features, atol=1e-5, rtol=1e-4)
        log_probs = output.logits[0, len(prompt) - 1 : -1].log_softmax(-1).topk(3)
        assert torch.equal(response.teacher_ids.long(), log_probs.indices)
        # Stored as float16: ten bits of a logarithm below 16.
        torch.testing.assert_close(response.teacher_log_probs.float(), log_probs.values, atol=1e-2, rtol=1e-3)


def test_sampling_is_repeatable_and_follows_the_temperature():
    target = tiny_target("llama")
    settings = DecodingSettings(MAX_NEW_TOKENS, temperature=1.0)

    def sample(seed, settings=settings):
        responses = decode_batch(target, PROMPTS, settings, torch.Generator().manual_seed(seed))
        return [response.response_ids.tolist() for response in responses]

    assert sample(1) == sample(1) != sample(2)
    cold = sample(1, DecodingSettings(MAX_NEW_TOKENS, temperature=1e-3))
    assert cold == [greedy_by_generate(target, prompt, ()) for prompt in PROMPTS]


def test_preallocated_layer_holds_what_a_dynamic_layer_holds():
    torch.manual_seed(0)
    layer, reference = PreallocatedLayer(capacity=8), DynamicCache()
    for new in (3, 1, 1):
        keys, values = torch.randn(4, 2, new, 5), torch.randn(4, 2, new, 5)
        got, expected = layer.update(keys, values), reference.update(keys, values, 0)
        assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
    assert layer.get_seq_length() == 5 and layer.get_mask_sizes(1) == (6, 0)
    layer.keep_rows([(1, 3)], rows=3)
    assert torch.equal(layer.keys, reference.layers[0].keys[[0, 3, 2]])


def test_eos_ids_are_those_of_generate():
    target = tiny_target("llama")
    assert eos_token_ids_of(target) == ()
    target.generation_config.eos_token_id = 7
    assert eos_token_ids_of(target) == (7,)
    target.generation_config.eos_token_id = [7, 8]
    assert eos_token_ids_of(target) == (7, 8)


@pytest.mark.parametrize("prompts", [[], [[1], []]])
def test_empty_prompts_are_refused(prompts):
    with pytest.raises(InvalidInputError, match="prompt_ids"):
        decode_batch(tiny_target("llama"), prompts, DecodingSettings(2))


@pytest.mark.parametrize("fields", [{"max_new_tokens": 0}, {"max_new_tokens": 1, "temperature": -1.0}])
def test_settings_out_of_range_are_refused(fields):
    with pytest.raises(InvalidInputError):
        DecodingSettings(**fields)


def test_a_nucleus_cuts_off_the_unlikely():
    target = tiny_target("llama")
    greedy = [greedy_by_generate(target, prompt, ()) for prompt in PROMPTS]
    narrow = DecodingSettings(MAX_NEW_TOKENS, temperature=1.0, top_p=1e-6)
    responses = decode_batch(target, PROMPTS, narrow, torch.Generator().manual_seed(0))
    assert [response.response_ids.tolist() for response in responses] == greedy
    # The likeliest tokens with half the probability, and the first one more that reaches it.
    logits = target(torch.tensor([PROMPTS[0]])).logits[0, -1]
    probabilities, order = logits.softmax(-1).sort(descending=True)
    allowed = set(order[: int((probabilities.cumsum(0) < 0.5).sum()) + 1].tolist())
    wide = DecodingSettings(1, temperature=1.0, top_p=0.5)
    drawn = decode_batch(target, [PROMPTS[0]] * 300, wide, torch.Generator().manual_seed(0))
    assert {response.response_ids[0].item() for response in drawn} == allowed


@pytest.mark.parametrize(("fields", "name"), [({"top_p": 0.0}, "top_p"), ({"top_p": 0.9}, "temperature")])
def test_a_nucleus_that_means_nothing_is_refused(fields, name):
    with pytest.raises(InvalidInputError, match=name):
        DecodingSettings(4, **fields)
