from __future__ import annotations

import importlib.util
import multiprocessing
import random
import signal
import sys
import time
from pathlib import Path

import pytest

from adaflash_hf.online import BufferSettings, ReplayBuffer, supervisor
from adaflash_hf.online.recorded_trajectory import RecordedTrajectory
from adaflash_hf.online.training_state import TrainingProgress


ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def soak():
    spec = importlib.util.spec_from_file_location("soak_online", ROOT / "examples" / "soak_online.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["soak_online"] = module
    spec.loader.exec_module(module)
    return module


def test_reloads_under_load_change_no_answer(soak, tmp_path):
    report = soak.soak_reloads(soak.save_tiny_models(tmp_path), tmp_path, reloads=5, seconds=0.0)
    assert report.wrong == []
    assert len(report.pauses_s) == 5
    assert 1 <= len(report.reload_rounds_s) <= 5  # some may come while there is nothing to decode
    assert report.answers > 0
    assert len(report.rounds_s) > 5


def test_killed_in_turn_everything_is_served_and_trained_on_once(soak, tmp_path, monkeypatch):
    # Forks of this process have all imports already.
    monkeypatch.setattr(supervisor, "_context", lambda: multiprocessing.get_context("fork"))
    models = soak.save_tiny_models(tmp_path)
    models.prompts = models.prompts[:16]
    (tmp_path / "place").mkdir()
    report = soak.soak_kills(models, tmp_path / "place", kills=2, longest_s=2.0)
    assert report.wrong == []
    assert report.kills == {"trainer": 1, "server": 1}
    assert report.killed_at.total() == 2
    assert report.rounds > 0


def test_only_a_living_server_is_ended_early(soak, tmp_path):
    # The first one is gone, and what it wrote last is read only now.
    gone, living = (multiprocessing.get_context("fork").Process(target=time.sleep, args=(s,)) for s in (0, 600))
    gone.start()
    gone.join()
    living.start()
    killer = soak.Killer(None, soak.SoakReport(), tmp_path, kills=0, rng=random.Random(0), longest_s=1.0)
    status = {"server": {"position": 9}, "trainer": {}, "buffer": {"waiting": soak.ROUND_SIZE}}
    killer.look({**status, "processes": {"server": {"pid": gone.pid, "is_alive": False}}})
    assert living.is_alive()
    killer.look({**status, "processes": {"server": {"pid": living.pid, "is_alive": True}}})
    living.join()
    assert living.exitcode == -signal.SIGTERM


def test_a_pause_as_long_as_a_round_is_told(soak):
    report = soak.SoakReport(pauses_s=[0.001, 0.002], rounds_s=[0.002, 0.004])
    assert report.slow_reloads() == []
    report.pauses_s.append(0.003)
    assert report.slow_reloads() == ["1 of 3 reloads took a round (3.00 ms) or more, up to 3.00 ms"]


def fill(buffer, models, numbers):
    for number in numbers:
        prompt, answer = models.references[number]
        buffer.append([RecordedTrajectory.from_lists(prompt, answer)])


def test_answers_that_are_missing_or_others_are_found(soak, tmp_path):
    models = soak.SoakModels("", "", ())
    models.references = [([5, 6], [7, 8, 9]), ([5, 7], [8, 9]), ([5, 8], [2])]
    buffer = ReplayBuffer(tmp_path / "buffer")
    fill(buffer, models, [0, 1])
    assert soak._lost_or_other(models, buffer, position=3) == []  # the third is too short to be recorded
    assert soak._lost_or_other(models, buffer, position=5) == ["2 of 5 answers are not in the buffer"]
    buffer.append([RecordedTrajectory.from_lists([5, 6], [7, 8]), RecordedTrajectory.from_lists([5, 7], [8, 8])])
    assert soak._lost_or_other(models, buffer, position=5) == ["prompt 1: 1 of 2 answers are not plain decoding's"]


def test_what_is_in_the_weights_twice_or_not_at_all_is_found(soak, tmp_path):
    models = soak.SoakModels("", "", ())
    models.references = [([5, 6], [7, 8, 9 + number]) for number in range(4)]
    buffer = ReplayBuffer(tmp_path / "buffer", BufferSettings(held_out_share=0.0))
    fill(buffer, models, range(4))
    entry = {"round": 1, "trajectories": {"maths": 2}}
    buffer.claim(2)
    assert soak._miscounted(buffer, TrainingProgress(round_id=1, history=[entry])) == []  # saved, not confirmed
    assert soak._miscounted(buffer, TrainingProgress()) == []  # begun
    buffer.confirm(1)
    assert soak._miscounted(buffer, TrainingProgress(round_id=1, history=[entry])) == []
    assert soak._miscounted(buffer, TrainingProgress()) == ["0 trajectories were trained on, 2 are marked so"]
    assert soak._miscounted(buffer, TrainingProgress(round_id=1, history=[entry, entry])) == [
        "round 1 was trained on 2 times",
        "4 trajectories were trained on, 2 are marked so",
    ]
