from __future__ import annotations

import io
import json

import pytest
from stand_ins import StandInDrafter, StandInTarget, byte_tokenizer

from adaflash_hf.cli import main
from adaflash_hf.commands import loading
from adaflash_hf.commands.generate import read_prompts, sampling_kwargs
from adaflash_hf.errors import InvalidInputError


@pytest.fixture
def target(monkeypatch) -> StandInTarget:
    stand_in = StandInTarget()
    models = loading.LoadedModels(stand_in, byte_tokenizer(), StandInDrafter())
    monkeypatch.setattr(loading, "load_models", lambda *args: models)
    monkeypatch.setenv("COLUMNS", "160")
    return stand_in


def expected_text(target: StandInTarget, prompt: str, max_new_tokens: int = 8) -> str:
    tokenizer = byte_tokenizer()
    prompt_ids = tokenizer(f"<|user|>{prompt}<|assistant|>", return_tensors="pt").input_ids
    output_ids = target.model.generate(prompt_ids, max_new_tokens=max_new_tokens, do_sample=False)
    return tokenizer.decode(output_ids[0, prompt_ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("stream", ["--stream", "--no-stream"])
def test_text_goes_to_stdout_and_speed_to_stderr(target, capsys, stream):
    assert main(["generate", "hello", "-n", "8", stream]) == 0
    captured = capsys.readouterr()
    assert captured.out == expected_text(target, "hello") + "\n"
    assert "8 tokens in" in captured.err
    assert "tau 2.50" in captured.err
    assert "verify lengths" not in captured.err


def test_verbose_shows_verify_lengths(target, capsys):
    assert main(["generate", "hello", "-n", "8", "--verbose"]) == 0
    assert "2x1 4x3" in capsys.readouterr().err


def test_options_reach_generate(target):
    arguments = ["generate", "hello", "-n", "4", "--temperature", "0.7", "--top-p", "0.9", "--top-k", "5"]
    assert main([*arguments, "--length-policy", "length_head", "--draft-proposal", "sample"]) == 0
    (call,) = target.calls
    expected = {"max_new_tokens": 4, "do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 5}
    assert {name: call[name] for name in expected} == expected
    assert (call["length_policy"], call["draft_proposal"]) == ("length_head", "sample")


def test_seed_repeats_a_sample(target, capsys):
    texts = []
    for _ in range(2):
        assert main(["generate", "hello", "-n", "8", "--temperature", "2", "--seed", "3"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


def test_json_is_one_object_per_prompt_and_nothing_else(target, capsys):
    assert main(["generate", "hello", "world", "-n", "8", "--json"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["prompt"] for record in records] == ["hello", "world"]
    assert records[0]["text"] == expected_text(target, "hello")
    assert records[0]["new_tokens"] == 8
    assert records[0]["stats"]["acceptance_length"] == 2.5


def test_compare_prints_a_table(target, capsys):
    assert main(["generate", "hello", "world", "-n", "8", "--compare", "--verbose"]) == 0
    text = capsys.readouterr().out
    assert "2 of 2 identical" in text
    assert "verify lengths" in text
    assert expected_text(target, "hello").splitlines()[0] in text


def test_compare_as_json(target, capsys):
    assert main(["generate", "hello", "-n", "8", "--compare", "--json", "--repeats", "2"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    record = json.loads(line)
    assert record["identical"] is True
    assert record["speedup"] > 0
    assert record["stats"]["rounds"] == 4
    # Two warm-ups and two repeats, both sides each.
    assert len(target.calls) == 8


@pytest.mark.parametrize("option", [["--repeats", "1"], ["--baseline", "loaded"]])
def test_options_of_a_comparison_need_one(target, capsys, option):
    assert main(["generate", "hello", *option]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"`{option[0]}` is given without `--compare`" in line
    assert target.calls == []


def test_a_draft_proposal_has_no_effect_on_greedy_decoding(target, capsys):
    assert main(["generate", "hello", "-n", "8", "--draft-proposal", "sample"]) == 0
    captured = capsys.readouterr()
    assert captured.out == expected_text(target, "hello") + "\n"
    assert "Warning: `--draft-proposal` is 'sample', but decoding is greedy; it has no effect.\n" in captured.err
    assert main(["generate", "hello", "-n", "8", "--draft-proposal", "sample", "--temperature", "0.5"]) == 0
    assert "Warning" not in capsys.readouterr().err


def test_prompt_from_standard_input(target, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("hello"))
    assert main(["generate", "-n", "8"]) == 0
    assert capsys.readouterr().out == expected_text(target, "hello") + "\n"


def test_prompts_are_collected_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("from stdin"))
    path = tmp_path / "prompt.txt"
    path.write_text("from file")
    assert read_prompts(["first", "-"], path) == ["first", "from stdin", "from file"]


@pytest.mark.parametrize("prompt", ["", "  \n"])
def test_an_empty_prompt_is_refused(prompt):
    with pytest.raises(InvalidInputError, match="`PROMPT` is empty"):
        read_prompts([prompt], None)


def test_a_terminal_is_not_waited_for(monkeypatch):
    monkeypatch.setattr("sys.stdin", type("Terminal", (io.StringIO,), {"isatty": lambda self: True})())
    with pytest.raises(InvalidInputError, match="`PROMPT` is missing"):
        read_prompts([], None)


def test_an_unreadable_prompt_file_is_refused(tmp_path):
    path = tmp_path / "prompt.bin"
    path.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(InvalidInputError, match="`--prompt-file`.*cannot be read"):
        read_prompts([], path)


def test_greedy_and_sampling_arguments():
    assert sampling_kwargs(0.0, None, None) == {"do_sample": False}
    assert sampling_kwargs(0.8, None, 4) == {"do_sample": True, "temperature": 0.8, "top_k": 4}
    with pytest.raises(InvalidInputError, match=r"`--top-p` is 0\.9, but decoding is greedy"):
        sampling_kwargs(0.0, 0.9, None)


def test_a_system_message_without_chat_is_an_error_of_one_line(target, capsys):
    assert main(["generate", "hello", "--no-chat", "--system", "be brief"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("adaflash: error: `system`")
    assert len(error.splitlines()) == 1
