"""An online trainer that is killed at any step, or whose disk is full, read-only or damaged for a while."""

from __future__ import annotations

import functools
import itertools
import os
import random
import resource
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from online_traffic import in_fork, served
from tiny_models import tiny_target
from tiny_online_trainer import make, make_buffer, published_weights, same, times_trained

from adaflash_hf import DFlashDrafterModel, atomic_directories
from adaflash_hf.online.publisher import Publisher
from adaflash_hf.online.replay_buffer import ReplayBuffer
from adaflash_hf.online.round_training import InterruptedRoundError, RoundTrainer
from adaflash_hf.online.training_state import TrainingStateStore


NOBODY = 65534


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama")


@pytest.fixture(scope="module")
def traffic(target):
    return served(target, 40)


def train_everything(tmp_path, target, kill_where=None):
    torch.use_deterministic_algorithms(True)
    if kill_where is not None:
        kill_at(*kill_where)
    trainer = make(tmp_path, target, tolerance=3.0)
    trainer.resume()  # which may be all that a killed one has left to do
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
    """What two rounds come to when nobody is killed, and how many seconds they compute."""
    path = tmp_path_factory.mktemp("whole")
    make_buffer(path, few(traffic))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with in_fork(train_everything, path, target) as process:
        process.join(1200)
        assert process.exitcode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert Publisher(path / "published").pointer().version == 2
    return path, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


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
    assert not [name for name in listing(path) if name.endswith((".partial", ".removed"))]


@pytest.mark.parametrize(
    "kill_where",
    [
        (Publisher, "_write", False, 1),  # version 0 has its name, nothing points to it
        (ReplayBuffer, "claim", False, 1),
        (RoundTrainer, "train", False, 2),
        (atomic_directories, "_take_name", True, 3),  # a state is complete and has no name
        (TrainingStateStore, "save", False, 2),  # due to be published
        (atomic_directories, "_take_name", True, 4),  # version 1 is complete and has no name
        (Publisher, "_point", True, 2),
        (ReplayBuffer, "confirm", True, 1),
        (os, "rename", False, 6),  # of the oldest state the name is gone, and nothing else yet
        (Publisher, "_point", False, 3),
        (ReplayBuffer, "confirm", True, 2),  # nothing to train is left
        (ReplayBuffer, "confirm", False, 2),
    ],
    ids=lambda where: f"{'before' if where[2] else 'after'}-{where[1].strip('_')}-{where[3]}",
)
def test_killed_at_any_step_it_goes_on_by_itself(target, traffic, whole, tmp_path, kill_where):
    make_buffer(tmp_path, few(traffic))
    with in_fork(train_everything, tmp_path, target, kill_where) as process:
        process.join(1200)
        assert process.exitcode == -signal.SIGKILL
    check_after_a_kill(tmp_path)
    with in_fork(train_everything, tmp_path, target) as process:
        process.join(1200)
        assert process.exitcode == 0
    check_same_end(tmp_path, whole[0])


def train_for(cpu_s, tmp_path, target):
    """Trains, and is ended by the system wherever it is after so much computing: in Python, in C or while writing."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    train_everything(tmp_path, target)


def test_killed_at_random_instants_it_ends_with_the_weights_of_an_uninterrupted_run(target, traffic, whole, tmp_path):
    path, cpu_s = whole
    make_buffer(tmp_path, few(traffic))
    rng, kills, share = random.Random(3), 0, 0.5
    while True:
        with in_fork(train_for, rng.uniform(0.05, share) * cpu_s, tmp_path, target) as process:
            process.join(1200)
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGPROF
        kills += 1
        share *= 1.3
        check_after_a_kill(tmp_path)
    assert kills
    check_same_end(tmp_path, path)


def listing(path):
    """Names in the publish directory, states included, while another process makes and removes some."""
    found = set()
    for directory, _, files in os.walk(path / "published"):
        found |= {directory, *(os.path.join(directory, name) for name in files)}
    return {name for name in found if "/status" not in name}


def train_while_hindered(tmp_path, target, hinder, relieve, message):
    trainer = make(tmp_path, target, tolerance=3.0)
    trainer.resume()
    hinder(trainer)
    runner = threading.Thread(target=trainer.run, kwargs={"max_rounds": 1})
    runner.start()
    deadline = time.monotonic() + 600
    while message not in str(trainer.status.fields.get("error")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    relieve()
    runner.join(600)
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
        process.join(1200)
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
            process.join(1200)
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
        assert runner.is_alive()
        time.sleep(0.01)
    Publisher(tmp_path / "published").rollback(to=1)
    runner.join(600)
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
