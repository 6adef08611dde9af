"""Domain shifts of a tiny drafter, end to end: real engine, buffer, trainer, publisher and hot reload."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest
from domain_responses import domain_responses, trained_drafter
from published_drafters import adapted_drafter
from tiny_models import tiny_target

from adaflash_hf.errors import InvalidInputError
from adaflash_hf.evaluation.domain_shift import METHODS, REFERENCE, DomainShift, DomainShiftSettings
from adaflash_hf.evaluation.domain_shift_plots import plot_shift
from adaflash_hf.evaluation.domain_shift_report import shift_results, shift_sections
from adaflash_hf.evaluation.domain_traffic import TrafficShape, plan_traffic
from adaflash_hf.evaluation.held_out_acceptance import measure_held_out


SHAPE = TrafficShape("math", ("code", "math"), 2, 4, home_trajectories=4, held_out=2)
SETTINGS = DomainShiftSettings(
    "tiny", SHAPE, 16, is_live=False, learning_rate=1e-2, lora_learning_rate=3e-2, reference_epochs=8,
    training={"epochs": 4, "batch_size": 4, "gradient_accumulation_steps": 1, "max_tokens": 64},
)  # fmt: skip


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama")


@pytest.fixture(scope="module")
def responses(target, tmp_path_factory):
    return domain_responses(tmp_path_factory.mktemp("responses"), target, 44, layer_ids=[0, 2])


@pytest.fixture(scope="module")
def start(target, responses):
    return trained_drafter(target, responses)


def make(target, start, responses, directory, **changes):
    return DomainShift(target, start, responses, replace(SETTINGS, **changes), directory)


def test_what_is_served_decides_what_is_learned(target, start, responses, tmp_path):
    shift, plan = make(target, start, responses, tmp_path), plan_traffic(responses, SHAPE, 0)
    weights = copy.deepcopy(start.state_dict())
    seen = []
    static, _ = shift.run("static", 0, plan, seen.append)
    adapted, was_done = shift.run("adaflash", 0, plan)
    assert not was_done and seen == static.rounds
    assert all(start.state_dict()[name].equal(tensor) for name, tensor in weights.items())
    assert not list((tmp_path / "work").iterdir())
    # The same requests and, before anything is trained, the same drafter.
    for one, other in zip(static.rounds, adapted.rounds, strict=True):
        assert one["served"]["tokens"] == other["served"]["tokens"] == 16 * 4
        assert (one["domain"], one["version"], one["training"]) == (other["domain"], 0, {})
        assert one["held_out"] == static.rounds[0]["held_out"] == adapted.rounds[0]["held_out"]
    for number in (0, 1):  # round 1 is served by the start, then trained on
        counts = ("rounds", "accepted", "rows")
        one, other = static.rounds[number]["served"], adapted.rounds[number]["served"]
        assert [one[name] for name in counts] == [other[name] for name in counts]
    assert [entry["version"] for entry in adapted.rounds] == [0, 1, 2, 3, 4]
    trained = [entry["training"] for entry in adapted.rounds]
    assert [entry.get("trajectories") for entry in trained] == [None, *([{"code": 4}] * 2), *([{"math": 4}] * 2)]
    assert all(entry["outcome"] == "published" and "refused" not in entry for entry in trained[1:])
    assert adapted.rounds[-1]["held_out"] != adapted.rounds[0]["held_out"]
    # What it was trained on comes back from the recorder as it was served.
    assert trained[2]["served"]["code"] == pytest.approx(adapted.rounds[2]["served"]["acceptance_length"])


def test_live_and_replayed_runs_are_the_same(target, start, responses, tmp_path):
    plan = plan_traffic(responses, SHAPE, 1)
    runs = []
    for is_live in (True, False):
        shift = make(target, start, responses, tmp_path / str(is_live), is_live=is_live, concurrency=1)
        runs.append(shift.run("osd", 1, plan)[0])
    for live, replayed in zip(runs[0].rounds, runs[1].rounds, strict=True):
        assert live["served"]["different_responses"] == 0
        for served in (live["served"], replayed["served"]):
            del served["seconds"], served["tok_per_s"]
        assert live["served"] == replayed["served"]
        assert live["held_out"] == replayed["held_out"]


def test_a_stored_teacher_needs_no_target(target, start, responses, tmp_path, monkeypatch):
    with pytest.raises(InvalidInputError, match="with the responses 0 tokens are stored"):
        make(target, start, responses, tmp_path, teacher_top_k=8)
    stored = domain_responses(tmp_path / "responses", target, 44, layer_ids=[0, 2], teacher_top_k=8)
    with pytest.raises(InvalidInputError, match="`is_live` is true"):
        make(target, start, stored, tmp_path, teacher_top_k=8, is_live=True)
    plan = plan_traffic(stored, SHAPE, 0)
    whole, _ = make(target, start, stored, tmp_path / "whole").run("osd", 0, plan)
    monkeypatch.setattr(target, "forward", None)
    shift = make(target, start, stored, tmp_path / "stored", teacher_top_k=8)
    run, _ = shift.run("osd", 0, plan)
    assert run.common["teacher_top_k"] == 8
    assert "those of the 8 likeliest tokens" in shift_sections([run], [], shift.settings)[0]
    assert [entry["version"] for entry in run.rounds] == [0, 1, 2, 3, 4]
    # A divergence of fewer events is the smaller one.
    assert 0 < run.rounds[1]["training"]["loss"] < whole.rounds[1]["training"]["loss"]
    assert shift.run_reference("code", plan).rounds[0]["held_out"] != run.rounds[0]["held_out"]


def test_finished_runs_are_found_and_others_refused(target, start, responses, tmp_path):
    shift, plan = make(target, start, responses, tmp_path), plan_traffic(responses, SHAPE, 0)
    run, _ = shift.run("static", 0, plan)
    leftover = tmp_path / "work" / "static-seed1" / "buffer.sqlite"
    leftover.parent.mkdir(parents=True)
    leftover.write_text("of a run that was killed")
    assert shift.run("static", 0, plan) == (run, True)
    assert not shift.run("static", 1, plan)[1]
    with pytest.raises(InvalidInputError, match="`max_new_tokens` 16, now it is 15"):
        make(target, start, responses, tmp_path, max_new_tokens=15).run("static", 0, plan)
    with pytest.raises(InvalidInputError, match="`start_sha256`"):
        make(target, adapted_drafter(5), responses, tmp_path).run("static", 0, plan)
    with pytest.raises(InvalidInputError, match="`target` '', now it is 'org/other'"):
        DomainShift(target, start, responses, replace(shift.settings, target="org/other"), tmp_path).run(
            "static", 0, plan
        )
    path = tmp_path / "runs" / "static-seed1.json"
    path.write_text(path.read_text()[:50])
    with pytest.raises(InvalidInputError, match=f"'{path}' cannot be read as a finished run .* Remove it"):
        shift.run("static", 1, plan)
    with pytest.raises(InvalidInputError, match="'nothing'; choose from 'static', 'osd'"):
        shift.run("nothing", 0, plan)


@pytest.mark.parametrize("method", ["adaflash-lora", "adaflash-head-off", "adaflash-truncated"])
def test_each_method_trains_what_it_says(target, start, responses, tmp_path, method):
    plan = plan_traffic(responses, replace(SHAPE, phases=("code",)), 0)
    run, _ = make(target, start, responses, tmp_path).run(method, 0, plan)
    assert {**run.training, **METHODS[method]} == run.training
    assert run.training["learning_rate"] == (3e-2 if method == "adaflash-lora" else 1e-2)
    last = run.rounds[-1]
    assert last["version"] == 2 and last["held_out"] != run.rounds[0]["held_out"]
    assert {"head_rows", "head_error_tokens", "head_acceptance_length"} < last["held_out"]["code"].keys()


def test_balanced_rounds_remember_home_and_the_guard_may_reject(target, start, responses, tmp_path):
    training = {**SETTINGS.training, "balanced": True}
    run, _ = make(target, start, responses, tmp_path, training=training).run(
        "adaflash", 0, plan_traffic(responses, SHAPE, 0)
    )
    assert [entry["training"].get("trajectories") for entry in run.rounds[1:3]] == [{"code": 2, "math": 2}] * 2
    shape = replace(SHAPE, held_out_share=0.2)
    guarded, _ = make(target, start, responses, tmp_path / "guarded", shape=shape).run(
        "adaflash", 0, plan_traffic(responses, shape, 0)
    )
    for before, entry in zip(guarded.rounds, guarded.rounds[1:], strict=False):
        assert sum(entry["training"]["trajectories"].values()) == 4
        assert entry["training"]["outcome"] in ("published", "rejected", "unjudged")
        is_in_use = entry["training"]["outcome"] == "published" and "refused" not in entry["training"]
        assert entry["version"] > before["version"] if is_in_use else entry["version"] == before["version"]


def test_references_results_and_pictures(target, start, responses, tmp_path):
    shift, plan = make(target, start, responses, tmp_path), plan_traffic(responses, SHAPE, 0)
    reference = shift.run_reference("code", plan)
    assert shift.run_reference("code", plan) == reference
    given = make(target, start, responses, tmp_path / "other").run_reference("code", plan, start)
    before = measure_held_out(
        start, target, [responses[i] for i in plan.held_out["code"]], anchors_per_trajectory=32, length_scale=1.3
    )
    assert given.method == f"{REFERENCE}-code" and given.rounds[0]["held_out"]["code"] == before
    assert reference.rounds[0]["held_out"]["code"] != before
    runs = [shift.run(method, 0, plan)[0] for method in ("static", "osd")]
    results = shift_results(runs, [reference], shift.settings, {"machine": "this"})
    assert json.loads(json.dumps(results))["runs"][1]["phases"][0]["domain"] == "code"
    assert "| 1: code | osd |" in "\n".join(shift_sections(runs, [reference], shift.settings))
    pictures = plot_shift(runs, [reference], tmp_path / "shift")
    assert [path.name for path in pictures] == [f"shift-{kind}.png" for kind in ("traffic", "held-out", "length-head")]
    assert all(path.stat().st_size > 5000 for path in pictures)
