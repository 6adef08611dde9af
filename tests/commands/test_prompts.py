from __future__ import annotations

import pytest
from full_disk import full_after
from stand_ins import SPECIAL_TOKENS, byte_tokenizer
from tiny_models import tiny_target

from adaflash_hf import embedded_target
from adaflash_hf.cli import main
from adaflash_hf.embedded_target import LoadedTarget
from adaflash_hf.training import prompt_synthesis
from adaflash_hf.training.prompts import read_prompt_file


@pytest.fixture(autouse=True)
def tiny_targets(monkeypatch):
    def load_target(name, *args, on_progress, **kwargs):
        on_progress(f"Loading {name}")
        target = tiny_target("llama", vocab_size=len(SPECIAL_TOKENS) + 256)
        target.generation_config.eos_token_id = list(range(4, 260, 24))
        return LoadedTarget(target, byte_tokenizer())

    monkeypatch.setattr(embedded_target, "load_target", load_target)
    monkeypatch.setenv("COLUMNS", "200")


def run(out, *extra):
    common = ["--batch-size", 8, "--temperature", 2.0, "--max-tokens", 60]
    return main([str(argument) for argument in ("prompts", "--out", out, *common, *extra)])


def test_it_fills_a_file_by_domain(tmp_path, capsys):
    out = tmp_path / "prompts.jsonl"
    assert run(out, "--count", 3, "--seed", 1) == 0
    shown = capsys.readouterr().out
    assert "3 prompts of the domain chat" in shown and "turns sampled" in shown and "too short" in shown
    assert run(out, "--count", 2, "--domain", "code", "--prefix", "def f", "--prefix", "class A") == 0
    capsys.readouterr()
    assert [prompt.domain for prompt in read_prompt_file(out)] == ["chat"] * 3 + ["code"] * 2
    code = [prompt.messages[-1][1] for prompt in read_prompt_file(out)[3:]]
    assert all(text.startswith(("def f", "class A")) for text in code)
    assert run(out, "--count", 3) == 0
    assert "0 turns sampled" in capsys.readouterr().out


def test_brackets_in_paths_are_shown(tmp_path, capsys):
    assert run(tmp_path / "prompts.jsonl", "--count", 1, "--target", "models/a[b]") == 0
    assert "Loading models/a[b] ..." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"), [(["--temperature", 0.0], "temperature"), (["--max-tokens", 2], "no usable prompt")]
)
def test_wrong_usage_is_one_line(tmp_path, capsys, arguments, message):
    assert run(tmp_path / "p.jsonl", "--count", 1, *arguments) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_a_place_that_cannot_be_written_is_refused_before_the_target_is_loaded(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(embedded_target, "load_target", None)
    (tmp_path / "file").touch()
    assert run(tmp_path / "file" / "p.jsonl", "--count", 1) == 2
    assert "which cannot be written" in capsys.readouterr().err


def test_a_full_disk_costs_no_prompt_that_was_written(tmp_path, capsys):
    out = tmp_path / "prompts.jsonl"
    assert run(out, "--count", 1) == 0
    before = read_prompt_file(out)
    with full_after(prompt_synthesis, "_read_own_file", 1, room_bytes=out.stat().st_size + 5):
        assert run(out, "--count", 3) == 2
    assert "the prompts before are in it: repeat to go on" in capsys.readouterr().err
    assert out.read_bytes()[-1:] != b"\n"  # the line that the disk cut off
    assert run(out, "--count", 3) == 0
    prompts = read_prompt_file(out)
    assert prompts[:1] == before and len(prompts) == 3


def test_help(capsys):
    assert main(["prompts", "--help"]) == 0
    shown = capsys.readouterr().out
    assert all(option in shown for option in ("--prefix", "--domain", "--count", "--temperature"))
