"""Every method gives plain decoding's tokens and says what it measured."""

from __future__ import annotations

from functools import cache

import pytest
from oracle_drafter import oracle_drafter
from plain_comparison import exact_target, generate, prompt
from simulated_rounds import simulated_table
from tiny_models import tiny_drafter, tiny_target

from adaflash_hf import CostAwarePolicy, InvalidInputError
from adaflash_hf.evaluation.bench_method_builder import build_method, check_method
from adaflash_hf.evaluation.bench_method_names import METHODS, needs_drafter
from adaflash_hf.evaluation.bench_methods import BenchModels, Sampling
from adaflash_hf.evaluation.bench_results import summarise


PROMPTS = [prompt(5 + n, seed=n)[0].tolist() for n in range(4)]
NEW_TOKENS = 12


@cache
def models() -> BenchModels:
    """A target, an oracle that errs at every fourth position, and an assistant."""
    target = exact_target("llama")
    drafter = oracle_drafter(target, answers(), block_size=5, wrong_every=4, length_head_config={"bottleneck_size": 4})
    return BenchModels(target, drafter, assistant=tiny_target("llama", seed=7))


@cache
def answers() -> list[list[int]]:
    """Prompts with what plain decoding says, one by one."""
    import torch

    target = exact_target("llama")
    return [generate(target, torch.tensor([ids]), max_new_tokens=NEW_TOKENS)[0].tolist() for ids in PROMPTS]


def expected() -> list[list[int]]:
    return [answer[len(ids) :] for answer, ids in zip(answers(), PROMPTS, strict=True)]


