from __future__ import annotations

import copy
import functools
import itertools
import json
import logging
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from online_traffic import in_fork, recorded, served
from published_drafters import adapted_drafter, train_on
from safetensors.torch import load_file
from tiny_models import tiny_target

from adaflash_hf import DFlashDrafterModel
from adaflash_hf.errors import InvalidInputError, PublishedVersionError, ReplayBufferError
from adaflash_hf.online import publisher as publisher_module
from adaflash_hf.online import training_state
from adaflash_hf.online.online_arguments import OnlineTrainingArguments
from adaflash_hf.online.online_trainer import OnlineTrainer
from adaflash_hf.online.publisher import Publisher
from adaflash_hf.online.replay_buffer import BufferSettings, ReplayBuffer
from adaflash_hf.online.round_training import InterruptedRoundError, RoundTrainer
from adaflash_hf.online.run_status import read_status
from adaflash_hf.online.training_state import TrainingStateStore


NOBODY = 65534
FAST = {"round_size": 4, "epochs": 1, "learning_rate": 1e-2, "min_held_out": 1, "anchors_per_trajectory": 4}


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama")


@pytest.fixture(scope="module")
def traffic(target):
    return served(target, 40)


@pytest.fixture(scope="module")
def trained(target, traffic):
    """A drafter that drafts well on this traffic, so that bad weights show."""
    return train_on(adapted_drafter(), target, traffic[:12], steps=40)


def make_buffer(tmp_path, traffic, **settings):
    buffer = ReplayBuffer(tmp_path / "buffer", BufferSettings(**{"held_out_share": 0.3, **settings}))
    buffer.append(traffic)
    return buffer


def make(tmp_path, target, drafter=None, name="published", **fields):
    arguments = OnlineTrainingArguments(**{**FAST, **fields})
    publisher = Publisher(tmp_path / name, keep_versions=20)
    buffer = ReplayBuffer(tmp_path / "buffer")
    return OnlineTrainer(drafter or adapted_drafter(), target, buffer, publisher, arguments, poll_s=0.01)


def published_weights(tmp_path, version, name="published"):
    return load_file(Publisher(tmp_path / name).path_of(version) / "model.safetensors")


def same(one, other):
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


def test_rounds_publish_versions_that_draft_better(target, traffic, tmp_path):
    buffer = make_buffer(tmp_path, traffic)
    trainer = make(tmp_path, target, round_size=8, epochs=6, anchors_per_trajectory=512, tolerance=0.5)
    assert trainer.run(max_rounds=2) == 2
    first, second = trainer.progress.history
    assert (first["outcome"], first["version"], second["version"]) == ("published", 1, 2)
    assert second["loss"] < first["loss"]
    assert sum(first["trajectories"].values()) == 8
    assert first["served"] == {"math": 1.5}
    assert second["served"] == {}
    versions = trainer.publisher
    assert versions.numbers() == [0, 1, 2]
    assert same(published_weights(tmp_path, 0), adapted_drafter().state_dict())
    manifest = versions.latest().manifest
    assert (manifest.parent, manifest.round_id, manifest.trajectories) == (1, 2, {"math": 16})
    assert manifest.acceptance_after["all"] >= manifest.acceptance_before["all"] - 0.5
    assert manifest.settings["objective"] == "mixture"
    waiting = buffer.depth().waiting
    assert waiting == sum(one.prompt_hash >= 0.3 for one in traffic) - 16
    status = read_status(versions.directory, "trainer")
    assert (status["phase"], status["version"], len(status["history"])) == ("stopped", 2, 2)


def test_a_round_that_loses_is_taken_back(target, traffic, tmp_path, monkeypatch):
    make_buffer(tmp_path, traffic)
    trainer = make(tmp_path, target)
    taus = iter([2.0, 1.9, 2.0, 2.1])
    monkeypatch.setattr(
        RoundTrainer,
        "evaluate",
        lambda self, *a, **k: dict.fromkeys(("eval_acceptance_length", "eval_acceptance_length_math"), next(taus)),
    )
    trainer.run(max_rounds=1)
    assert trainer.progress.history[-1]["outcome"] == "rejected"
    assert trainer.publisher.numbers() == [0]
    assert same(dict(trainer.model.state_dict()), adapted_drafter().state_dict())
    assert not trainer.store.read_progress().manifest
    trainer.run(max_rounds=1)
    assert trainer.progress.history[-1]["outcome"] == "published"
    assert trainer.buffer.open_round() is None


