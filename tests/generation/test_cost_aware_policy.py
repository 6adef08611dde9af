"""The promise of the cost-aware policy, in simulated time with known acceptance, and its use in `generate()`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from plain_comparison import (
    assert_same_as_plain,
    exact_target,
    generate,
    oracle_for,
    prompt,
    ragged_batch,
    shared_target,
)
from simulated_rounds import (
    MEASURED_ACCEPTANCE,
    MEASURED_CPU,
    SMALL_CPU,
    Simulation,
    simulated_table,
    stand_in_drafter,
)

from adaflash_hf import (
    AdaFlashEngine,
    CostAwarePolicy,
    FixedLengthPolicy,
    InvalidInputError,
    RoundContext,
    RoundOutcome,
)
from adaflash_hf.generation.length_policies import build_length_policy


def always(value: float) -> Callable[[int], float]:
    return lambda number: value


def cost_aware(**kwargs) -> CostAwarePolicy:
    return CostAwarePolicy(**{"table": simulated_table(), **kwargs})


@pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("num_active", [1, 16, 64])
def test_bad_drafts_cost_next_to_nothing(num_active: int, is_packed: bool) -> None:
    """Drafting never pays here; trying it now and then must stay within 1 % of plain decoding."""
    run = Simulation(always(0.1), always(num_active), is_packed=is_packed).run(cost_aware(), 400)
    # From the round on where all that is unknown at first has been seen.
    assert run.speedup(first=20) > 0.99
    assert 0 < sum(run.drafted[20:]) < 40


@pytest.mark.parametrize(
    ("rate", "num_active"), [(0.5, 1), (0.5, 4), (0.7, 8), (0.7, 32), (0.7, 64)], ids=lambda value: str(value)
)
def test_not_slower_than_any_fixed_length(rate: float, num_active: int) -> None:
    fixed = [
        Simulation(always(rate), always(num_active)).run(FixedLengthPolicy(n), 300).speedup() for n in range(2, 9)
    ]
    run = Simulation(always(rate), always(num_active)).run(cost_aware(), 300)
    # Exploration costs 1 %; what is left is the spread of the speedup itself, about 3 % with one request.
    assert run.speedup(first=20) > 0.96 * max(1.0, *fixed)


@pytest.mark.parametrize("num_active", [16, 64])
def test_wrong_costs_and_a_wrong_head_are_found_out(num_active: int) -> None:
    """In the table plain rows are 30 % too dear and drafts 20 % too cheap; the head expects 1.6 times as much."""
    policy = cost_aware(table=simulated_table(lambda length: 1.3 if length == 1 else 0.8))
    run = Simulation(always(0.35), always(num_active), head_bias=1.6).run(policy, 600)
    assert run.speedup(first=300) > 0.98


def test_a_drafter_that_knows_itself_is_read() -> None:
    """The head says the same of all blocks; the probabilities of the drafts tell good ones from bad."""
    speedups = []
    for gives_probabilities in (False, True):
        run = Simulation(always(0.55), always(32), can_cut=True, machine=MEASURED_CPU, head_bias=0.0)
        run.gives_probabilities = gives_probabilities
        table = MEASURED_CPU.table(can_cut=True)
        speedups.append(run.run(cost_aware(table=table), 400).speedup(first=40))
    assert speedups[1] > 1.08 * speedups[0]


def test_a_small_gain_is_taken() -> None:
    """Drafting for all gains 7 %, less than what the first blocks must promise to be believed."""
    policy, run = on_measured_machine(32, acceptance=(0.74, 0.47, 0.25, 0.12, 0.05, 0.02, 0.01))
    run.run(policy, 400)
    assert sum(run.drafted[100:]) > 100
    assert run.speedup(first=20) > 1.03


def test_follows_acceptance_as_it_changes() -> None:
    rates = {False: 0.1, True: 0.8}
    run = Simulation(lambda number: rates[number // 400 % 2 == 1], always(16), seed=4).run(cost_aware(), 1600)
    bad, good, bad_again, good_again = (run.speedup(first + 100, first + 400) for first in range(0, 1600, 400))
    assert min(bad, bad_again) > 0.97
    assert min(good, good_again) > 1.4


def test_follows_concurrency_as_it_changes() -> None:
    run = Simulation(always(0.5), lambda number: (1, 64, 8, 128)[number // 100 % 4]).run(cost_aware(), 1600)
    for phase, floor in enumerate((1.4, 0.975, 1.15, 0.975)):
        windows = [run.speedups[first : first + 100] for first in range(400 + phase * 100, 1600, 400)]
        pairs = [pair for window in windows for pair in window]
        assert sum(plain for plain, _ in pairs) / sum(seconds for _, seconds in pairs) > floor, phase


def on_measured_machine(num_active: int, seed: int = 0, acceptance: Sequence[float] = MEASURED_ACCEPTANCE):
    """A policy that knows nothing of the drafter, whose head expects twice what is accepted, and its simulation."""
    policy = cost_aware(table=MEASURED_CPU.table())
    run = Simulation(lambda number: acceptance, always(num_active), machine=MEASURED_CPU, head_bias=1.9, seed=seed)
    return policy, run


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_active", [32, 64, 128])
def test_not_slower_than_plain_from_the_first_token_on(num_active: int, seed: int) -> None:
    """Requests of 96 tokens each: there is no time to make good for a dear beginning."""
    policy, run = on_measured_machine(num_active, seed)
    assert run.run(policy, 200, num_tokens=96 * num_active).speedup() >= 0.98


def test_one_request_is_drafted_for_from_the_first_token_on() -> None:
    """Twenty requests of 96 tokens, one after the other."""
    policy, run = on_measured_machine(1)
    assert run.run(policy, 2000, num_tokens=20 * 96).speedup() >= 1.5
    assert sum(run.drafted[:40]) > 30


def test_an_unknown_drafter_is_tried_on_a_few_requests() -> None:
    policy, run = on_measured_machine(64)
    assert policy.wants_draft(64) and policy.keeps_context(64)
    assert [policy.most_drafted(count) for count in (1, 3, 64)] == [1, 3, 4]
    run.run(policy, 2)
    assert run.drafted == [True] * 2  # eight blocks say enough
    assert not policy.wants_draft(64) and policy.keeps_context(64)


def test_rows_beyond_what_pays_are_verified_in_trials_alone() -> None:
    """Also where some requests are not drafted for because their prompts are still being read."""
    policy, run = on_measured_machine(32, acceptance=(0.9, 0.8, 0.7, 0.6, 0.5, 0.42, 0.35))
    states = torch.full((30, 8, 2), 0.13)  # the head expects next to nothing of these blocks
    trial = policy.choose(stand_in_drafter(), states[:4], RoundContext([8, 8, 8, 2], 32))
    assert trial == [4, 4, 4, 2]
    run.run(policy, 60)
    assert policy.most_drafted(32) == 32
    assert max(policy.choose(stand_in_drafter(), states, RoundContext([8] * 30, 32))) < 4


@pytest.mark.parametrize("num_active", [8, 32])
def test_a_better_drafter_is_adopted_soon(num_active: int) -> None:
    """After 300 rounds without use a much better version is loaded."""
    policy, run = on_measured_machine(num_active)
    run.run(policy, 300)
    assert run.speedup() > 0.98
    policy.drafter_changed()
    _, better = on_measured_machine(num_active, seed=1, acceptance=(0.9, 0.8, 0.7, 0.6, 0.5, 0.42, 0.35))
    better.run(policy, 60)
    assert sum(committed > 1.5 * num_active for committed in better.committed[:20]) > 10
    assert better.speedup(first=20) > 1.35


@pytest.mark.parametrize(("num_active", "gain"), [(8, 1.03), (32, 1.05)])
def test_blocks_are_cut_to_what_pays(num_active: int, gain: float) -> None:
    """No rows are drafted that nobody verifies, and yet what later slots are worth is seen."""
    acceptance = (0.72, 0.48, 0.3, 0.17, 0.1, 0.06, 0.03)
    runs = {}
    for can_cut in (False, True):
        _, run = on_measured_machine(num_active, acceptance=acceptance)
        run.can_cut = can_cut
        runs[can_cut] = run.run(cost_aware(table=MEASURED_CPU.table(can_cut=can_cut)), 400)
    assert set(runs[False].longest) == {8}
    cut = [longest for longest in runs[True].longest[40:] if longest < 8]
    assert len(cut) > 0.8 * len(runs[True].longest[40:])
    assert 8 in runs[True].longest[40:], "now and then a whole block"
    assert runs[True].speedup(first=40) > gain * runs[False].speedup(first=40)


def test_cut_blocks_grow_again_with_a_better_drafter() -> None:
    policy = cost_aware(table=MEASURED_CPU.table(can_cut=True))
    _, run = on_measured_machine(8, acceptance=(0.7, 0.3, 0.1, 0.05, 0.02, 0.01, 0.01))
    run.can_cut = True
    run.run(policy, 300)
    _, better = on_measured_machine(8, seed=1, acceptance=(0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65))
    better.can_cut = True
    better.run(policy, 300)
    assert sum(run.longest[-50:]) / 50 < 5 < sum(better.longest[-50:]) / 50


@pytest.mark.parametrize("step", ["outlook", "trial", "plain"])
def test_a_better_drafter_may_come_at_any_moment(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread's call of `generate()` may be the one that is told of it."""
    policy, run = on_measured_machine(32)
    run.run(policy, 60)
    keep, came = policy._keep, []

    def keep_meanwhile(key: tuple[object, ...], compute: Callable[[], object]) -> object:
        if key[0] == step and not came:
            came.append(step)
            policy.drafter_changed()
        return keep(key, compute)

    monkeypatch.setattr(policy, "_keep", keep_meanwhile)
    run.run(policy, 20)
    assert came == [step]
    assert any(run.drafted[-20:])


