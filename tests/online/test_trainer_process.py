from __future__ import annotations

import os
import signal
import time

import pytest
from online_traffic import in_fork, served
from tiny_models import tiny_target
from tiny_online_run import VOCAB_SIZE, save_models, side_settings, trainer_settings

from adaflash_hf.online.publisher import Publisher
from adaflash_hf.online.replay_buffer import BufferSettings, ReplayBuffer
from adaflash_hf.online.run_status import read_status
from adaflash_hf.online.side_process import log_path
from adaflash_hf.online.trainer_process import run_trainer


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return save_models(tmp_path_factory.mktemp("models"))


def test_it_trains_on_a_buffer_that_others_fill_until_sigterm(models, tmp_path):
    # Made with other settings than the trainer's own, by somebody else.
    buffer = ReplayBuffer(tmp_path / "buffer", BufferSettings(held_out_share=0.4, target="theirs"))
    with in_fork(run_trainer, trainer_settings(models, tmp_path)) as process:
        wait_for(tmp_path, lambda status: status.get("waiting_for", "").endswith("new trajectories"))
        buffer.append(served(tiny_target("llama", vocab_size=VOCAB_SIZE), 12))
        wait_for(tmp_path, lambda status: status.get("rounds_done", 0) >= 1 and status["phase"] == "waiting")
        os.kill(process.pid, signal.SIGTERM)
        process.join(900)
        assert process.exitcode == 0
    assert read_status(tmp_path / "published", "trainer")["phase"] == "stopped"
    assert buffer.settings.held_out_share == 0.4
    assert buffer.open_round() is None
    assert Publisher(tmp_path / "published").latest().version >= 1
    assert "begins with version 0" in log_path(tmp_path / "published", "trainer").read_text()


def test_it_ends_after_the_rounds_asked_for(models, tmp_path):
    ReplayBuffer(tmp_path / "buffer", BufferSettings(held_out_share=0.3)).append(
        served(tiny_target("llama", vocab_size=VOCAB_SIZE), 16)
    )
    with in_fork(run_trainer, trainer_settings(models, tmp_path, max_rounds=1)) as process:
        process.join(900)
        assert process.exitcode == 0
    assert Publisher(tmp_path / "published").numbers() == [0, 1]


def test_a_drafter_of_another_target_ends_it_with_the_reason(models, tmp_path):
    other = tmp_path / "other"
    tiny_target("llama", vocab_size=VOCAB_SIZE, hidden_size=16).save_pretrained(other)
    (other / "tokenizer.json").write_bytes((models / "target" / "tokenizer.json").read_bytes())
    (other / "tokenizer_config.json").write_bytes((models / "target" / "tokenizer_config.json").read_bytes())
    ReplayBuffer(tmp_path / "buffer")
    settings = trainer_settings(models, tmp_path, side=side_settings(models, tmp_path, target=str(other)))
    with in_fork(run_trainer, settings) as process:
        process.join(900)
        assert process.exitcode == 2
    assert "hidden" in read_status(tmp_path / "published", "trainer")["error"]


def wait_for(place, is_true):
    deadline = time.monotonic() + 900
    while not is_true(read_status(place / "published", "trainer")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
