"""A whole benchmark on tiny models: order, schema, agreement, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from stand_ins import byte_tokenizer
from tiny_models import tiny_drafter, tiny_target
from transformers import PreTrainedModel

from adaflash_hf import InvalidInputError, UnsupportedGenerationError
from adaflash_hf.evaluation import bench
from adaflash_hf.evaluation.bench import BenchReport, BenchSettings, run_bench
from adaflash_hf.evaluation.bench_methods import BenchMethod, BenchModels
from adaflash_hf.evaluation.bench_results import MethodRun
from adaflash_hf.evaluation.workloads import Workload
from adaflash_hf.generation.prepacking import prepack_linear_layers
from adaflash_hf.training.prompts import Prompt


WORKLOAD = Workload("tiny", tuple(Prompt((("user", f"question {n}"),), "x") for n in range(3)))
COLUMNS = "method workload concurrency tokens_per_second speedup acceptance_length mean_verify_length identical"


def byte_target() -> PreTrainedModel:
    return tiny_target("llama", vocab_size=260)


def measure(models: BenchModels | None = None, **kwargs: Any) -> BenchReport:
    target = byte_target()
    models = models or BenchModels(target, tiny_drafter(target))
    settings = {"concurrencies": [2], "num_requests": 3, "max_new_tokens": 8, "repeats": 2, "warm_up_tokens": 1}
    hooks = {name: kwargs.pop(name) for name in ("on_step", "on_cell", "on_warning") if name in kwargs}
    return run_bench(models, byte_tokenizer(), [WORKLOAD], BenchSettings(**{**settings, **kwargs}), **hooks)


def test_results_and_schema() -> None:
    steps: list[str] = []
    cells: list[int] = []
    report = measure(
        methods=["dflash", "prompt_lookup", "oracle"],
        on_step=steps.append,
        on_cell=lambda report: cells.append(len(report.rows)),
    )
    data = json.loads(json.dumps(report.as_dict()))
    assert set(data) == {"environment", "settings", "results", "skipped"}
    assert [row["method"] for row in data["results"]] == ["plain", "dflash", "oracle"]  # plain is always there
    for row in data["results"]:
        assert set(COLUMNS.split()) <= set(row)
        assert row["identical"] is True and row["workload"] == "tiny" and row["concurrency"] == 2
        assert row["tokens_per_second"] > 0 and row["peak_memory_bytes"] > 0
    assert data["results"][0]["speedup"] == 1 and data["results"][0]["acceptance_length"] == 1
    (skipped,) = data["skipped"]
    assert skipped["method"] == "prompt_lookup" and "one prompt at a time" in skipped["reason"]
    assert {"device", "dtype", "threads", "torch", "target", "drafter"} <= set(data["environment"])
    assert cells == [3]
    # Interleaved; who follows plain takes turns.
    timed = [step.split(": ")[1] for step in steps if " of 2" in step]
    assert timed == [
        "plain, 1 of 2", "dflash, 1 of 2", "oracle, 1 of 2", "plain, 2 of 2", "oracle, 2 of 2", "dflash, 2 of 2",
    ]  # fmt: skip


class Scripted(BenchMethod):
    """Returns given answers, one per call, in a given time."""

    def __init__(self, name: str, models: BenchModels, answers: list[list[list[int]]], seconds: float) -> None:
        super().__init__(name, models)
        self._script, self._seconds = answers, seconds
        self.calls = 0

    def _run(self, prompts: Any, concurrency: int, max_new_tokens: int) -> MethodRun:
        answers = self._script[min(self.calls, len(self._script) - 1)]
        self.calls += 1
        return MethodRun(answers, sum(map(len, answers)), self._seconds)


def test_answers_are_judged_by_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Identical, near-tie and different answers, one of them only in the second repeat."""
    target = byte_target()
    with torch.no_grad():  # ids 20 and 21 always have exactly the same logit, the largest
        head = target.get_output_embeddings()
        head.weight.zero_()
        head.weight[20:22] = 1.0
        target.model.norm.weight.fill_(1.0)
        target.get_input_embeddings().weight.abs_()
    models = BenchModels(target)
    plain = [[20] * 8, [20] * 8, [20] * 8]
    near, wrong = [20] * 3 + [21] * 5, [20] * 3 + [30] * 5
    scripts = {
        "plain": [plain],
        "dflash": [plain, plain, [plain[0], near, plain[2]]],
        "adaflash": [plain, [wrong, near, plain[2]]],
    }
    monkeypatch.setattr(bench, "build_method", lambda name, models, via: Scripted(name, models, scripts[name], 0.5))
    same, tied, different = measure(models, methods=["plain", "dflash", "adaflash"]).rows
    assert (same.identical, tied.identical, different.identical) == (True, False, False)
    assert (tied.identical_requests, tied.near_tie_requests, tied.different_requests) == (2, 1, 0)
    assert (different.identical_requests, different.near_tie_requests, different.different_requests) == (1, 1, 1)
    assert tied.speedup == 1


