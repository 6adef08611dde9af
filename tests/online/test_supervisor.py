from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from dataclasses import replace

import pytest
from tiny_online_run import NUM_PROMPTS, inference_settings, save_models, trainer_settings
from tqdm.auto import tqdm

from adaflash_hf.errors import InvalidInputError, PublishedVersionError, ReplayBufferError
from adaflash_hf.online import inference_process
from adaflash_hf.online import supervisor as supervisor_module
from adaflash_hf.online.inference_process import PromptTraffic
from adaflash_hf.online.online_trainer import OnlineTrainer
from adaflash_hf.online.publisher import Publisher
from adaflash_hf.online.replay_buffer import ReplayBuffer
from adaflash_hf.online.round_training import RoundTrainer
from adaflash_hf.online.run_status import read_status
from adaflash_hf.online.supervisor import SideFailedError, Supervisor, check_places


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(autouse=True)
def forked(monkeypatch):
    """Sides have all imports already; the command's own test starts them as users do."""
    monkeypatch.setattr(supervisor_module, "_context", lambda: multiprocessing.get_context("fork"))
    tqdm.set_lock(threading.RLock())  # the usual one is shared with forks, and stays taken by one that was killed


def die_once(monkeypatch, owner, name, marker, is_due):
    """Has the first process that calls a function when it is due be killed; the marker counts its calls."""
    function = getattr(owner, name)

    def deadly(*args):
        dead = marker.with_suffix(".dead")
        if not dead.exists():
            with marker.open("a") as file:
                file.write(".")
            if is_due():
                dead.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return function(*args)

    monkeypatch.setattr(owner, name, deadly)


def test_all_prompts_are_served_and_trained_on_even_if_both_sides_are_killed(models, tmp_path, monkeypatch):
    # The server dies in the midst of the prompts, the trainer in the midst of a round.
    monkeypatch.setattr(inference_process, "_STATUS_INTERVAL_S", 0.05)
    inference = inference_settings(models, tmp_path, max_new_tokens=24, concurrency=2)
    supervisor = Supervisor(trainer_settings(models, tmp_path), inference, poll_s=0.05)
    answered, trained = tmp_path / "answered", tmp_path / "trained"

    def is_recorded():
        time.sleep(0.15)  # so that there are prompts left when answers are first reported as recorded
        return read_status(tmp_path / "published", "server").get("position", 0) > 0

    die_once(monkeypatch, PromptTraffic, "finish", answered, is_recorded)
    die_once(monkeypatch, RoundTrainer, "_update", trained, lambda: True)
    supervisor.run(lambda snapshot: None)
    snapshot = supervisor.snapshot
    assert {name: entry["restarts"] for name, entry in snapshot["processes"].items()} == {"trainer": 1, "server": 1}
    assert not any(entry["is_alive"] for entry in snapshot["processes"].values())
    assert (snapshot["trainer"]["phase"], snapshot["server"]["phase"], snapshot["errors"]) == (
        "stopped",
        "stopped",
        [],
    )
    buffer = ReplayBuffer(tmp_path / "buffer")
    recorded = buffer.newest(100)
    assert len({one.prompt_hash for one in recorded}) == NUM_PROMPTS
    assert len(recorded) <= NUM_PROMPTS + len(answered.read_text()) + 2  # some are served again
    assert buffer.open_round() is None
    assert buffer.depth().waiting < 4
    with buffer.database.reading() as db:
        assert db.execute("SELECT max(times_trained) FROM trajectories").fetchone() == (1,)
    versions = Publisher(tmp_path / "published")
    for number in versions.numbers():
        versions.get(number).check_files()
    assert versions.latest().version >= 1
    assert json.loads(supervisor.status_path.read_text())["versions"]["served"] == versions.latest().version