def test_a_round_that_diverges_is_taken_back(target, traffic, tmp_path):
    make_buffer(tmp_path, traffic)
    trainer = make(tmp_path, target, learning_rate=1e30, max_grad_norm=0.0)
    trainer.run(max_rounds=1)
    assert trainer.progress.history[-1]["outcome"] == "diverged"
    assert same(dict(trainer.model.state_dict()), adapted_drafter().state_dict())
    assert trainer.publisher.numbers() == [0]


def test_an_adapter_is_published_merged(target, traffic, tmp_path):
    make_buffer(tmp_path, traffic)
    make(tmp_path, target, lora_rank=2, tolerance=3.0, learning_rate=5e-2).run(max_rounds=1)
    merged = published_weights(tmp_path, 1)
    assert merged.keys() == adapted_drafter().state_dict().keys()
    assert not merged["fc.weight"].equal(adapted_drafter().fc.weight)
    # And the next trainer goes on with the adapter, not with a new one on the merged weights.
    trainer = make(tmp_path, target, lora_rank=2, tolerance=3.0)
    trainer.resume()
    assert any("lora_B" in name and bool(p.any()) for name, p in trainer.model.named_parameters())
    trainer.run(max_rounds=1)
    assert trainer.publisher.numbers() == [0, 1, 2]


def test_it_says_what_it_waits_for(target, traffic, tmp_path):
    buffer = make_buffer(tmp_path, [one for one in traffic if one.prompt_hash >= 0.3][:6])
    trainer = make(tmp_path, target, min_held_out=3)
    assert trainer.waiting_for() == "3 of 3 held-out trajectories"
    buffer.append([one for one in traffic if one.prompt_hash < 0.3][:3])
    assert trainer.waiting_for() is None
    assert make(tmp_path, target, round_size=9).waiting_for() == "3 of 9 new trajectories"


def test_stopping_leaves_the_round_for_the_next_trainer(target, traffic, tmp_path):
    buffer = make_buffer(tmp_path, traffic)
    trainer = make(tmp_path, target, epochs=1000)
    thread = threading.Thread(target=trainer.run)
    thread.start()
    while read_status(tmp_path / "published", "trainer").get("phase") != "training":
        time.sleep(0.01)
    trainer.stop()
    thread.join(30)
    assert not thread.is_alive()
    opened = buffer.open_round()
    assert len(opened.trajectory_ids) == 4
    following = make(tmp_path, target)
    following.run(max_rounds=1)
    assert following.progress.history[-1]["round"] == opened.id


def test_a_second_trainer_is_refused(target, traffic, tmp_path):
    buffer = make_buffer(tmp_path, traffic)
    with buffer.consumer_lock(), pytest.raises(ReplayBufferError, match="another trainer"):
        make(tmp_path, target).run(max_rounds=1)


def test_after_a_roll_back_it_goes_on_from_what_is_served(target, traffic, tmp_path):
    make_buffer(tmp_path, traffic)
    trainer = make(tmp_path, target, tolerance=3.0)
    trainer.run(max_rounds=2)
    trainer.publisher.rollback(to=0)
    trainer.run(max_rounds=1)
    manifest = trainer.publisher.latest().manifest
    assert (manifest.version, manifest.parent, manifest.trajectories) == (3, 0, {"math": 4})
    # The same holds for a trainer that was not running meanwhile.
    trainer.publisher.rollback(to=1)
    following = make(tmp_path, target, tolerance=3.0)
    following.resume()
    assert following.progress.version == 1
    assert same(dict(following.model.state_dict()), published_weights(tmp_path, 1))


def test_a_roll_back_during_a_round_gives_the_round_back(target, traffic, tmp_path, monkeypatch):
    buffer = make_buffer(tmp_path, traffic)
    trainer = make(tmp_path, target, tolerance=3.0)
    trainer.run(max_rounds=1)
    before = buffer.depth().waiting
    train = RoundTrainer.train

    def rolled_back_meanwhile(self, *args, **kwargs):
        result = train(self, *args, **kwargs)
        trainer.publisher.rollback(to=0)
        monkeypatch.setattr(RoundTrainer, "train", train)
        return result

    monkeypatch.setattr(RoundTrainer, "train", rolled_back_meanwhile)
    trainer.run(max_rounds=1)
    assert trainer.progress.history[-1]["outcome"] == "withdrawn"
    assert trainer.publisher.pointer().version == 0
    assert buffer.depth().waiting == before
    trainer.run(max_rounds=1)
    assert trainer.publisher.latest().manifest.parent == 0
    assert buffer.depth().waiting == before - 4


