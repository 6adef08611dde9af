from __future__ import annotations

import json
import time
from types import SimpleNamespace

import pytest
import torch
from stand_ins import StandInDrafter, StandInTarget, byte_tokenizer

from adaflash_hf.errors import InvalidInputError
from adaflash_hf.evaluation.comparison import (
    Comparison,
    DecodedRun,
    TimedTextStreamer,
    compare_decoding,
    decode_once,
    find_first_difference,
    stats_as_dict,
    warm_up,
)
from adaflash_hf.evaluation.prompts import encode_prompt


GREEDY = {"max_new_tokens": 10, "do_sample": False}


@pytest.fixture
def target() -> StandInTarget:
    return StandInTarget()


@pytest.fixture
def inputs() -> dict[str, torch.Tensor]:
    return encode_prompt(byte_tokenizer(), "hello")


def run_of(tokens: int, seconds: float) -> DecodedRun:
    return DecodedRun(tuple(range(tokens)), seconds)


def test_plain_run_has_the_new_tokens_only(target, inputs):
    run = decode_once(target, inputs, **GREEDY)
    expected = target.model.generate(**inputs, **GREEDY)[0, inputs["input_ids"].shape[1] :]
    assert run.token_ids == tuple(expected.tolist())
    assert run.decode_s > 0
    assert run.stats is None
    assert "assistant_model" not in target.calls[0]


def test_run_with_drafter_carries_its_statistics(target, inputs):
    drafter = StandInDrafter()
    run = decode_once(target, inputs, drafter=drafter, length_policy="fixed", **GREEDY)
    assert run.stats is drafter.last_generation_stats
    assert target.calls[0]["assistant_model"] is drafter
    assert target.calls[0]["length_policy"] == "fixed"


def test_batches_are_refused(target, inputs):
    batch = {name: tensor.expand(2, -1) for name, tensor in inputs.items()}
    with pytest.raises(InvalidInputError, match="pass one prompt"):
        decode_once(target, batch, **GREEDY)


def test_display_time_is_not_counted(target, inputs):
    streamer = TimedTextStreamer(byte_tokenizer(), lambda text: time.sleep(0.02))
    start = time.perf_counter()
    run = decode_once(target, inputs, streamer=streamer, **GREEDY)
    elapsed_s = time.perf_counter() - start
    assert streamer.display_s >= 0.02
    assert run.decode_s <= elapsed_s - streamer.display_s


def test_streamed_pieces_add_up_to_the_text(target, inputs):
    tokenizer = byte_tokenizer()
    pieces: list[str] = []
    run = decode_once(target, inputs, streamer=TimedTextStreamer(tokenizer, pieces.append), **GREEDY)
    assert "".join(pieces) == tokenizer.decode(run.token_ids, skip_special_tokens=True)


def test_identical_output_has_no_difference(target, inputs):
    comparison = compare_decoding(target, StandInDrafter(), inputs, generate_kwargs=GREEDY)
    assert comparison.first_difference is None
    assert comparison.plain[0].token_ids == comparison.adaflash[0].token_ids
    assert comparison.acceptance_length == 2.5
    assert json.loads(json.dumps(comparison.as_dict()))["identical"] is True


def test_a_wrong_token_is_found_with_its_gap(target, inputs):
    comparison = compare_decoding(target, StandInDrafter(wrong_at=3), inputs, generate_kwargs=GREEDY)
    difference = comparison.first_difference
    plain_ids = comparison.plain[0].token_ids
    assert difference is not None
    assert difference.position == 3
    assert difference.plain_token_id == plain_ids[3]
    assert difference.adaflash_token_id == plain_ids[3] ^ 1

    prefix = torch.cat([inputs["input_ids"], torch.tensor([plain_ids[:3]])], dim=1)
    with torch.no_grad():
        best, second = target.model(input_ids=prefix).logits[0, -1].topk(2).values.tolist()
    assert difference.top_two_gap == pytest.approx(best - second, abs=1e-5)
    assert not difference.is_near_tie
    assert json.loads(json.dumps(comparison.as_dict()))["first_difference"]["position"] == 3


def test_two_equal_logits_are_a_near_tie(target, inputs):
    run = decode_once(target, inputs, **GREEDY)
    best = run.token_ids[0]
    # A copy of the best token's output row gives a second token with the same logit everywhere.
    twin = 7 if best != 7 else 8
    target.model.lm_head.weight.data[twin] = target.model.lm_head.weight.data[best]
    difference = find_first_difference(target, inputs["input_ids"], (best, 1), (twin, 1))
    assert difference is not None
    assert difference.position == 0
    assert difference.top_two_gap == 0
    assert difference.is_near_tie


