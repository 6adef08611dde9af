from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from hub_server import running_hub
from safetensors.torch import load_file
from tiny_checkpoints import HEAD
from tiny_models import tiny_drafter, tiny_target

from adaflash_hf.cli import main


@pytest.fixture
def drafter(tmp_path: Path) -> str:
    tiny_drafter(length_head_config=HEAD).save_pretrained(tmp_path / "drafter")
    return str(tmp_path / "drafter")


@pytest.fixture
def target(tmp_path: Path) -> str:
    tiny_target().config.save_pretrained(tmp_path / "target")
    return str(tmp_path / "target")


def test_help(capsys):
    assert main(["export", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--to" in shown and "--target" in shown and "--force" in shown


@pytest.mark.parametrize("engine", ["sglang", "sglang-plugin", "vllm", "speculators", "z-lab"])
def test_it_writes_and_prints_the_command(engine, drafter, target, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["export", drafter, "--to", engine, str(out), "--target", target]) == 0
    shown = capsys.readouterr().out
    kept = engine == "sglang-plugin"
    assert f"{out}: {31 if kept else 25} tensors for {engine}, target {target}" in shown
    assert ("length head is left out" in shown) is not kept
    names = load_file(out / "model.safetensors")
    assert ("length_head.down.weight" in names) is kept
    if engine == "z-lab":
        assert "serve" not in shown
        return
    command = shlex.split(next(line for line in shown.splitlines() if " serve " in line))
    if engine == "speculators":
        assert command[:3] == ["vllm", "serve", str(out)]
        return
    assert target in command
    if engine == "vllm":
        assert json.loads(command[-1]) == {"method": "dflash", "model": str(out), "num_speculative_tokens": 3}
    else:
        assert command[command.index("--speculative-num-draft-tokens") + 1] == "4"
        assert command[command.index("--speculative-draft-model-path") + 1] == str(out)


def test_json(drafter, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["export", drafter, str(out), "--to", "vllm", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["block_size"] == 4 and record["num_speculative_tokens"] == 3
    assert record["target"] is None and "TARGET" in record["command"]
    assert any("does not name its target" in note for note in record["notes"])


def test_what_does_not_fit_is_not_written(drafter, tmp_path, capsys):
    tiny_target(num_hidden_layers=7).config.save_pretrained(tmp_path / "deeper")
    assert main(["export", drafter, str(tmp_path / "out"), "--to", "vllm", "--target", str(tmp_path / "deeper")]) == 2
    error = capsys.readouterr().err
    assert "`num_target_layers` = 4 layers, this target has `num_hidden_layers` = 7" in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_force(drafter, tmp_path, capsys):
    arguments = ["export", drafter, str(tmp_path / "out"), "--to", "sglang"]
    assert main(arguments) == 0
    assert main(arguments) == 2
    assert "pass --force to replace it" in capsys.readouterr().err
    assert main([*arguments, "--force"]) == 0


def test_wrong_usage(drafter, tmp_path, capsys):
    assert main(["export", drafter, str(tmp_path / "out")]) == 2
    assert "--to" in capsys.readouterr().err
    assert main(["export", drafter, str(tmp_path / "out"), "--to", "ollama"]) == 2


def test_a_drafter_on_the_hub(drafter, tmp_path, monkeypatch, capsys):
    with running_hub() as hub:
        hub.serve_this_process(monkeypatch, tmp_path / "cache")
        hub.repositories["org/drafter"] = {path.name: path.read_bytes() for path in Path(drafter).iterdir()}
        capsys.readouterr()
        assert main(["export", "org/drafter", str(tmp_path / "out"), "--to", "sglang-plugin", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tensors"] == 31
    assert "length_head.down.weight" in load_file(tmp_path / "out" / "model.safetensors")