def test_trajectories_of_another_vocabulary_are_left_out(target, traffic, tmp_path):
    buffer = make_buffer(tmp_path, traffic[:3], held_out_share=0.0)
    foreign = recorded(1)
    buffer.append([replace(foreign, token_ids=foreign.token_ids + 1000)])
    trainer = make(tmp_path, target, held_out=0, min_held_out=0)
    trainer.run(max_rounds=1)
    assert trainer.progress.history[-1]["trajectories"] == {"math": 3}
    buffer.append([replace(recorded(seed), token_ids=recorded(seed).token_ids + 1000) for seed in range(4)])
    trainer.run(max_rounds=1)
    assert trainer.progress.history[-1]["outcome"] == "unusable"
    assert buffer.depth().waiting == 0


def test_a_state_that_does_not_fit_costs_only_the_optimizer(target, traffic, tmp_path, caplog):
    make_buffer(tmp_path, traffic)
    trainer = make(tmp_path, target, tolerance=3.0)
    trainer.run(max_rounds=1)
    following = make(tmp_path, target, tolerance=3.0, use_muon=True)
    with caplog.at_level(logging.WARNING):
        following.resume()
    assert "begins with the latest published version" in caplog.text
    assert following.progress.version == 1
    assert following.progress.round_id == 1
    assert same(dict(following.model.state_dict()), published_weights(tmp_path, 1))
    following.run(max_rounds=1)
    assert following.publisher.numbers() == [0, 1, 2]


def test_a_new_buffer_in_the_old_place_is_not_taken_for_the_old_one(target, traffic, tmp_path):
    make_buffer(tmp_path, traffic)
    make(tmp_path, target, tolerance=3.0).run(max_rounds=2)
    for path in tmp_path.glob("buffer*"):
        path.unlink()
    buffer = make_buffer(tmp_path, traffic)
    opened = buffer.claim(4)  # round 1 again, which the state has done in the old buffer
    trainer = make(tmp_path, target, tolerance=3.0)
    trainer.run(max_rounds=1)
    assert trainer.progress.history[-1]["round"] == opened.id == 1
    assert trainer.publisher.pointer().version == 3


def test_settings_that_cannot_work_are_refused(target, traffic, tmp_path):
    make_buffer(tmp_path, traffic[:2], max_rows=7)
    with pytest.raises(InvalidInputError, match="round_size"):
        make(tmp_path, target)
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    make_buffer(tmp_path, traffic[:2], held_out_share=0.0)
    with pytest.raises(InvalidInputError, match="held_out_share"):
        make(tmp_path, target)


def train_everything(tmp_path, target, kill_where=None):
    torch.use_deterministic_algorithms(True)
    if kill_where is not None:
        kill_at(*kill_where)
    trainer = make(tmp_path, target, tolerance=3.0)
    while trainer.waiting_for() is None:
        trainer.run(max_rounds=1)


def kill_at(owner, name, is_before, nth):
    """Has this process killed before or after the n-th call of a function."""
    function, calls = getattr(owner, name), itertools.count(1)

    @functools.wraps(function)
    def deadly(*args, **kwargs):
        is_now = next(calls) == nth
        if is_now and is_before:
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*args, **kwargs)
        if is_now:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, deadly)


@pytest.fixture(scope="module")
def whole(target, traffic, tmp_path_factory):
    """What two rounds come to when nobody is killed."""
    path = tmp_path_factory.mktemp("whole")
    make_buffer(path, few(traffic))
    with in_fork(train_everything, path, target) as process:
        process.join(120)
        assert process.exitcode == 0
    assert Publisher(path / "published").pointer().version == 2
    return path


def few(traffic):
    """Enough for two rounds, and one held out."""
    waiting = [one for one in traffic if one.prompt_hash >= 0.3]
    return [*waiting[:9], *[one for one in traffic if one.prompt_hash < 0.3][:1]]


def check_after_a_kill(path):
    """Nothing that may be loaded is half written, and the buffer is sound."""
    versions = Publisher(path / "published")
    for number in versions.numbers():
        versions.get(number).check_files()
    if (latest := versions.latest()) is not None:
        DFlashDrafterModel.from_pretrained(latest.path)
    assert ReplayBuffer(path / "buffer").depth().rows == 10


def check_same_end(path, whole):
    """Each trajectory was trained on once, and the weights are those of a run that nobody killed."""
    buffers = [ReplayBuffer(each / "buffer") for each in (path, whole)]
    assert buffers[0].depth() == buffers[1].depth()
    counts = times_trained(buffers[0])
    assert counts == times_trained(buffers[1])
    assert Counter(counts.values()) == {0: 2, 1: 8}
    assert buffers[0].open_round() is None
    assert Publisher(path / "published").pointer().version == 2
    for version in range(3):
        assert same(published_weights(path, version), published_weights(whole, version))
    progress = TrainingStateStore(path / "published" / "trainer-state").read_progress()
    assert [(entry["round"], entry["outcome"]) for entry in progress.history] == [(1, "published"), (2, "published")]
    assert not [name for name in listing(path) if "/.partial" in name or "/.removed" in name]


