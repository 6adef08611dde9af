from __future__ import annotations

import itertools
import os
import signal
import time
from dataclasses import replace

import pytest
import torch
from online_traffic import in_fork
from published_drafters import adapted_drafter, publish
from tiny_models import rounding_allowed, tiny_target
from tiny_online_run import NUM_PROMPTS, VOCAB_SIZE, inference_settings, save_models, side_settings

from adaflash_hf.errors import InvalidInputError
from adaflash_hf.online.inference_process import (
    PromptTraffic,
    _Inference,
    load_served_drafter,
    run_inference,
    starting_position,
)
from adaflash_hf.online.published_versions import PublishedVersions
from adaflash_hf.online.publisher import Publisher
from adaflash_hf.online.replay_buffer import ReplayBuffer
from adaflash_hf.online.run_status import read_status
from adaflash_hf.online.side_process import SideProcess
from adaflash_hf.training.prompts import Prompt


PROMPTS = [([5], "a"), ([6], "b"), ([7], "a")]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return save_models(tmp_path_factory.mktemp("models"))


def test_traffic_ends_or_begins_again():
    assert [one[:2] for one in PromptTraffic(PROMPTS, is_once=True)] == [(0, [5]), (1, [6]), (2, [7])]
    looped = itertools.islice(PromptTraffic(PROMPTS, is_once=False, position=2), 3)
    assert [(one.number, one.domain) for one in looped] == [(2, "a"), (3, "a"), (4, "b")]
    assert list(PromptTraffic(PROMPTS, is_once=True, position=3)) == []


def test_the_position_is_the_first_prompt_that_is_not_answered():
    traffic = PromptTraffic(PROMPTS, is_once=True)
    assert traffic.position == 0
    served = list(traffic)
    traffic.finish(served[1].number)
    assert traffic.position == 0
    traffic.finish(served[0].number)
    assert traffic.position == 2
    traffic.finish(served[2].number)
    assert traffic.position == 3


def test_it_begins_where_the_one_before_was(models, tmp_path):
    settings = inference_settings(models, tmp_path)
    same = {"prompts_id": settings.prompts_id}
    assert starting_position({}, settings) == 0
    assert starting_position({"run_id": "run", "position": 5}, settings) == 5
    assert starting_position({"run_id": "an earlier one", "position": 5, **same}, settings) == 5
    assert starting_position({"run_id": "an earlier one", "position": 5, "prompts_id": "others"}, settings) == 0
    # Once more, if the earlier run was through; but a process that takes a dead one's place has nothing left to do.
    assert starting_position({"run_id": "an earlier one", "position": NUM_PROMPTS, **same}, settings) == 0
    assert starting_position({"run_id": "run", "position": NUM_PROMPTS, **same}, settings) == NUM_PROMPTS
    looped = replace(settings, is_once=False)
    assert starting_position({"run_id": "an earlier one", "position": 100, **same}, looped) == 100
    assert replace(settings, prompts=settings.prompts[::-1]).prompts_id != settings.prompts_id


def test_all_prompts_are_answered_as_the_target_would_and_recorded(models, tmp_path):
    with in_fork(run_inference, inference_settings(models, tmp_path)) as process:
        process.join(900)
        assert process.exitcode == 0
    status = read_status(tmp_path / "published", "server")
    assert (status["phase"], status["position"], status["version"]) == ("stopped", NUM_PROMPTS, 0)
    assert status["requests"] == {"length": NUM_PROMPTS}
    assert status["generated_tokens"] == 8 * NUM_PROMPTS
    assert status["recorder"]["written"] == NUM_PROMPTS
    assert sorted(status["acceptance_length"]) == ["code", "math"]
    recorded = ReplayBuffer(tmp_path / "buffer").newest(100)
    assert [one.domain for one in recorded].count("math") == NUM_PROMPTS // 2
    target = tiny_target("llama", vocab_size=VOCAB_SIZE)
    for one in recorded[:3]:
        prompt = torch.tensor([one.token_ids[: one.prompt_length].tolist()])
        expected = target.generate(prompt, max_new_tokens=8, do_sample=False, attention_mask=torch.ones_like(prompt))
        assert expected[0].tolist() == one.token_ids.tolist()


def test_sigterm_ends_it_and_the_next_one_goes_on_where_it_was(models, tmp_path):
    # Answers so long that it is still at the first ones.
    settings = inference_settings(models, tmp_path, max_new_tokens=40, concurrency=2)
    with in_fork(run_inference, settings) as process:
        deadline = time.monotonic() + 900
        while read_status(tmp_path / "published", "server").get("phase") not in ("serving", "stopped"):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGTERM)
        process.join(900)
        assert process.exitcode == 0
    status = read_status(tmp_path / "published", "server")
    ended = sum(status["requests"].values())
    assert status["phase"] == "stopped"
    assert ended - 2 <= status["position"] <= ended
    assert ReplayBuffer(tmp_path / "buffer").depth().rows <= ended
    with in_fork(run_inference, inference_settings(models, tmp_path, concurrency=2)) as process:
        process.join(900)
        assert process.exitcode == 0
    recorded = ReplayBuffer(tmp_path / "buffer").newest(100)
    assert len({one.prompt_hash for one in recorded}) == NUM_PROMPTS
    assert len(recorded) <= NUM_PROMPTS + 2


def test_drafts_may_round_and_the_target_may_not(models, tmp_path):
    settings = inference_settings(models, tmp_path, prepack=True)
    target, _, drafter, _ = _Inference(settings, SideProcess("server", tmp_path, 1))._load()
    assert (rounding_allowed(target), rounding_allowed(drafter)) == ({False}, {True})


def test_what_cannot_work_ends_with_the_reason(models, tmp_path):
    long, short = (Prompt((("user", "x" * length),), "math") for length in (550, 5))
    with in_fork(run_inference, inference_settings(models, tmp_path, prompts=(long, short))) as process:
        process.join(900)
        assert process.exitcode == 0
    assert read_status(tmp_path / "published", "server")["requests"] == {"length": 1, "refused": 1}
    settings = inference_settings(models, tmp_path, max_prompt_tokens=3)
    with in_fork(run_inference, settings) as process:
        process.join(900)
        assert process.exitcode == 2
    status = read_status(tmp_path / "published", "server")
    assert status["phase"] == "failed"
    assert "max_prompt_tokens" in status["error"]


def test_it_begins_with_the_version_that_is_served(models, tmp_path):
    drafter = side_settings(models, tmp_path).drafter
    loaded, version = load_served_drafter(PublishedVersions(tmp_path), drafter, torch.float32)
    first = adapted_drafter(vocab_size=VOCAB_SIZE)
    assert version == 0
    assert loaded.fc.weight.equal(first.fc.weight)
    publisher, newer = Publisher(tmp_path), adapted_drafter(2, vocab_size=VOCAB_SIZE)
    publish(publisher, first)
    publish(publisher, newer)
    loaded, version = load_served_drafter(PublishedVersions(tmp_path), drafter, torch.float32)
    assert version == 1
    assert loaded.fc.weight.equal(newer.fc.weight)
    # A damaged one is not served.
    (publisher.path_of(1) / "config.json").write_text("{}")
    loaded, version = load_served_drafter(PublishedVersions(tmp_path), drafter, torch.float32)
    assert version == 0
    assert loaded.fc.weight.equal(first.fc.weight)
    with pytest.raises(InvalidInputError, match="cannot be loaded"):
        load_served_drafter(PublishedVersions(tmp_path / "none"), str(tmp_path / "none"), torch.float32)
