"""Greedy tokens of every request are those of plain `generate()`, whatever joins, leaves or is cancelled beside it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from engine_traffic import (
    assert_nothing_left,
    assert_plain,
    engine_oracle,
    engine_target,
    plain_answer,
    prompt_ids,
    random_arrivals,
    run_traffic,
)
from oracle_drafter import oracle_drafter
from plain_comparison import generate
from tiny_models import tiny_drafter, tiny_target
from transformers import BatchEncoding, PreTrainedModel

from adaflash_hf import (
    AdaFlashEngine,
    EngineQueueFullError,
    EngineStoppedError,
    InvalidInputError,
    RequestResult,
    UnsupportedGenerationError,
)
from adaflash_hf.generation.confidence_policy import ConfidencePolicy
from adaflash_hf.generation.length_policies import FixedLengthPolicy, LengthPolicy, RoundContext, RoundOutcome


def new_engine(drafter: Any = None, architecture: str = "llama", **kwargs: Any) -> AdaFlashEngine:
    return AdaFlashEngine(engine_target(architecture), drafter, **kwargs)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("has_drafter", [False, True])
def test_random_arrivals_and_cancellations(has_drafter: bool, seed: int) -> None:
    drafter = engine_oracle(block_size=4 + seed) if has_drafter else None
    engine = new_engine(drafter, max_concurrency=16, prefill_chunk_tokens=5 + 10 * seed)
    arrivals = random_arrivals(seed, count=40, over_rounds=30)
    handles = run_traffic(engine, arrivals)
    assert_plain(handles, arrivals)
    assert_nothing_left(engine)
    stats = engine.statistics()
    assert stats.finished_requests["cancelled"] > 2
    assert stats.peak_active_requests > 8
    if has_drafter:
        assert stats.acceptance_length > 2
        assert stats.drafted_tokens > stats.accepted_tokens > 0


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gemma3_text", "gpt_oss"])
def test_other_architectures(architecture: str) -> None:
    """Experts, sliding windows and attention sinks."""
    arrivals = random_arrivals(7, count=8, over_rounds=5)
    for drafter in (engine_oracle(architecture), None):
        engine = new_engine(drafter, architecture, max_concurrency=6, prefill_chunk_tokens=9)
        assert_plain(run_traffic(engine, arrivals), arrivals, architecture)
        assert_nothing_left(engine)


def test_a_drafter_that_is_always_wrong() -> None:
    target = engine_target()
    drafter = tiny_drafter(target, target_layer_ids=[0, 1], num_hidden_layers=1, block_layout="anchor_first")
    arrivals = random_arrivals(3, count=8, over_rounds=4)
    engine = new_engine(drafter, max_concurrency=4)
    assert_plain(run_traffic(engine, arrivals), arrivals)


class RandomLengths(LengthPolicy):
    """Lengths that change from round to round, and rounds without any draft."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.outcomes: list[tuple[RoundContext, RoundOutcome]] = []

    def wants_draft(self, num_active: int) -> bool:
        return bool(torch.rand((), generator=self.generator) < 0.7)

    def choose_lengths(self, drafter: Any, hidden_states: torch.Tensor, context: RoundContext) -> list[int]:
        assert hidden_states.shape[0] == len(context.longest) == len(context.request_ids) == len(context.num_generated)
        return [int(torch.randint(1, bound + 1, (), generator=self.generator)) for bound in context.longest]

    def verify_lengths(self, drafter: Any, hidden_states: torch.Tensor, longest: int) -> list[int]:
        raise AssertionError("the engine knows the whole round")

    def observe_round(self, context: RoundContext, outcome: RoundOutcome) -> None:
        self.outcomes.append((context, outcome))


def test_lengths_of_every_kind_and_what_the_policy_is_told() -> None:
    policy = RandomLengths()
    arrivals = random_arrivals(5, count=24, over_rounds=10)
    engine = new_engine(engine_oracle(block_size=6), max_concurrency=8, length_policy=policy)
    handles = run_traffic(engine, arrivals)
    assert_plain(handles, arrivals)
    assert {outcome.drafted for _, outcome in policy.outcomes} == {True, False}
    for context, outcome in policy.outcomes:
        drafted = len(outcome.verify_lengths)
        assert len(outcome.accepted) == len(outcome.ended) == drafted == len(context.longest) <= context.num_active
        assert all(
            a < length <= bound
            for a, length, bound in zip(outcome.accepted, outcome.verify_lengths, context.longest, strict=True)
        )
        assert outcome.committed <= sum(outcome.accepted) + context.num_active
    stats = engine.statistics()
    assert sum(outcome.committed for _, outcome in policy.outcomes) == stats.committed_tokens
    rounds = [round_ for handle in handles for round_ in handle.result().rounds]
    assert len(rounds) == stats.rounds
    assert sum(length - 1 for length, _ in rounds) == stats.drafted_tokens


