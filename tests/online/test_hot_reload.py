from __future__ import annotations

import copy
import threading
import time
from pathlib import Path

import pytest
import torch
from online_traffic import served
from published_drafters import adapted_drafter, forge, publish, train_on
from tiny_models import tiny_target

from adaflash_hf.errors import InvalidInputError
from adaflash_hf.generation.drafter_hooks import hooks_of
from adaflash_hf.generation.engine import AdaFlashEngine
from adaflash_hf.generation.engine_requests import RequestResult
from adaflash_hf.generation.length_policies import FixedLengthPolicy
from adaflash_hf.generation.prepacking import prepack_linear_layers
from adaflash_hf.online import hot_reload
from adaflash_hf.online.hot_reload import HotReloader
from adaflash_hf.online.published_versions import PublishedVersion
from adaflash_hf.online.publisher import Publisher
from adaflash_hf.training.lora import add_lora


PROMPT = torch.tensor([[5, 9, 11, 20, 31]])
GUARD = {"acceptance_before": {"all": 1.5}, "acceptance_after": {"all": 1.6}}


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama")


@pytest.fixture(scope="module")
def traffic(target):
    return served(target, 6)


@pytest.fixture(scope="module")
def trained(target, traffic):
    return train_on(adapted_drafter(), target, traffic)


def plain(target, prompt=PROMPT, new_tokens=12):
    mask = torch.ones_like(prompt)
    return target.generate(prompt, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False)


def speculative(target, drafter, new_tokens=12, **options):
    return target.generate(PROMPT, assistant_model=drafter, max_new_tokens=new_tokens, do_sample=False, **options)


def show_traffic(reloader, traffic):
    for number, one in enumerate(traffic):
        ids = one.token_ids.tolist()
        reloader.probe.offer(RequestResult(number, ids[:5], ids[5:], "length"))
        assert reloader.probe.refresh()


def state_of(drafter):
    return {name: tensor.clone() for name, tensor in drafter.state_dict().items()}


def same_state(one, other):
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


def test_new_weights_arrive_between_two_rounds_in_the_old_memory(target, tmp_path):
    drafter, newer = adapted_drafter(1), adapted_drafter(2)
    publish(Publisher(tmp_path), drafter)
    publish(Publisher(tmp_path), newer, **GUARD)
    places = {name: tensor.data_ptr() for name, tensor in drafter.state_dict().items()}
    reloader = HotReloader(drafter, target, tmp_path)
    reloader.attach()
    assert reloader.check()
    assert reloader.status.waiting_for == "the next round"
    assert reloader.version == 0
    told = []
    policy = FixedLengthPolicy()
    policy.drafter_changed = lambda: told.append(same_state(state_of(drafter), state_of(newer)))
    assert torch.equal(speculative(target, drafter, length_policy=policy), plain(target))
    assert told == [True]
    assert reloader.version == hooks_of(drafter).drafter_version == 1
    assert same_state(state_of(drafter), state_of(newer))
    assert places == {name: tensor.data_ptr() for name, tensor in drafter.state_dict().items()}
    assert not reloader.check()
    status = reloader.status
    assert (status.reloads, status.refused, status.waiting_for) == (1, {}, "")
    assert 0 < status.pause_s <= status.longest_pause_s
    reloader.stop()
    assert not hooks_of(drafter).is_used


def test_prepacked_layers_follow(target, tmp_path):
    drafter, newer = adapted_drafter(1), adapted_drafter(2)
    prepack_linear_layers(drafter)
    publish(Publisher(tmp_path), newer, **GUARD)
    reloader = HotReloader(drafter, target, tmp_path, version=-1)
    reloader.attach()
    assert reloader.check()
    with torch.inference_mode():
        speculative(target, drafter)
    assert reloader.version == 0
    noise, context = torch.randn(1, 4, 32), torch.randn(1, 6, 64)
    with torch.no_grad():
        torch.testing.assert_close(drafter(noise, context)[0], newer(noise, context)[0], rtol=1e-5, atol=1e-5)


def random_weights(target, trained):
    return adapted_drafter(77)


def weights_of_another_target(target, trained):
    other = tiny_target("llama", seed=5)
    return train_on(adapted_drafter(), other, served(other, 6))