@pytest.mark.parametrize(
    "kill_where",
    [
        (Publisher, "_write", False, 1),  # version 0 has its name, nothing points to it
        (ReplayBuffer, "claim", False, 1),
        (RoundTrainer, "train", False, 2),
        (training_state, "sync_tree", False, 2),  # a state is complete and has no name
        (TrainingStateStore, "save", False, 2),  # due to be published
        (publisher_module, "sync_tree", False, 2),  # version 1 is complete and has no name
        (Publisher, "_point", True, 2),
        (Publisher, "_point", False, 2),
        (ReplayBuffer, "confirm", True, 1),
        (ReplayBuffer, "confirm", False, 2),
    ],
    ids=lambda where: f"{'before' if where[2] else 'after'}-{where[1].strip('_')}-{where[3]}",
)
def test_killed_at_any_step_it_goes_on_by_itself(target, traffic, whole, tmp_path, kill_where):
    make_buffer(tmp_path, few(traffic))
    with in_fork(train_everything, tmp_path, target, kill_where) as process:
        process.join(120)
        assert process.exitcode == -signal.SIGKILL
    check_after_a_kill(tmp_path)
    with in_fork(train_everything, tmp_path, target) as process:
        process.join(120)
        assert process.exitcode == 0
    check_same_end(tmp_path, whole)


def train_until(tmp_path, target, calls):
    """Trains, and is killed in the midst of the n-th call of any function, Python's or C's."""
    left = itertools.count(calls, -1)

    def count(frame, event, argument):
        if next(left) == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(count)
    train_everything(tmp_path, target)


def test_killed_at_random_instants_it_ends_with_the_weights_of_an_uninterrupted_run(target, traffic, whole, tmp_path):
    make_buffer(tmp_path, few(traffic))
    rng, kills, calls = random.Random(3), 0, 400_000  # undisturbed it takes 1.7 million
    while True:
        with in_fork(train_until, tmp_path, target, rng.randrange(calls)) as process:
            process.join(120)
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        kills += 1
        calls = int(1.5 * calls)
        check_after_a_kill(tmp_path)
    assert kills >= 3
    check_same_end(tmp_path, whole)


def listing(path):
    """Names in the publish directory, states included, while another process makes and removes some."""
    found = set()
    for directory, _, files in os.walk(path / "published"):
        found |= {directory, *(os.path.join(directory, name) for name in files)}
    return {name for name in found if "/status" not in name}


def worse_weights(model, target):
    model.load_state_dict(adapted_drafter(77).state_dict())


def weights_of_another_target(model, target):
    other = tiny_target("llama", seed=5)
    model.load_state_dict(train_on(adapted_drafter(), other, served(other, 4), steps=20).state_dict())


def not_finite(model, target):
    torch.nn.init.constant_(model.norm.weight, float("nan"))


@pytest.mark.parametrize(
    ("poison", "fields", "outcome"),
    [
        (worse_weights, {}, "rejected"),
        (weights_of_another_target, {}, "rejected"),
        (not_finite, {}, "rejected"),
        # Even where nobody judges.
        (not_finite, {"held_out": 0, "min_held_out": 0}, "refused"),
    ],
)
def test_a_poisoned_update_is_never_published(
    target, traffic, trained, tmp_path, monkeypatch, poison, fields, outcome
):
    buffer = make_buffer(tmp_path, traffic)
    trainer = make(tmp_path, target, copy.deepcopy(trained), **fields)
    train = RoundTrainer.train

    def poisoned(self, *args, **kwargs):
        result = train(self, *args, **kwargs)
        poison(self.model, target)
        return result

    monkeypatch.setattr(RoundTrainer, "train", poisoned)
    trainer.run(max_rounds=1)
    assert trainer.progress.history[-1]["outcome"] == outcome
    assert trainer.publisher.numbers() == [0]
    # The trainer itself is not poisoned either, nor is the next one; and the round is done with.
    for each in (trainer, make(tmp_path, target, **fields)):
        each.resume()
        assert same(dict(each.model.state_dict()), trained.state_dict())
    assert buffer.open_round() is None


def times_trained(buffer):
    with buffer.database.reading() as db:
        return dict(db.execute("SELECT id, times_trained FROM trajectories").fetchall())