def test_a_reference_that_fails_is_skipped_and_ours_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(Scripted):
        def prepare(self, concurrency: int) -> None:
            raise RuntimeError("no paged cache here") if self.name == "transformers_cb" else ValueError("a bug")

    def build(name: str, models: BenchModels, via: bool) -> BenchMethod:
        return (Scripted if name == "plain" else Failing)(name, models, [[[1]] * 3], 0.5)

    monkeypatch.setattr(bench, "build_method", build)
    report = measure(methods=["transformers_cb"])
    assert [row.method for row in report.rows] == ["plain"]
    assert report.skipped[0]["reason"] == "RuntimeError: no paged cache here"
    with pytest.raises(ValueError, match="a bug"):
        measure(methods=["dflash"])


def test_a_target_the_engine_cannot_serve_names_the_way_out() -> None:
    target = tiny_target("qwen3_next", vocab_size=260)
    with pytest.raises(UnsupportedGenerationError, match="generate"):
        measure(BenchModels(target, tiny_drafter(target)), methods=["dflash"])
    (plain, dflash) = measure(
        BenchModels(target, tiny_drafter(target)), methods=["dflash"], via_generate=True, repeats=1
    ).rows
    assert dflash.identical is True


def test_engines_in_turns_answer_as_they_do_alone() -> None:
    steps: list[str] = []
    settings = {"methods": ["dflash", "transformers", "oracle"], "repeats": 1, "on_step": steps.append}
    alone, together = (measure(in_turns=in_turns, **settings).rows for in_turns in (False, True))
    assert [row.method for row in together] == [row.method for row in alone]
    for one, other in zip(alone, together, strict=True):
        assert other.identical is True and other.generated_tokens == one.generated_tokens
        assert other.acceptance_length == one.acceptance_length
    # Who did not wait for others has a time to the first token, also here.
    assert [row.first_token_p50_s is None for row in together] == [True, True, False, False]
    assert all(row.token_latency_p50_s is not None for row in together)
    assert "tiny, concurrency 2: plain, dflash in turns, 1 of 1" in steps


def test_eos_is_ignored_for_a_while() -> None:
    target = byte_target()
    target.generation_config.eos_token_id = list(range(4, 260))
    report = measure(BenchModels(target), methods=["plain"], ignore_eos=True, repeats=1)
    assert report.rows[0].generated_tokens == 3 * 8
    assert target.generation_config.eos_token_id == list(range(4, 260))
    assert measure(BenchModels(target), methods=["plain"], repeats=1).rows[0].generated_tokens == 3


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"methods": []}, "at least one"),
        ({"methods": ["plain", "plain"]}, "one twice"),
        ({"concurrencies": [1, 1]}, "one twice"),
        ({"concurrencies": [0]}, "at least one request"),
        ({"repeats": 0}, "`repeats` is 0"),
        ({"in_turns": True, "via_generate": True}, "exclude each other"),
        ({"max_new_tokens": 4}, "measure the prefill"),
        ({"num_requests": 4, "concurrencies": [1, 8]}, "would never be in flight"),
    ],
)
def test_meaningless_runs_are_refused(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        BenchSettings(**kwargs)


def test_number_of_requests() -> None:
    assert [BenchSettings().requests_at(n) for n in (1, 4, 32)] == [8, 8, 64]
    assert BenchSettings(num_requests=50).requests_at(4) == 50


def test_doubts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.os, "getloadavg", lambda: (99.0, 0, 0))
    warnings: list[str] = []
    measure(methods=["plain"], repeats=1, on_warning=warnings.append)
    assert ["load average is 99.0" in warning for warning in warnings] == [True]
    monkeypatch.setattr(bench.os, "getloadavg", lambda: (0.0, 0, 0))
    monkeypatch.setattr(bench, "default_dtype", lambda device: torch.float32)
    emulated = byte_target().to(torch.bfloat16)
    assert ["emulates" in text for text in bench._doubts(emulated)] == [True]
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True})
    is_prepacked = prepack_linear_layers(emulated) > 0
    assert bool(list(bench._doubts(emulated))) is not is_prepacked