@pytest.mark.parametrize("make", [random_weights, weights_of_another_target])
def test_weights_that_do_not_draft_for_this_target_are_refused(target, trained, traffic, tmp_path, make):
    drafter = copy.deepcopy(trained)
    before = state_of(drafter)
    reloader = HotReloader(drafter, target, tmp_path)
    reloader.attach()
    show_traffic(reloader, traffic)
    publisher = Publisher(tmp_path)
    publish(publisher, trained)
    # Even with a verdict that claims them to be better.
    publish(publisher, make(target, trained), **GUARD)
    for _ in range(2):
        assert not reloader.check()
    assert "accepts" in reloader.status.refused[1]
    speculative(target, drafter)
    assert same_state(state_of(drafter), before)
    # What comes after is judged against the weights in use, not against the refused ones.
    better = copy.deepcopy(trained)
    train_on(better, target, traffic, steps=3)
    publish(publisher, better)
    assert reloader.check()
    speculative(target, drafter)
    assert same_state(state_of(drafter), state_of(better))
    reloader.stop()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused_even_if_a_person_asks(target, tmp_path, value):
    publisher = Publisher(tmp_path)
    publish(publisher, adapted_drafter(1))
    version = publish(publisher, adapted_drafter(2), **GUARD)
    forge(publisher.path_of(version), "norm.weight", lambda tensor: tensor.fill_(value))
    drafter = adapted_drafter(1)
    reloader = HotReloader(drafter, target, tmp_path)
    assert not reloader.check()
    publisher.rollback(to=1)
    assert not reloader.check()
    assert "not finite" in reloader.status.refused[1]
    assert same_state(state_of(drafter), state_of(adapted_drafter(1)))


def test_a_damaged_version_is_refused_and_the_next_one_taken(target, tmp_path):
    publisher = Publisher(tmp_path)
    publish(publisher, adapted_drafter(1))
    publish(publisher, adapted_drafter(2), **GUARD)
    (publisher.path_of(1) / "config.json").write_text("{}")
    reloader = HotReloader(adapted_drafter(1), target, tmp_path)
    assert not reloader.check()
    assert "checksum" in reloader.status.refused[1]
    publish(publisher, adapted_drafter(3), **GUARD)
    assert reloader.check()


def test_a_version_that_is_not_there_yet_is_tried_again(target, tmp_path):
    publisher = Publisher(tmp_path)
    publish(publisher, adapted_drafter(1))
    publish(publisher, adapted_drafter(2), **GUARD)
    publisher.path_of(1).rename(tmp_path / "on-its-way")
    reloader = HotReloader(adapted_drafter(1), target, tmp_path)
    assert not reloader.check()
    assert "Version 1 is not in" in reloader.status.error
    (tmp_path / "on-its-way").rename(publisher.path_of(1))
    assert reloader.check()
    assert reloader.status.error == ""


@pytest.mark.parametrize("instant", ["check_files", "rglob", "read_weights"])
def test_a_version_that_is_removed_while_it_is_read_is_not_refused(target, tmp_path, monkeypatch, instant):
    publisher = Publisher(tmp_path, keep_versions=1)
    publish(publisher, adapted_drafter(1))
    publish(publisher, adapted_drafter(2), **GUARD)
    owner = {"check_files": PublishedVersion, "rglob": Path, "read_weights": hot_reload}[instant]
    function = getattr(owner, instant)

    def overtaken(*args):
        monkeypatch.setattr(owner, instant, function)
        found = list(function(*args)) if instant == "rglob" else None
        for seed in (3, 4):
            publish(publisher, adapted_drafter(seed), **GUARD)
        return function(*args) if found is None else found

    monkeypatch.setattr(owner, instant, overtaken)
    drafter = adapted_drafter(1)
    reloader = HotReloader(drafter, target, tmp_path)
    assert not reloader.check()
    assert publisher.numbers() == [0, 2, 3]
    assert (reloader.status.refused, reloader.status.error) == ({}, "")
    assert same_state(dict(reloader._copy.state_dict()), state_of(drafter))
    assert reloader.check()
    reloader.between_rounds()
    assert reloader.version == 3
    assert same_state(state_of(drafter), state_of(adapted_drafter(4)))


def test_without_traffic_and_verdict_a_version_waits(target, trained, traffic, tmp_path):
    publisher = Publisher(tmp_path)
    publish(publisher, trained)
    publish(publisher, trained)
    reloader = HotReloader(copy.deepcopy(trained), target, tmp_path, min_probe_blocks=30)
    assert not reloader.check()
    assert reloader.status.waiting_for == "traffic to try version 1 on (0 of 30 blocks)"
    show_traffic(reloader, traffic)
    assert reloader.check()


def test_the_weights_in_use_are_tried_once_on_each_request(target, trained, traffic, tmp_path, monkeypatch):
    drafter, newest = adapted_drafter(), adapted_drafter(5)
    publisher = Publisher(tmp_path)
    publish(publisher, drafter)
    publish(publisher, trained)
    reloader = HotReloader(drafter, target, tmp_path, min_probe_blocks=1)
    show_traffic(reloader, traffic[:2])
    tried, measure = [], reloader.probe.measure
    monkeypatch.setattr(reloader.probe, "measure", lambda *given: tried.append(measure(*given)) or tried[-1])
    assert reloader.check()
    assert len(tried) == 4
    reloader.between_rounds()
    show_traffic(reloader, traffic[2:3])
    publish(publisher, newest)
    assert not reloader.check()  # compared with the trained weights' scores, which were measured before they served
    assert len(tried) == 4 + 1 + 3
    accepted = sum(score.accepted for score in tried[2:5])
    assert f"version 1 {accepted}" in reloader.status.refused[2]