def test_more_rows_where_they_are_cheap() -> None:
    """At one request a step costs the same for one row and sixteen; at 64 it costs by the row."""
    torch.manual_seed(0)
    lengths = {}
    for num_active in (1, 64):
        states = torch.zeros(num_active, 8, 2)
        states[:, 0, 0] = 0.5
        context = RoundContext([8] * num_active, num_active)
        lengths[num_active] = cost_aware().choose(stand_in_drafter(), states, context)
    assert lengths[1] == [8]
    assert max(lengths[64]) < 6


def test_lengths_do_not_exceed_a_requests_budget() -> None:
    states = torch.full((3, 8, 2), 0.9)
    assert cost_aware().choose(stand_in_drafter(), states, RoundContext([1, 3, 8], 3)) == [1, 3, 8]


def test_costs_must_be_known() -> None:
    with pytest.raises(InvalidInputError, match="does not know any costs"):
        CostAwarePolicy().choose(stand_in_drafter(), torch.zeros(1, 8, 2), RoundContext([8], 1))
    with pytest.raises(InvalidInputError, match="`exploration_share` is 0"):
        CostAwarePolicy(exploration_share=0)


def test_one_policy_per_drafter_in_generate_and_one_per_engine() -> None:
    target = shared_target()
    drafter, other = (oracle_for(target, prompt(), prompt(12), block_size=4) for _ in range(2))
    assert build_length_policy("cost_aware", drafter) is build_length_policy("cost_aware", drafter)
    assert build_length_policy("cost_aware", drafter) is not build_length_policy("cost_aware", other)
    engines = [build_length_policy("cost_aware", drafter, is_engine=True) for _ in range(2)]
    assert engines[0] is not engines[1]