def test_a_tie_of_other_tokens_is_no_excuse(target, inputs):
    best = decode_once(target, inputs, **GREEDY).token_ids[0]
    twin, third = [token for token in (7, 8, 9) if token != best][:2]
    target.model.lm_head.weight.data[twin] = target.model.lm_head.weight.data[best]
    difference = find_first_difference(target, inputs["input_ids"], (best,), (third,))
    assert difference is not None
    assert not difference.is_near_tie


def test_a_response_that_stops_early_differs_at_its_end(target, inputs):
    difference = find_first_difference(target, inputs["input_ids"], (5, 6, 7), (5, 6))
    assert difference is not None
    assert (difference.position, difference.plain_token_id, difference.adaflash_token_id) == (2, 7, None)


def test_sides_take_turns_and_speeds_are_medians(target, inputs):
    order = []
    comparison = compare_decoding(
        target,
        StandInDrafter(),
        inputs,
        generate_kwargs=GREEDY,
        repeats=3,
        on_run=lambda side, run: order.append(side),
    )
    assert order == ["plain", "adaflash", "adaflash", "plain", "plain", "adaflash"]
    assert comparison.plain_tok_per_s == sorted(run.tok_per_s for run in comparison.plain)[1]


def test_the_plain_side_can_have_a_model_of_its_own(target, inputs, monkeypatch):
    other = StandInTarget()
    calls = []
    for name, model in (("target", target), ("other", other)):
        generate = model.generate
        monkeypatch.setattr(
            model,
            "generate",
            lambda *args, _name=name, _run=generate, **kwargs: (calls.append(_name), _run(**kwargs))[1],
        )
    compare_decoding(target, StandInDrafter(), inputs, generate_kwargs=GREEDY, plain_model=other)
    assert calls == ["other", "target"]


def test_only_the_first_repeat_is_streamed(target, inputs):
    made = []
    compare_decoding(
        target,
        StandInDrafter(),
        inputs,
        generate_kwargs=GREEDY,
        repeats=2,
        make_streamer=lambda side: made.append(side),
    )
    assert made == ["plain", "adaflash"]


def test_speedup_is_the_ratio_of_token_rates():
    comparison = Comparison((run_of(10, 2.0), run_of(10, 4.0), run_of(10, 3.0)), (run_of(10, 1.0),))
    assert comparison.speedup == pytest.approx(3.0)
    assert comparison.acceptance_length is None


def test_sampling_is_seeded_and_not_compared(target, inputs):
    comparison = compare_decoding(
        target,
        StandInDrafter(),
        inputs,
        generate_kwargs={"max_new_tokens": 10, "do_sample": True, "temperature": 2.0},
        repeats=2,
        seed=7,
    )
    assert comparison.sampled
    assert comparison.as_dict()["identical"] is None
    assert comparison.plain[0].token_ids == comparison.plain[1].token_ids


def test_repeats_must_be_positive(target, inputs):
    with pytest.raises(InvalidInputError, match="`repeats` is 0"):
        compare_decoding(target, StandInDrafter(), inputs, generate_kwargs=GREEDY, repeats=0)


def test_warm_up_runs_both_sides_twice(target, inputs):
    plain, adaflash = warm_up(target, StandInDrafter(), inputs, drafting_kwargs={"draft_proposal": "argmax"})
    assert ["assistant_model" in call for call in target.calls] == [False, True, False, True]
    assert plain.stats is None
    assert adaflash.stats is not None


def test_statistics_survive_json(target, inputs):
    run = decode_once(target, inputs, drafter=StandInDrafter(), **GREEDY)
    record = json.loads(json.dumps(stats_as_dict(run.stats)))
    assert record["acceptance_length"] == 2.5
    assert record["verify_lengths"] == {"4": 3, "2": 1}


class FixedLogits(torch.nn.Module):
    """A target whose logits are given."""

    device, dtype = torch.device("cpu"), torch.bfloat16

    def __init__(self, *logits):
        super().__init__()
        self.logits = torch.tensor([[logits]], dtype=self.dtype)

    def forward(self, **_):
        return SimpleNamespace(logits=self.logits)


@pytest.mark.parametrize(("second", "is_near_tie"), [(15.5625, True), (15.25, False)])
def test_bfloat16_logits_tie_within_four_roundings_of_the_best(second, is_near_tie):
    """An epsilon of 16 is 0.125: 15.5625 lies three and a half below, 15.25 six."""
    difference = find_first_difference(FixedLogits(0.0, 16.0, second), torch.tensor([[0]]), (1,), (2,))
    assert difference is not None
    assert difference.top_two_gap == 16 - second
    assert difference.is_near_tie is is_near_tie
