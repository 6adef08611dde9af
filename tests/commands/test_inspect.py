from __future__ import annotations

import json
from pathlib import Path

import pytest
from foreign_checkpoints import write_deepspec
from tiny_checkpoints import HEAD, ZLAB_CONFIG, without, write
from tiny_models import tiny_drafter, tiny_target

from adaflash_hf.cli import main


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def test_help(capsys):
    assert main(["inspect", "--help"]) == 0
    assert "Exits with 1 on problems" in " ".join(capsys.readouterr().out.split())


def test_a_sound_drafter(tmp_path: Path, capsys):
    fields = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
    tiny_drafter(length_head_config=HEAD, draft_vocab_size=7, **fields).save_pretrained(tmp_path / "drafter")
    tiny_target().config.save_pretrained(tmp_path / "target")
    assert main(["inspect", str(tmp_path / "drafter"), "--target", str(tmp_path / "target")]) == 0
    shown = capsys.readouterr().out
    for words in (
        "adaflash_hf (native)",
        f"not named, 4 layers; fits {tmp_path / 'target'}",
        "[0, 2] (layer outputs from 0; [1, 3] in vLLM's",
        "4 rows, anchor_then_masks: 3 drafts; mask token 3",
        "causal in some layers inside the block, 1 of 2 with a window of 5",
        "96, of which 7 are drafted",
        "mean_last_residual, bottleneck 5",
        "float32",
        "SGLang, ADAFLASH plugin",
        "Use `adaflash export --to vllm`",
    ):
        assert words in shown, words


def test_a_broken_one_is_described_and_exits_with_1(tmp_path: Path, capsys):
    folder = write(tmp_path, ZLAB_CONFIG, without(tiny_drafter().state_dict(), "norm.weight"))
    assert main(["inspect", str(folder)]) == 1
    captured = capsys.readouterr()
    assert "problem: " in captured.out and "`norm.weight`" in captured.out
    assert "SGLang, DFLASH" in captured.out
    assert captured.err == ""
    assert main(["inspect", str(folder), "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert record["format"] == "z-lab" and record["drafter"] is None and len(record["problems"]) == 1


def test_options_reach_the_reader(tmp_path: Path, capsys):
    source = write_deepspec(tmp_path, tiny_drafter(), tiny_target())
    assert main(["inspect", str(source), "--json"]) == 1
    assert "pass --target" in json.loads(capsys.readouterr().out)["problems"][0]
    options = ["--trust-copies", "--block-layout", "anchor_then_masks", "--from", "deepspec"]
    assert main(["inspect", str(source), "--json", *options]) == 0
    assert json.loads(capsys.readouterr().out)["drafter"]["block_layout"] == "anchor_then_masks"


def test_nothing_to_look_at(tmp_path: Path, capsys):
    assert main(["inspect", str(tmp_path / "nothing")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