def test_a_roll_back_is_followed_even_to_worse_weights(target, trained, traffic, tmp_path):
    publisher = Publisher(tmp_path)
    publish(publisher, adapted_drafter(50))  # drafts nothing
    publish(publisher, trained, **GUARD)
    drafter = copy.deepcopy(trained)
    reloader = HotReloader(drafter, target, tmp_path, version=1)
    reloader.attach()
    show_traffic(reloader, traffic)
    publisher.rollback()
    assert reloader.check()
    speculative(target, drafter)
    assert (reloader.version, reloader.status.refused) == (0, {})
    assert same_state(state_of(drafter), state_of(adapted_drafter(50)))
    reloader.stop()


def test_a_version_overtaken_while_it_waits_is_skipped(target, tmp_path):
    publisher = Publisher(tmp_path)
    publish(publisher, adapted_drafter(1))
    publish(publisher, adapted_drafter(2), **GUARD)
    drafter = adapted_drafter(1)
    reloader = HotReloader(drafter, target, tmp_path)
    reloader.attach()
    assert reloader.check()
    publisher.rollback()  # to what is in use
    assert not reloader.check()
    speculative(target, drafter)
    assert (reloader.version, reloader.status.reloads) == (0, 0)
    publish(publisher, adapted_drafter(3), **GUARD)
    assert reloader.check()
    reloader.between_rounds()
    assert same_state(state_of(drafter), state_of(adapted_drafter(3)))
    reloader.stop()


def test_a_damaged_pointer_or_a_failing_watch_leaves_everything_as_it_is(target, tmp_path, monkeypatch, caplog):
    publisher = Publisher(tmp_path)
    publish(publisher, adapted_drafter(1))
    drafter = adapted_drafter(1)
    reloader = HotReloader(drafter, target, tmp_path, poll_s=0.01)
    (tmp_path / "latest.json").write_text("{")
    with reloader:
        wait_until(lambda: "latest.json" in reloader.status.error)
        monkeypatch.setattr(reloader.versions, "pointer", lambda: 1 / 0)
        wait_until(lambda: "ZeroDivisionError" in reloader.status.error)
    assert sum("stays in use" in record.message for record in caplog.records) < 10


def test_what_cannot_be_swapped_in_place_is_refused_at_once(target, tmp_path):
    adapted_drafter().save_pretrained(tmp_path / "base")
    adapted = add_lora(adapted_drafter(), rank=2, base_name_or_path=tmp_path / "base")
    with pytest.raises(InvalidInputError, match="merge_lora"):
        HotReloader(adapted, target, tmp_path)
    with torch.device("meta"):
        empty = type(adapted_drafter())(adapted_drafter().config)
    with pytest.raises(InvalidInputError, match="on one device"):
        HotReloader(empty, target, tmp_path)
    with pytest.raises(InvalidInputError, match="does not draft with"):
        reloader = HotReloader(adapted_drafter(), target, tmp_path)
        reloader.attach_engine(AdaFlashEngine(target, adapted_drafter()))


def wait_until(is_true, seconds=300.0):
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_under_load_every_request_of_an_engine_stays_exact(target, tmp_path):
    """Reloads while twelve requests at a time are in flight; the weights differ, so drafts change mid-request."""
    prompts = [[4 + i, 9, 11 + i, 20] for i in range(24)]
    expected = [plain(target, torch.tensor([prompt]), 10 + i % 7)[0].tolist() for i, prompt in enumerate(prompts)]
    publisher, drafter = Publisher(tmp_path, keep_versions=2), adapted_drafter(0)
    publish(publisher, drafter)
    reloader = HotReloader(drafter, target, tmp_path, poll_s=0.005)
    engine = AdaFlashEngine(target, drafter, max_concurrency=12)
    reloader.attach_engine(engine)
    is_over = threading.Event()

    def keep_publishing():
        while not is_over.is_set():
            publish(publisher, adapted_drafter(publisher.next_version()), **GUARD)

    publishing = threading.Thread(target=keep_publishing)
    with reloader, engine:
        publishing.start()
        versions = set()
        deadline = time.monotonic() + 600
        while reloader.status.reloads < 4 and time.monotonic() < deadline:
            handles = [engine.submit(prompt, max_new_tokens=10 + i % 7) for i, prompt in enumerate(prompts)]
            results = [handle.result() for handle in handles]
            assert [result.sequence_ids for result in results] == expected
            versions |= {result.drafter_version for result in results}
        is_over.set()
        publishing.join()
    status = reloader.status
    assert status.reloads >= 4
    assert (status.refused, status.error) == ({}, "")
    assert len(versions) >= 2
