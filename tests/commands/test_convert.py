from __future__ import annotations

import json
from pathlib import Path

import torch
from foreign_checkpoints import write_torchspec
from safetensors.torch import load_file
from tiny_checkpoints import assert_same_drafter
from tiny_models import tiny_drafter, tiny_target

from adaflash_hf import DFlashDrafterModel
from adaflash_hf.cli import main


def test_help(capsys):
    assert main(["convert", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--from" in shown and "--block-layout" in shown


def test_into_the_native_format(tmp_path: Path, capsys):
    drafter, target = tiny_drafter(rope_theta=1e6), tiny_target()
    target.save_pretrained(tmp_path / "target")
    source = write_torchspec(tmp_path / "in", drafter, target)
    arguments = ["convert", str(source), str(tmp_path / "out"), "--target", str(tmp_path / "target")]
    assert main(arguments) == 2
    assert "Pass --block-size" in capsys.readouterr().err
    assert main([*arguments, "--block-size", "4"]) == 0
    shown = capsys.readouterr().out
    assert "25 tensors in format native" in shown
    assert f"note: `embed_tokens.weight` is left out: equal to that of {tmp_path / 'target'}" in shown
    assert_same_drafter(DFlashDrafterModel.from_pretrained(tmp_path / "out"), drafter)


def test_out_of_it_and_back_in_another_dtype(tmp_path: Path, capsys):
    tiny_drafter(target_model_name_or_path="org/target").save_pretrained(tmp_path / "in")
    out, back = tmp_path / "out", tmp_path / "back"
    assert main(["convert", str(tmp_path / "in"), str(out), "--to", "speculators", "--dtype", "bfloat16"]) == 0
    assert "rounded from float32 to torch.bfloat16" in capsys.readouterr().out
    assert main(["convert", str(out), str(back), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"out": str(back), "format": "native", "tensors": 25, "notes": []}
    tensors = load_file(back / "model.safetensors")
    assert torch.equal(tensors["fc.weight"], load_file(out / "model.safetensors")["fc.weight"])


def test_declared_by_the_user(tmp_path: Path):
    tiny_drafter(rope_theta=1e6).save_pretrained(tmp_path / "in")
    arguments = ["convert", str(tmp_path / "in"), str(tmp_path / "out"), "--block-layout", "anchor_first"]
    assert main([*arguments, "--from", "native", "--block-size", "6"]) == 0
    config = DFlashDrafterModel.from_pretrained(tmp_path / "out").config
    assert (config.block_layout, config.block_size) == ("anchor_first", 6)