@pytest.fixture(autouse=True)
def known_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves measuring costs."""
    from adaflash_hf.evaluation import bench_method_builder

    monkeypatch.setattr(
        bench_method_builder, "CostAwarePolicy", lambda **kwargs: CostAwarePolicy(table=simulated_table(), **kwargs)
    )


@pytest.mark.parametrize(
    ("name", "via_generate", "concurrency"),
    [
        *((name, False, 3) for name in ("plain", "dflash", "adaflash", "confidence", "cost_aware", "oracle")),
        *((name, True, 3) for name in ("plain", "dflash:3", "oracle")),
        ("transformers", False, 3),
        ("transformers_cb", False, 3),
        *((name, False, 1) for name in ("prompt_lookup", "transformers_dflash", "assistant")),
    ],
)
def test_methods_agree_with_plain_decoding(name: str, via_generate: bool, concurrency: int) -> None:
    method = build_method(name, models(), via_generate)
    assert method.name == name
    assert method.reason_to_skip(concurrency) is None
    method.prepare(concurrency)
    method.learn_answers(expected())
    run = method.run(PROMPTS, concurrency, NEW_TOKENS)
    assert run.token_ids == expected()
    assert run.generated_tokens == 4 * NEW_TOKENS
    assert run.seconds > 0 and run.peak_memory_bytes
    assert run.first_token is not None and run.token_latency is not None
    if needs_drafter(name) and name not in ("transformers_dflash", "cost_aware"):
        assert run.stats is not None and run.stats.accepted_tokens > 0
        assert 1 < run.stats.acceptance_length <= 5


def test_what_transformers_commits_in_a_round_is_counted() -> None:
    drafter = models().drafter
    run = build_method("transformers_dflash", models()).run(PROMPTS, 1, NEW_TOKENS)
    assert run.stats is not None
    assert run.stats.rounds == sum(drafter.expected_rounds(len(ids), NEW_TOKENS) for ids in PROMPTS)
    assert run.stats.target_forwards == run.stats.rounds + len(PROMPTS)
    assert run.stats.committed_tokens == len(PROMPTS) * (NEW_TOKENS - 1)
    row = summarise("transformers_dflash", "prompts", 1, [run], len(PROMPTS))
    assert row.acceptance_length == run.stats.committed_tokens / run.stats.rounds > 1
    assert row.mean_verify_length is None  # drafts are not told
    for name in ("prompt_lookup", "assistant"):
        stats = build_method(name, models()).run(PROMPTS, 1, NEW_TOKENS).stats
        assert stats is not None and stats.acceptance_length >= 1


def test_parameters_reach_the_policy() -> None:
    run = build_method("dflash:3", models()).run(PROMPTS, 2, NEW_TOKENS)
    assert run.stats is not None and max(run.stats.verify_lengths) == 3
    for name, attribute, value in [("adaflash:2.5", "length_scale", 2.5), ("confidence:0.5", "threshold", 0.5)]:
        assert getattr(build_method(name, models())._policy, attribute) == value  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dflash:0", "`verify_length` is 0"),
        ("osd:0", "`verify_length` is 0"),
        ("adaflash:-1", "`length_scale` is -1.0"),
        ("adaflash:nan", "`length_scale` is nan"),
        ("confidence:2", "`threshold` is 2.0, expected a probability above 0 and up to 1"),
        ("prompt_lookup:0", "prompt lookup proposes 1 token or more"),
        ("confidence:nan", "`threshold` is nan"),
    ],
)
def test_wrong_parameters_are_refused_without_models(name: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        check_method(name)


def test_one_prompt_at_a_time() -> None:
    for name in ("prompt_lookup", "transformers_dflash", "assistant"):
        assert "one prompt at a time" in str(build_method(name, models()).reason_to_skip(2))
    assert build_method("transformers", models()).reason_to_skip(2) is None


def test_answers_end_at_their_eos() -> None:
    target = models().target
    eos = expected()[0][4]
    target.generation_config.eos_token_id = eos
    try:
        for name in ("plain", "transformers", "transformers_cb"):
            run = build_method(name, models()).run(PROMPTS, 4, NEW_TOKENS)
            assert run.token_ids is not None
            assert run.token_ids[0] == expected()[0][: expected()[0].index(eos) + 1]
            assert all(eos not in ids[:-1] for ids in run.token_ids)
    finally:
        target.generation_config.eos_token_id = None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fastest", "`method` is 'fastest', expected one of plain"),
        ("plain:3", "plain takes no parameter"),
        ("dflash:x", "'x' is not a number"),
        ("dflash", "needs a drafter"),
        ("transformers_dflash", "needs a drafter"),
        ("assistant", "pass --assistant"),
        ("osd", "pass --osd-drafter"),
    ],
)
def test_what_is_refused(name: str, message: str) -> None:
    target = models().target
    has_drafter = name == "dflash:x"
    with pytest.raises(InvalidInputError, match=message):
        build_method(name, BenchModels(target, models().drafter if has_drafter else None))


def test_another_drafter_has_a_method_of_its_own() -> None:
    target = models().target
    better = oracle_drafter(target, answers(), block_size=5)
    both = BenchModels(target, models().drafter, osd_drafter=better)
    runs = [build_method(name, both).run(PROMPTS, 2, NEW_TOKENS) for name in ("dflash", "osd")]
    assert [run.token_ids for run in runs] == [expected(), expected()]
    # One errs at every fourth position, the other never: the eleven tokens after the first are 5, 5 and 1.
    taus = [run.stats.acceptance_length for run in runs if run.stats is not None]
    assert taus[0] < taus[1] == pytest.approx(11 / 3)
    assert not needs_drafter("osd:3")


@pytest.mark.parametrize("via_generate", [False, True])
def test_sampling(via_generate: bool) -> None:
    """Answers are drawn from the target's own distribution: again the same with the same seeds, not greedy ones."""
    import torch

    kinds = {}
    for proposal in ("argmax", "sample"):
        method = build_method("dflash", models(), via_generate)
        method.sampling = Sampling(temperature=1.0, draft_proposal=proposal)
        torch.manual_seed(0)
        first = method.run(PROMPTS, 2, NEW_TOKENS).token_ids
        torch.manual_seed(0)
        assert first == method.run(PROMPTS, 2, NEW_TOKENS).token_ids != expected()
        kinds[proposal] = first
    assert kinds["argmax"] != kinds["sample"]
    oracle = build_method("oracle", models(), via_generate)
    oracle.sampling = Sampling(temperature=1.0)
    assert "no oracle" in str(oracle.reason_to_skip(2))


def test_a_target_without_heads_for_more_tokens_says_so() -> None:
    method = build_method("transformers_mtp", models())
    assert "one prompt at a time" in str(method.reason_to_skip(2))
    with pytest.raises(ValueError, match="num_mtp_layers"):
        method.run(PROMPTS[:1], 1, NEW_TOKENS)


def test_no_length_head() -> None:
    target = models().target
    with pytest.raises(InvalidInputError, match="no length head"):
        build_method("adaflash", BenchModels(target, tiny_drafter(target)))


def test_names() -> None:
    assert len(set(METHODS)) == 13
    assert needs_drafter("dflash:4") and not needs_drafter("plain")
