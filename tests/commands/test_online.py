from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants
from online_traffic import recorded
from published_drafters import adapted_drafter, publish
from tiny_online_run import save_models

from adaflash_hf import DFlashDrafterModel
from adaflash_hf.cli import main
from adaflash_hf.commands import online
from adaflash_hf.online import supervisor
from adaflash_hf.online.published_versions import PublishedVersions
from adaflash_hf.online.publisher import Publisher
from adaflash_hf.online.replay_buffer import BufferSettings, ReplayBuffer


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def published(tmp_path):
    publisher = Publisher(tmp_path / "published", keep_versions=9)
    for seed in range(4):
        publish(publisher, adapted_drafter(seed))
    return publisher


def arguments(models, place, *more):
    places = ["--buffer", place / "buffer", "--publish-dir", place / "published"]
    return [str(part) for part in ["online", "run", "--target", models / "target", *places, *more]]


@pytest.mark.parametrize("command", [[], ["run"], ["status"], ["rollback"], ["prune"], ["push"]])
def test_help(command, capsys):
    assert main(["online", *command, "--help"]) == 0
    assert "Usage" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "`--prompts` was not given"),
        (["--prompts", "PROMPTS", "--attach"], "exclude each other"),
        (["--prompts", "PROMPTS", "--objective", "magic"], "`objective` is 'magic'"),
        (["--prompts", "PROMPTS", "--min-held-out", "99"], "`min_held_out` is 99"),
        (["--prompts", "PROMPTS", "--buffer", "/dev/null/buffer"], "cannot be made"),
        (["--attach"], "no drafter was given"),
        (["--prompts", "PROMPTS", "--target", "/no/target"], "`--target` is '/no/target' and cannot be loaded (there"),
        (
            ["--prompts", "PROMPTS", "--target", "no-such-target"],
            "`--target` is 'no-such-target' and cannot be loaded",
        ),
        (["--attach", "--target", "tests"], "`--target` is 'tests' and cannot be loaded"),
        (["--attach", "--target", "DRAFTER"], "drafter' and cannot be loaded (it is a drafter). Pass a Hub id, the"),
        (["--prompts", "PROMPTS", "--drafter", "./none"], "`--drafter` is './none' and cannot be loaded (there"),
        (["--attach", "--drafter", "TARGET"], "LlamaForCausalLM"),
        (["--attach", "--round-size", "20000"], "`round_size` is 20000, but the buffer keeps `max_rows` = 20000"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(models, tmp_path, capsys, monkeypatch, options, message):
    monkeypatch.setattr(online, "_run", None)
    drafter = [] if options == ["--attach"] else ["--drafter", str(models / "drafter")]
    places = {"PROMPTS": "prompts.jsonl", "DRAFTER": "drafter", "TARGET": "target"}
    given = [str(models / places[option]) if option in places else option for option in options]
    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert main(arguments(models, tmp_path, *drafter, *given)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not (tmp_path / "published").exists()


def test_options_reach_both_sides(models, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(online, "_run", lambda *given: seen.extend(given))
    more = ["--drafter", models / "drafter", "--prompts", models / "prompts.jsonl", "--domain", "sums", "--once"]
    more += ["--concurrency", 3, "--temperature", 0.5, "--round-size", 16, "--lora-rank", 2, "--balanced"]
    more += ["--device", "cpu", "--trainer-device", "meta", "--inference-threads", 3, "--metrics-port", 9]
    assert main(arguments(models, tmp_path, *more)) == 0
    trainer, inference, port, host = seen
    assert (trainer.arguments.round_size, trainer.arguments.lora_rank, trainer.arguments.balanced) == (16, 2, True)
    assert (trainer.side.device, trainer.side.threads) == ("meta", None)
    assert (inference.side.device, inference.side.threads, inference.concurrency) == ("cpu", 3, 3)
    assert (inference.is_once, inference.temperature, port, host) == (True, 0.5, 9, "127.0.0.1")
    assert {prompt.domain for prompt in inference.prompts} == {"sums"}
    assert inference.side.buffer == trainer.side.buffer == tmp_path / "buffer"
    # A trainer alone.
    seen.clear()
    assert main(arguments(models, tmp_path, "--drafter", models / "drafter", "--attach")) == 0
    assert seen[1] is None


def test_what_another_run_began_is_refused_before_anything_starts(models, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(online, "_run", None)
    given = ["--prompts", str(models / "prompts.jsonl"), "--drafter", str(models / "drafter")]
    ReplayBuffer(tmp_path / "buffer", BufferSettings(target="org/another")).close()
    assert main(arguments(models, tmp_path, *given)) == 2
    assert "was made with 'org/another'" in capsys.readouterr().err
    (tmp_path / "buffer").unlink()
    buffer = ReplayBuffer(tmp_path / "buffer", BufferSettings(target=str(models / "target")))
    with buffer.consumer_lock():
        assert main(arguments(models, tmp_path, *given)) == 2
    buffer.close()
    assert "which another trainer is attached to; stop that one first" in capsys.readouterr().err
    other = DFlashDrafterModel.from_pretrained(models / "drafter")
    other.config.mask_token_id += 1
    publish(Publisher(tmp_path / "published"), other)
    assert main(arguments(models, tmp_path, *given)) == 2
    assert "config.json describes another drafter (mask_token_id: " in capsys.readouterr().err


def test_what_is_damaged_is_refused_before_anything_starts(models, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(online, "_run", None)
    given = ["--prompts", str(models / "prompts.jsonl"), "--drafter", str(models / "drafter")]
    buffer = ReplayBuffer(tmp_path / "buffer", BufferSettings(target=str(models / "target")))
    buffer.append([recorded(seed, response=2_000) for seed in range(9)])
    buffer.close()
    size = (tmp_path / "buffer").stat().st_size
    with (tmp_path / "buffer").open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(size - 4096))
    assert main(arguments(models, tmp_path, *given)) == 2
    assert "(SQLITE_CORRUPT): the file is damaged; move it" in capsys.readouterr().err
    (tmp_path / "buffer").unlink()
    number = publish(Publisher(tmp_path / "published"), DFlashDrafterModel.from_pretrained(models / "drafter"))
    (PublishedVersions(tmp_path / "published").path_of(number) / "model.safetensors").unlink()
    assert main(arguments(models, tmp_path, *given)) == 2
    assert "`model.safetensors` has the checksum None" in capsys.readouterr().err


def test_a_drafter_that_is_given_again_is_said_not_to_be_served(models, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(online, "_run", lambda *args: None)
    given = ["--prompts", str(models / "prompts.jsonl"), "--drafter", str(models / "drafter")]
    assert main(arguments(models, tmp_path, *given)) == 0
    assert "Going on" not in capsys.readouterr().err
    publish(Publisher(tmp_path / "published"), DFlashDrafterModel.from_pretrained(models / "drafter"))
    assert main(arguments(models, tmp_path, *given)) == 0
    assert "Going on from version 0" in capsys.readouterr().err


def test_rollback_and_prune(published, tmp_path, capsys):
    place = ["--publish-dir", str(tmp_path / "published")]
    assert main(["online", "rollback", *place]) == 0
    assert "Version 2 is served now" in capsys.readouterr().out
    assert published.pointer().version == 2
    assert main(["online", "rollback", *place, "--to", "3"]) == 0
    assert published.pointer().version == 3
    capsys.readouterr()
    assert main(["online", "prune", *place, "--keep", "1"]) == 0
    assert capsys.readouterr().out == "Removed: 1.\n"
    assert published.numbers() == [0, 2, 3]
    for command in ("rollback", "prune"):
        assert main(["online", command, "--publish-dir", str(tmp_path / "none")]) == 2
        assert "which is not there" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_status(published, tmp_path, capsys):
    place = ["--publish-dir", str(tmp_path / "published")]
    ReplayBuffer(tmp_path / "buffer")
    assert main(["online", "status", *place, "--buffer", str(tmp_path / "buffer"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["versions"]["available"] == [0, 1, 2, 3]
    assert shown["buffer"]["rows"] == 0
    assert main(["online", "status", *place]) == 0
    assert "3 (published)" in capsys.readouterr().out
    assert main(["online", "status", *place, "--prometheus"]) == 0
    assert "adaflash_online_published_version 3.0" in capsys.readouterr().out
    assert main(["online", "status", "--publish-dir", str(tmp_path / "none")]) == 2
    assert "is not there" in capsys.readouterr().err


def test_brackets_in_paths_are_shown(monkeypatch, capsys):
    ended = SimpleNamespace(stopping=threading.Event(), status_path="runs/a[b]/status.json", run=lambda show: None)
    monkeypatch.setattr(supervisor, "Supervisor", lambda *given: ended)
    online._run(None, None, None, "")
    assert "Status: runs/a[b]/status.json" in capsys.readouterr().out


@pytest.mark.slow
def test_two_processes_serve_train_and_swap_until_sigterm(models, tmp_path):
    """The command as users start it, prompts over and over, ended in the midst of it."""
    more = ["--drafter", models / "drafter", "--prompts", models / "prompts.jsonl", "--device", "cpu"]
    more += ["--dtype", "float32", "--max-new-tokens", 8, "--round-size", 4, "--epochs", 1, "--min-held-out", 1]
    more += ["--held-out-share", 0.3, "--tolerance", 10, "--anchors", 4, "--metrics-port", 0]
    command = [sys.executable, "-m", "adaflash_hf.cli", *arguments(models, tmp_path, *more)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            address = process.stdout.readline().split()[-1]
            wait_for(process, tmp_path, lambda run: run["server"].get("version", 0) >= 1)
            with urllib.request.urlopen(address, timeout=600) as response:
                assert "adaflash_online_served_version" in response.read().decode()
            process.send_signal(signal.SIGTERM)
            shown, _ = process.communicate(timeout=900)
        finally:
            process.kill()
    assert process.returncode == 0, shown
    assert "tau" in shown and "repeat the command to go on" in shown
    run = read_run(tmp_path)
    assert (run["server"]["phase"], run["trainer"]["phase"], run["errors"]) == ("stopped", "stopped", [])
    assert run["server"]["reload"]["reloads"] >= 1
    for entry in run["processes"].values():
        with pytest.raises(ProcessLookupError):
            os.kill(entry["pid"], 0)
    published = Publisher(tmp_path / "published").latest()
    published.check_files()
    assert published.version >= run["server"]["version"] >= 1


def read_run(place):
    try:
        return json.loads((place / "published" / "status" / "run.json").read_text())
    except (OSError, ValueError):
        return {"server": {}}


def wait_for(process, place, is_true):
    deadline = time.monotonic() + 1800
    while not is_true(read_run(place)):
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.2)