def test_generate_is_exact_and_costs_are_kept(tmp_path: Path) -> None:
    drafting = {"length_policy": CostAwarePolicy(cache_directory=tmp_path)}
    drafter = assert_same_as_plain(shared_target(), prompt(), drafting=drafting, max_new_tokens=12)
    (kept,) = tmp_path.iterdir()
    written = kept.stat().st_mtime_ns
    for policy in (drafting["length_policy"], CostAwarePolicy(cache_directory=tmp_path)):
        assert_same_as_plain(shared_target(), prompt(), drafter, drafting={"length_policy": policy}, max_new_tokens=12)
    assert kept.stat().st_mtime_ns == written


def test_padded_batches_are_exact() -> None:
    assert_same_as_plain(shared_target(), ragged_batch(), drafting={"length_policy": cost_aware()}, max_new_tokens=20)


def test_generate_goes_on_without_drafts() -> None:
    """Where drafting is known not to pay, rounds without drafts alternate with rare trials, and tokens stay exact."""
    target = exact_target()
    inputs = ragged_batch()
    expected = generate(target, inputs, max_new_tokens=40)
    drafter = oracle_for(target, inputs, expected, wrong_every=1, block_size=8)  # always wrong
    actual = generate(target, inputs, max_new_tokens=40, assistant_model=drafter, length_policy=cost_aware())
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert drafter.last_generation_stats.accepted_tokens == 0
    assert 1 in drafter.last_generation_stats.verify_lengths


