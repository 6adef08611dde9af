from __future__ import annotations

import pytest
import torch
from oracle_drafter import give_head_unit_rows, oracle_drafter
from tiny_models import tiny_drafter, tiny_target

from adaflash_hf.errors import UnsupportedGenerationError
from adaflash_hf.training.batched_decoding import DecodingSettings, decode_batch
from adaflash_hf.training.drafted_decoding import DraftedDecoder, measure_response


PROMPTS = [[5, 6, 7], [9], [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21], [30, 31], [40, 41, 42, 43]]


def tokens_of(responses):
    return [response.response_ids.tolist() for response in responses]


@pytest.mark.parametrize("length_policy", ["fixed", "cost_aware"])
def test_greedy_batches_equal_plain_ones(length_policy, monkeypatch, tmp_path):
    monkeypatch.setenv("ADAFLASH_CACHE", str(tmp_path))  # costs are measured and kept there
    target = tiny_target("llama")
    # What a target's own configuration adds for chats must not change what it says here.
    target.generation_config.repetition_penalty, target.generation_config.top_k = 1.5, 3
    plain = decode_batch(target, PROMPTS, DecodingSettings(14))
    eos = (plain[0].response_ids[3].item(), plain[2].response_ids[7].item())
    settings = DecodingSettings(14, eos_token_ids=eos, teacher_top_k=3, capture_layer_ids=(0, 2))
    expected = decode_batch(target, PROMPTS, settings)
    decoder = DraftedDecoder(target, tiny_drafter(target), batch_size=5, length_policy=length_policy)
    responses = decoder.decode(PROMPTS, settings, seed=0)
    for response, reference in zip(responses, expected, strict=True):
        assert torch.equal(response.response_ids, reference.response_ids)
        assert response.finished == reference.finished
        assert torch.equal(response.teacher_ids, reference.teacher_ids)
        # Kept as float16.
        torch.testing.assert_close(response.teacher_log_probs, reference.teacher_log_probs, atol=1e-2, rtol=1e-3)
        torch.testing.assert_close(response.features, reference.features, atol=1e-5, rtol=1e-4)
    assert len({len(response.response_ids) for response in responses}) > 1


def test_statistics_tell_what_was_accepted():
    target = give_head_unit_rows(tiny_target("llama"))
    prompts, settings = [PROMPTS[2]], DecodingSettings(13)
    expected = tokens_of(decode_batch(target, prompts, settings))
    drafter = oracle_drafter(target, [prompts[0] + expected[0]])
    decoder = DraftedDecoder(target, drafter, batch_size=1, length_policy="fixed")
    assert tokens_of(decoder.decode(prompts, settings, seed=0)) == expected
    # The first token comes from the prompt; all drafts being right, three rounds then commit a block of 4 each.
    assert decoder.statistics.rounds == 3 and decoder.statistics.acceptance_length == 4


def test_sampling_depends_on_the_seed_alone():
    target = tiny_target("llama")
    settings = DecodingSettings(14, temperature=1.0)
    decoder = DraftedDecoder(target, tiny_drafter(target), batch_size=5, length_policy="fixed")

    def sample(seed, prompts=PROMPTS):
        return tokens_of(decoder.decode(prompts, settings, seed))

    assert sample(1) == sample(1) != sample(2)
    same = sample(3, [PROMPTS[0]] * 5)
    assert len({tuple(row) for row in same}) == 5, "equal prompts of a batch must draw different numbers"


def test_a_nucleus_and_a_low_temperature_leave_one_token():
    target = tiny_target("llama")
    greedy = tokens_of(decode_batch(target, PROMPTS, DecodingSettings(8)))
    decoder = DraftedDecoder(target, tiny_drafter(target), batch_size=5, length_policy="fixed")
    for settings in (DecodingSettings(8, temperature=1.0, top_p=1e-6), DecodingSettings(8, temperature=1e-3)):
        assert tokens_of(decoder.decode(PROMPTS, settings, seed=1)) == greedy


def test_nothing_is_measured_where_nothing_is_kept():
    response = measure_response(None, [1, 2], [3, 4], True, DecodingSettings(4))
    assert response.response_ids.tolist() == [3, 4] and response.teacher_ids is None and response.features is None


def test_a_recurrent_target_is_refused():
    target = tiny_target("qwen3_next")
    with pytest.raises(UnsupportedGenerationError, match="Leave it out"):
        DraftedDecoder(target, tiny_drafter(target), batch_size=2)