def train_while_hindered(tmp_path, target, hinder, relieve, message):
    trainer = make(tmp_path, target, tolerance=3.0)
    trainer.resume()
    hinder(trainer)
    runner = threading.Thread(target=trainer.run, kwargs={"max_rounds": 1})
    runner.start()
    deadline = time.monotonic() + 100
    while message not in str(trainer.status.fields.get("error")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    relieve()
    runner.join(100)
    assert {entry["outcome"] for entry in trainer.progress.history} == {"published"}


def limit_file_sizes(limit=20_000):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


def after_first(owner, name, action):
    """Has something happen once a function has returned for the first time, for example the disk be full."""
    function = getattr(owner, name)

    def hindered(*args, **kwargs):
        setattr(owner, name, function)
        result = function(*args, **kwargs)
        action()
        return result

    setattr(owner, name, hindered)


def take_rights(trainer):
    def act():
        if os.geteuid() == 0:
            os.seteuid(NOBODY)
        else:
            for path in (trainer.publisher.directory, trainer.store.directory):
                path.chmod(0o555)

    after_first(trainer._trainer, "train", act)


def give_rights_back(directory):
    os.seteuid(os.getuid())
    for path in (directory / "published", directory / "published" / "trainer-state"):
        path.chmod(0o755)


@pytest.mark.parametrize(
    ("hinder", "message"),
    [
        (lambda trainer: limit_file_sizes(), "free some space"),
        (lambda trainer: after_first(trainer._trainer, "train", limit_file_sizes), "too large"),
        (lambda trainer: after_first(trainer.store, "save", limit_file_sizes), "Free some space"),
    ],
    ids=["claiming", "saving", "publishing"],
)
def test_a_disk_that_is_full_for_a_while_costs_time_and_no_round(target, traffic, tmp_path, hinder, message):
    make_buffer(tmp_path, traffic)

    def relieve():
        limit_file_sizes(resource.RLIM_INFINITY)

    with in_fork(train_while_hindered, tmp_path, target, hinder, relieve, message) as process:
        process.join(120)
        assert process.exitcode == 0
    # A round that was saved already is published without being counted anew.
    assert Publisher(tmp_path / "published").numbers() in ([0, 1], [0, 1, 2])
    assert Counter(times_trained(ReplayBuffer(tmp_path / "buffer")).values())[1] in (4, 8)


def test_a_place_that_is_read_only_for_a_while_costs_time_and_no_round(target, traffic):
    directory = Path(tempfile.mkdtemp())  # pytest's own is closed to whom the trainer becomes
    try:
        directory.chmod(0o755)
        make_buffer(directory, traffic)
        arguments = (target, take_rights, lambda: give_rights_back(directory), "Permission denied")
        with in_fork(train_while_hindered, directory, *arguments) as process:
            process.join(120)
            assert process.exitcode == 0
        assert Publisher(directory / "published").latest().version == 1
    finally:
        shutil.rmtree(directory)


def test_a_damaged_pointer_is_reported_and_waited_for(target, traffic, tmp_path):
    make_buffer(tmp_path, traffic)
    trainer = make(tmp_path, target, tolerance=3.0)
    trainer.run(max_rounds=1)
    (tmp_path / "published" / "latest.json").write_text("{")
    runner = threading.Thread(target=trainer.run, kwargs={"max_rounds": 1})
    runner.start()
    while "latest.json" not in str(trainer.status.fields.get("error")):
        time.sleep(0.01)
    Publisher(tmp_path / "published").rollback(to=1)
    runner.join(60)
    assert not runner.is_alive()
    assert trainer.publisher.pointer().version == 2


def test_interrupting_a_full_disk_ends_the_trainer(target, traffic, tmp_path, monkeypatch):
    make_buffer(tmp_path, traffic)
    trainer = make(tmp_path, target)
    trainer.resume()
    monkeypatch.setattr(trainer.store, "save", lambda *args: (_ for _ in ()).throw(OSError("No space left on device")))
    trainer.stop()
    with pytest.raises(InterruptedRoundError):
        trainer._save(trainer.progress)


def test_an_emptied_publish_directory_is_an_error_that_says_so(target, traffic, tmp_path):
    make_buffer(tmp_path, traffic)
    trainer = make(tmp_path, target, tolerance=3.0)
    trainer.run(max_rounds=1)
    shutil.rmtree(tmp_path / "published")
    (tmp_path / "published").mkdir()
    with pytest.raises(PublishedVersionError, match="emptied"):
        trainer.resume()
    assert json.dumps(trainer.progress.history)