def test_engine_is_exact() -> None:
    target = shared_target()
    prompts = [prompt(5 + n, seed=n) for n in range(6)]
    answers = [generate(target, ids, max_new_tokens=24) for ids in prompts]
    drafter = oracle_for(target, prompts[0], answers[0], block_size=6, wrong_every=4)
    drafter._references = [answer[0].tolist() for answer in answers]
    engine = AdaFlashEngine(target, drafter, length_policy=cost_aware(), max_concurrency=4)
    handles = [engine.submit(ids, max_new_tokens=24, do_sample=False) for ids in prompts]
    for handle, answer in zip(handles, answers, strict=True):
        assert handle.result().sequence_ids == answer[0].tolist()
    assert engine.statistics().accepted_tokens > 0


def test_what_was_learned_of_two_loops_is_kept_apart() -> None:
    """As in `generate()`, where one prompt is decoded by another loop than several."""

    class Bench:
        is_packed = True
        can_cut_blocks = False
        max_requests = 8
        longest_verify_length = 8

        drafter = stand_in_drafter()
        reads_likeliest = False

        def __init__(self, loop: str):
            self.loop = loop

        def fingerprint(self) -> dict[str, str]:
            return {"loop": self.loop}

    policy, one, other = cost_aware(), Bench("one"), Bench("other")
    policy.prepare(one)
    Simulation(always(0.1), always(8)).run(policy, 150)
    assert not policy.keeps_context(8)
    policy.prepare(other)
    assert policy.wants_draft(8) and policy.keeps_context(8)  # nothing is known here
    policy.prepare(one)
    assert not policy.keeps_context(8)


def test_the_drafter_reads_no_more_than_a_request_can_repay() -> None:
    assert cost_aware().most_read(32) == math.inf  # a trial reads what it needs
    most = []
    for rate in (0.8, 0.95):
        policy = cost_aware()
        Simulation(always(rate), always(32)).run(policy, 200)
        assert policy.most_read(4) == math.inf  # reading is cheap for few
        most.append(policy.most_read(32))
    # One token of 128 requests costs a 128th of a round, and to be read a fiftieth of that. With 32 requests a plain
    # round takes 58 ms: a drafter that saves all of that saves 64 times as much as it costs to read a token.
    dearest_s = SMALL_CPU.target_seconds(128) / 128 / 50
    assert 1 < most[0] < most[1] < SMALL_CPU.target_seconds(32) / 32 / dearest_s


def test_a_bad_drafter_reads_anything_in_trials() -> None:
    policy = cost_aware()
    Simulation(always(0.05), always(32)).run(policy, 200)
    assert policy.most_read(32) == math.inf


def test_beside_a_prompt_drafts_are_charged_for_what_they_took() -> None:
    """What else the round did is not known to be decoding's, so its time is not taken; that of drafts is."""
    spent = []
    for draft_s in (None, 1e-6, 0.1, 30.0):
        policy = cost_aware()
        Simulation(always(0.05), always(32)).run(policy, 200)
        before = policy._budget.seconds
        context = RoundContext([8] * 4, 32)
        policy.choose(stand_in_drafter(), torch.full((4, 8, 2), 0.2), context)
        policy.observe_round(context, RoundOutcome([4] * 4, [0] * 4, [False] * 4, True, 32, None, draft_s))
        spent.append(before - policy._budget.seconds)
    assert spent[0] == spent[1]  # at least what the table says
    assert spent[2] - spent[0] == pytest.approx(0.1 - SMALL_CPU.draft_seconds(4), rel=0.05)
    assert spent[2] < spent[3] < 0.5  # something else had the machine