@pytest.mark.parametrize("policy", [FixedLengthPolicy(3), "likeliest"], ids=["fixed", "likeliest"])
def test_rows_that_nobody_wants_are_not_drafted(policy: Any) -> None:
    """Where no row of a block sees a later one."""

    class Confident(ConfidencePolicy):
        def longest_wanted(self, num_active: int) -> int | None:
            return 3

    length_policy = Confident(threshold=1e-6) if policy == "likeliest" else policy
    drafter = tiny_drafter(engine_target(), target_layer_ids=[0, 1], num_hidden_layers=1, is_causal=True, block_size=6)
    rows: list[int] = []
    drafter.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(kwargs["noise_embeds"].shape[1]), with_kwargs=True
    )
    arrivals = random_arrivals(5, count=10, over_rounds=6, cancel_share=0)
    engine = new_engine(drafter, max_concurrency=4, length_policy=length_policy)
    handles = run_traffic(engine, arrivals)
    assert_plain(handles, arrivals)
    lengths = [length for handle in handles for length, _ in handle.result().rounds]
    assert max(lengths) == 3
    assert sum(rows) == 3 * sum(length > 1 for length in lengths)


def test_likeliest_tokens_for_policies_that_ask() -> None:
    seen = []

    class Reads(FixedLengthPolicy):
        def needs_likeliest(self, drafter: Any) -> bool:
            return True

        def choose_lengths(self, drafter: Any, hidden_states: torch.Tensor, context: RoundContext) -> list[int]:
            assert context.likeliest is not None
            assert bool(((context.likeliest.probabilities > 0) & (context.likeliest.probabilities <= 1)).all())
            seen.append(tuple(context.likeliest.token_ids.shape))
            return super().choose_lengths(drafter, hidden_states, context)

    engine = new_engine(engine_oracle(block_size=5), length_policy=Reads())
    assert engine.submit(prompt_ids(1), max_new_tokens=9).result().token_ids == list(plain_answer("llama", 1)[:9])
    assert set(seen) == {(1, 4)}


def test_policies_measure_on_the_engine_before_the_first_round() -> None:
    measured = []

    class Measures(FixedLengthPolicy):
        def prepare(self, bench: Any) -> None:
            measured.append(bench.max_requests)
            bench.run_draft(2)
            bench.run_target([3, 1])
            bench.close()

    engine = new_engine(engine_oracle(), length_policy=Measures(), max_concurrency=3)
    for _ in range(2):
        assert engine.submit(prompt_ids(2), max_new_tokens=5).result().token_ids == list(plain_answer("llama", 2)[:5])
    assert measured == [3]
    assert_nothing_left(engine)


# Memory


@pytest.mark.parametrize("has_drafter", [False, True])
def test_low_memory(has_drafter: bool) -> None:
    """Requests go back to the queue and are finished later; the limit holds after every round; nothing is lost."""
    target, prompts = engine_target(), [prompt_ids(index) for index in (0, 3, 9)]
    answers = [generate(target, torch.tensor([ids]), max_new_tokens=150)[0].tolist() for ids in prompts]
    drafter = None
    if has_drafter:
        drafter = oracle_drafter(target, answers, target_layer_ids=[0, 1], num_hidden_layers=1, wrong_every=4)
    limit = int(5.5 * new_engine(drafter)._rounds.bytes_for(160))
    engine = new_engine(drafter, max_concurrency=16, memory_limit_bytes=limit, concurrency_ema_weight=0.2)
    is_over = []
    engine.between_rounds(lambda: is_over.append(engine.statistics().memory_bytes > limit))
    handles = [engine.submit(prompts[number % 3], max_new_tokens=150) for number in range(9)]
    for number, handle in enumerate(handles):
        assert handle.result().sequence_ids == answers[number % 3]
        assert handle.token_ids == handle.result().token_ids
    assert_nothing_left(engine)
    stats = engine.statistics()
    assert stats.returned_requests > 0
    assert stats.returned_requests == sum(handle.result().stats.returns for handle in handles)
    assert handles[0].result().stats.returns == 0, "the oldest always gets on"
    assert stats.peak_memory_bytes <= limit and not any(is_over)
    assert stats.peak_active_requests > 2


