"""Random numbers and bookkeeping of single requests."""

from __future__ import annotations

import torch
from engine_traffic import idle_request

from adaflash_hf.generation.engine_requests import RequestNoise, RequestState


def test_noise_belongs_to_the_token() -> None:
    """However the numbers are asked for, token i gets the same ones; other seeds get others."""
    whole = RequestNoise(3).take(0, 200)
    assert whole.shape == (200, 3) and whole.dtype == torch.float64
    assert 0 <= whole.min() and whole.max() < 1 and len(whole.unique()) == 600
    noise, first = RequestNoise(3), 0
    for count, kept in ((1, 1), (16, 5), (16, 16), (1, 1), (70, 64), (3, 0), (16, 2), (90, 90)):
        torch.testing.assert_close(noise.take(first, count), whole[first : first + count], rtol=0, atol=0)
        first += kept
    assert not torch.equal(RequestNoise(4).take(0, 5), whole[:5])


def test_noise_does_not_touch_the_global_generator() -> None:
    before = torch.get_rng_state()
    RequestNoise(0).take(0, 100)
    assert torch.equal(torch.get_rng_state(), before)


def test_chunks_of_prompt_and_of_returned_tokens() -> None:
    request = idle_request([1, 2, 3, 4, 5])
    request.state = RequestState.PREFILLING
    assert (request.prefill_target, request.prefill_remaining) == (5, 5)
    assert request.next_chunk(3) == [1, 2, 3]
    request.prefilled = 3
    assert (request.next_chunk(2), request.prefill_remaining) == ([4, 5], 2)
    request.commit([6, 7, 8])
    request.state = RequestState.DECODING
    assert (request.num_tokens, request.anchor_id, request.prefill_remaining, request.remaining) == (8, 8, 0, 5)
    # Returned: everything but the anchor is prefilled again.
    request.state, request.prefilled = RequestState.PREFILLING, 0
    assert request.prefill_remaining == 7
    assert request.next_chunk(7) == [1, 2, 3, 4, 5, 6, 7]
    request.prefilled = 4
    assert request.next_chunk(2) == [5, 6]
    request.prefilled = 6
    assert request.next_chunk(1) == [7]


def test_prefixes_are_made_when_asked_for() -> None:
    request = idle_request([1, 2])
    request.commit([3, 4])
    sequences = request.sequences_on(torch.device("cpu"))
    assert sequences.prefixes(4, {}).tolist() == [[1, 2, 3, 4]]
    request.commit([5])
    assert request.sequences_on(torch.device("cpu")) is sequences
    assert sequences.prefixes(6, {0: [9]}).tolist() == [[1, 2, 3, 4, 5, 9]]


def test_nothing_is_added_after_a_cancellation() -> None:
    request = idle_request([1])
    request.commit([2])
    assert request.handle.cancel()
    assert request.commit([3]) is None
    assert request.tokens == request.handle.token_ids == [2]
    request.handle.finish(request.build_result("cancelled"))
    request.handle.finish(request.build_result("stop"))
    assert request.handle.result().finish_reason == "cancelled"
    assert "cancelled" in repr(request.handle)


def test_statistics_of_a_request() -> None:
    request = idle_request([1, 2, 3])
    for tokens, round_ in (([4], None), ([5, 6, 7], (4, 2)), ([8], (4, 0))):
        request.commit(tokens)
        if round_:
            request.rounds.append(round_)
    stats = request.build_result("length").stats
    assert (stats.prompt_tokens, stats.generated_tokens, stats.committed_tokens) == (3, 5, 4)
    assert (stats.rounds, stats.drafted_tokens, stats.accepted_tokens) == (2, 6, 2)
    assert stats.acceptance_length == 2
    assert stats.acceptance_by_position == [0.5, 0.5, 0.0]
    assert stats.time_to_first_token_s is not None and stats.token_latency_s is not None