def test_what_the_server_records_after_the_trainer_has_looked_is_trained_on_too(models, tmp_path, monkeypatch):
    waiting_for, finish, looked = OnlineTrainer.waiting_for, PromptTraffic.finish, tmp_path / "looked"

    def tells_late(trainer):
        """What it sees before all is served, it tells only when the server has ended."""
        reason = waiting_for(trainer)
        looked.touch()
        while reason and read_status(tmp_path / "published", "server").get("phase") != "stopped":
            time.sleep(0.01)
        return reason

    def finishes_later(traffic, number):
        while not looked.exists():
            time.sleep(0.01)
        finish(traffic, number)

    monkeypatch.setattr(OnlineTrainer, "waiting_for", tells_late)
    monkeypatch.setattr(PromptTraffic, "finish", finishes_later)
    trainer = trainer_settings(models, tmp_path, poll_s=4.0)  # in which the server's process ends
    supervisor = Supervisor(trainer, inference_settings(models, tmp_path), poll_s=0.05)
    supervisor.run(lambda snapshot: None)
    assert ReplayBuffer(tmp_path / "buffer").depth().waiting < 4
    assert supervisor.snapshot["trainer"]["rounds_done"] >= 1


def test_a_side_that_cannot_work_ends_the_run_with_its_reason(models, tmp_path):
    supervisor = Supervisor(
        trainer_settings(models, tmp_path), inference_settings(models, tmp_path, max_prompt_tokens=2), poll_s=0.05
    )
    with pytest.raises(SideFailedError, match="server cannot go on.*max_prompt_tokens"):
        supervisor.run(lambda snapshot: None)
    assert not any(entry["is_alive"] for entry in supervisor.snapshot["processes"].values())


def test_attached_it_starts_no_server_and_ends_when_told(models, tmp_path):
    supervisor = Supervisor(trainer_settings(models, tmp_path), poll_s=0.05)

    def look(snapshot):
        if snapshot["trainer"].get("phase") == "waiting":
            supervisor.stopping.set()

    supervisor.run(look)
    assert list(supervisor.snapshot["processes"]) == ["trainer"]
    assert supervisor.snapshot["trainer"]["phase"] == "stopped"
    assert supervisor.snapshot["server"] == {}


def test_a_side_that_dies_at_once_again_and_again_ends_the_run(models, tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor_module, "_FIRST_PAUSE_S", 0.01)
    settings = trainer_settings(models, tmp_path)
    supervisor = Supervisor(settings, poll_s=0.01)
    supervisor._sides[0].target = die
    with pytest.raises(SideFailedError, match="it gave no reason"):
        supervisor.run(lambda snapshot: None)
    assert supervisor.snapshot["processes"]["trainer"]["restarts"] == 5


def die(settings):
    os._exit(3)


def test_places_that_cannot_be_written_to_are_refused_at_once(tmp_path):
    check_places(tmp_path / "buffer", tmp_path / "published")
    check_places(tmp_path / "new" / "buffer", tmp_path / "published")
    assert (tmp_path / "new").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInputError, match="cannot be made"):
        check_places(tmp_path / "file" / "buffer", tmp_path / "published")
    with pytest.raises(PublishedVersionError):
        check_places(tmp_path / "buffer", tmp_path / "file")
    (tmp_path / "file").write_text("no buffer, but long enough to look like one" * 100)
    with pytest.raises(ReplayBufferError, match="it is not an SQLite file"):
        check_places(tmp_path / "file", tmp_path / "published")
    ReplayBuffer(tmp_path / "buffer").close()
    check_places(tmp_path / "buffer", tmp_path / "published")


def test_settings_travel(models, tmp_path):
    import pickle

    settings = inference_settings(models, tmp_path)
    assert pickle.loads(pickle.dumps(settings)) == settings
    with pytest.raises(InvalidInputError, match="concurrency"):
        replace(settings, concurrency=0)
    with pytest.raises(InvalidInputError, match="temperature"):
        replace(settings, temperature=-1.0)
    with pytest.raises(InvalidInputError, match="prompts"):
        replace(settings, prompts=())
    with pytest.raises(InvalidInputError, match="threads"):
        replace(settings.side, threads=0)