def test_a_request_that_could_never_fit_is_refused() -> None:
    engine = new_engine(memory_limit_bytes=100_000)
    with pytest.raises(InvalidInputError, match="memory_limit_bytes"):
        engine.submit(prompt_ids(3), max_new_tokens=400)
    assert len(engine.submit(prompt_ids(3), max_new_tokens=4).result().token_ids) == 4


def test_out_of_memory_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the accelerator had less memory than thought: everyone starts over, fewer at a time."""
    engine = new_engine(engine_oracle(), max_concurrency=8)
    rows, forward = [], engine._rounds.target.forward

    def small_device(slots: Any, *args: Any, **kwargs: Any) -> Any:
        rows.append(len(slots))
        if len(slots) > 3:
            raise torch.OutOfMemoryError("simulated")
        return forward(slots, *args, **kwargs)

    monkeypatch.setattr(engine._rounds.target, "forward", small_device)
    arrivals = random_arrivals(2, count=8, over_rounds=1, cancel_share=0)
    assert_plain(run_traffic(engine, arrivals), arrivals)
    assert max(rows) == 8 and rows[-1] <= 3
    # Even a single request does not fit: that one fails, and says why.

    def no_device(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("simulated")

    monkeypatch.setattr(engine._rounds.target, "forward", no_device)
    with pytest.raises(torch.OutOfMemoryError, match="simulated"):
        engine.submit(prompt_ids(1), max_new_tokens=3).result()
    monkeypatch.setattr(engine._rounds.target, "forward", forward)
    assert engine.submit(prompt_ids(1), max_new_tokens=3).result().token_ids == list(plain_answer("llama", 1)[:3])


# Fairness


def test_a_long_prompt_does_not_stall_others() -> None:
    target = tiny_target("llama", num_hidden_layers=1)
    engine = AdaFlashEngine(target, prefill_chunk_tokens=16)
    decoding = engine.submit([5, 6, 7], max_new_tokens=60)
    engine.step()
    long = engine.submit([8] * 300, max_new_tokens=2)
    short = engine.submit([9] * 10, max_new_tokens=2)
    before = len(decoding.token_ids)
    for number in range(1, 6):
        engine.step()
        assert len(decoding.token_ids) == before + number
    assert short.is_done and not long.token_ids
    # A stream of short prompts does not keep the long one from its share.
    rounds = 0
    while not long.is_done:
        engine.submit([11] * 16, max_new_tokens=1)
        engine.step()
        rounds += 1
        assert rounds < 300 / 4 + 5


def test_first_come_first_served() -> None:
    order: list[int] = []
    engine = new_engine(max_concurrency=2)
    engine.on_finished(lambda result: order.append(result.request_id))
    handles = [engine.submit(prompt_ids(1), max_new_tokens=3) for _ in range(7)]
    handles[-1].result()
    assert order == [handle.request_id for handle in handles]


# Refusals


@pytest.mark.parametrize(
    ("ids", "kwargs", "error", "match"),
    [
        ([], {}, InvalidInputError, "at least one token"),
        (torch.zeros(2, 3, dtype=torch.long), {}, InvalidInputError, "one by one"),
        ("Hello", {}, InvalidInputError, r'is a str that .* Tokenize first .*`tokenizer\(text\)\["input_ids"\]`'),
        (["Hello"], {}, InvalidInputError, "is a list that .* Tokenize first"),
        (BatchEncoding({"input_ids": [5]}), {}, InvalidInputError, "is a BatchEncoding that .* Tokenize first"),
        ({"input_ids": [5]}, {}, InvalidInputError, "is a dict that .* Tokenize first"),
        ([5, 96], {}, InvalidInputError, "96 rows"),
        ([5, -1], {}, InvalidInputError, "-1"),
        ([5] * 500, {"max_new_tokens": 20}, InvalidInputError, "context ends at 512"),
        ([5] * 500, {"max_new_tokens": 20}, InvalidInputError, r"or pass `max_new_tokens=12` or less\.$"),
        ([5] * 512, {"max_new_tokens": 1}, InvalidInputError, r"context ends at 512\. Shorten the prompt\.$"),
        ([5], {"length_policy": "fixed"}, UnsupportedGenerationError, r"it is the engine's, `AdaFlashEngine\("),
        ([5], {"num_beams": 2}, UnsupportedGenerationError, r"`num_beams=1`, or call `target.generate\(\)` for this"),
        ([5], {"prompt_lookup_num_tokens": 3}, UnsupportedGenerationError, r"Leave it out, or call `target.generate"),
        ([5], {"num_return_sequences": 2, "do_sample": True}, UnsupportedGenerationError, "different seeds"),
        ([5], {"output_scores": True}, UnsupportedGenerationError, "tokens only"),
        ([0, 5], {"attention_mask": [0, 1]}, InvalidInputError, r"hides some .* `input_ids\[attention_mask"),
        ([5], {"position_ids": torch.tensor([[7]])}, UnsupportedGenerationError, "stand at 0, 1, 2"),
        ([5], {"streamer": object()}, UnsupportedGenerationError, "iterate"),
        ([5], {"do_sample": True, "seed": -1}, InvalidInputError, "seed"),
        ([5], {"stop_strings": "x"}, InvalidInputError, "tokenizer"),
        ([5], {"not_an_option": 1}, ValueError, "not_an_option"),
        ([5], {"max_new_tokens": 0}, ValueError, "max_new_tokens|max_length"),
    ],
)
def test_refused_before_any_work(ids: Any, kwargs: dict[str, Any], error: type[Exception], match: str) -> None:
    engine = new_engine()
    with pytest.raises(error, match=match):
        engine.submit(ids, **kwargs)
    assert not engine.has_requests


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"max_concurrency": 0}, "max_concurrency"),
        ({"max_queue": 0}, "max_queue"),
        ({"memory_limit_bytes": 0}, "memory_limit_bytes"),
        ({"prefill_chunk_tokens": 0}, "prefill_chunk_tokens"),
        ({"concurrency_ema_weight": 0.0}, "concurrency_ema_weight"),
        ({"length_policy": "fixed"}, "no drafter"),
        ({"draft_proposal": "guess"}, "draft_proposal"),
    ],
)
def test_refused_at_construction(kwargs: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidInputError, match=match):
        new_engine(**kwargs)


def test_recurrent_targets_are_refused() -> None:
    with pytest.raises(UnsupportedGenerationError, match="generate"):
        AdaFlashEngine(tiny_target("qwen3_next"))


def test_full_queue() -> None:
    engine = new_engine(max_concurrency=1, max_queue=2)
    handles = [engine.submit(prompt_ids(1), max_new_tokens=2)]
    engine.step()
    handles += [engine.submit(prompt_ids(1), max_new_tokens=2) for _ in range(2)]
    with pytest.raises(EngineQueueFullError, match="`max_queue` is 2"):
        engine.submit(prompt_ids(1))
    handles[-1].result()
    assert len(engine.submit(prompt_ids(1), max_new_tokens=2).result().token_ids) == 2


# Cancellation


def test_cancelled_at_every_stage() -> None:
    engine = new_engine(engine_oracle(), max_concurrency=2, prefill_chunk_tokens=4)
    decoding, prefilling, queued = (engine.submit(prompt_ids(i), max_new_tokens=20) for i in (0, 9, 1))
    while not decoding.token_ids:
        engine.step()
    tokens = decoding.token_ids
    assert not prefilling.token_ids and engine.queue_depth == 1
    assert all(handle.cancel() for handle in (decoding, prefilling, queued))
    assert not queued.cancel()
    for handle, expected in ((decoding, tokens), (prefilling, []), (queued, [])):
        result = handle.result()
        assert (result.finish_reason, result.token_ids, list(handle)) == ("cancelled", expected, expected)
    assert_nothing_left(engine)
    assert not decoding.cancel()


# Hooks


def test_callbacks_and_their_failures(caplog: pytest.LogCaptureFixture) -> None:
    engine = new_engine(engine_oracle())
    finished: list[RequestResult] = []
    rounds: list[int] = []

    def fails(*args: Any) -> None:
        raise ValueError("callback")

    for callback in (fails, finished.append):
        engine.on_finished(callback)
    engine.between_rounds(fails)
    stop_counting = engine.between_rounds(lambda: rounds.append(1))
    engine.drafter_version = 4
    with caplog.at_level(logging.ERROR):
        result = engine.submit(prompt_ids(1), max_new_tokens=12, domain="maths").result()
    assert result.token_ids == list(plain_answer("llama", 1)[:12])
    assert finished == [result]
    assert (result.domain, result.drafter_version, result.prompt_ids) == ("maths", 4, prompt_ids(1))
    assert sum(accepted + 1 for _, accepted in result.rounds) == result.stats.committed_tokens == 11
    assert "callback" in caplog.text
    assert len(rounds) == engine.statistics().steps
    stop_counting()
    stop_counting()
    engine.submit(prompt_ids(1), max_new_tokens=2).result()
    assert len(rounds) < engine.statistics().steps


def test_weights_exchanged_between_rounds() -> None:
    """What a drafter proposes may change at any time; what is said may not."""
    drafter = engine_oracle()
    engine = new_engine(drafter)
    versions = iter(range(1, 1000))

    def exchange() -> None:
        engine.drafter_version = next(versions)
        with torch.no_grad():
            drafter.fc.weight.normal_()

    engine.between_rounds(exchange)
    arrivals = random_arrivals(1, count=10, over_rounds=10)
    handles = run_traffic(engine, arrivals)
    assert_plain(handles, arrivals)
    assert len({handle.result().drafter_version for handle in handles}) > 2


def test_a_callback_must_not_wait() -> None:
    engine = new_engine()
    other = engine.submit(prompt_ids(2), max_new_tokens=9)
    seen: list[Exception] = []

    def waits(result: RequestResult) -> None:
        try:
            other.result()
        except RuntimeError as error:
            seen.append(error)

    engine.on_finished(waits)
    engine.submit(prompt_ids(1), max_new_tokens=1).result()
    assert "callback" in str(seen[0])


# Failures


def broken_target() -> PreTrainedModel:
    target = tiny_target("llama", num_hidden_layers=1)
    calls = []

    def fail_later(module: Any, args: Any) -> None:
        calls.append(1)
        if len(calls) > 3:
            raise FloatingPointError("the device is on fire")

    target.model.layers[0].register_forward_pre_hook(fail_later)
    return target


def test_death_is_reported_to_everyone() -> None:
    engine = AdaFlashEngine(broken_target(), max_concurrency=1)
    finished: list[RequestResult] = []
    engine.on_finished(finished.append)
    handles = [engine.submit([5, 6], max_new_tokens=9) for _ in range(3)]
    with pytest.raises(FloatingPointError, match="on fire"):
        handles[0].result()
    for handle in handles:
        with pytest.raises(EngineStoppedError, match="on fire") as caught:
            handle.result()
        assert isinstance(caught.value.__cause__, FloatingPointError)
    with pytest.raises(EngineStoppedError, match="on fire"):
        list(handles[1])
    assert len(handles[0].token_ids) == 3
    assert [result.request_id for result in finished] == [handle.request_id for handle in handles]
    assert all(isinstance(result.error, EngineStoppedError) for result in finished)
    assert engine.statistics().finished_requests == {"error": 3}
    for refused in (lambda: engine.submit([5]), engine.step, engine.start):
        with pytest.raises(EngineStoppedError):
            refused()


def test_statistics_start_over() -> None:
    engine = new_engine(engine_oracle())
    engine.submit(prompt_ids(1), max_new_tokens=6).result()
    first = engine.statistics()
    assert first.generated_tokens == 6 and first.prefilled_tokens == len(prompt_ids(1))
    assert first.time_to_first_token_s["p50"] > 0 and first.token_latency_s["p95"] > 0
    assert first.tok_per_s > 0 and first.draft_s > 0 and first.verify_s > 0 and first.prefill_s > 0
    engine.reset_statistics()
    assert engine.statistics().generated_tokens == engine.statistics().rounds == 0
    engine.submit(prompt_ids(1), max_new_tokens=4).result()
    assert engine.statistics().generated_tokens == 4
