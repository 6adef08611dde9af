"""The small examples, on tiny models and with tiny budgets."""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from hub_server import HubServer, running_hub
from published_drafters import adapted_drafter
from stand_ins import SPECIAL_TOKENS, byte_tokenizer
from tiny_models import tiny_target

from adaflash_hf import DFlashDrafterModel, embedded_target
from adaflash_hf.commands import loading
from adaflash_hf.commands.loading import LoadedModels
from adaflash_hf.embedded_target import LoadedTarget
from adaflash_hf.evaluation.workloads import load_workload
from adaflash_hf.training.prompts import read_prompt_file


EXAMPLES = Path(__file__).parents[2] / "examples"


def make_target() -> Any:
    return tiny_target("llama", vocab_size=len(SPECIAL_TOKENS) + 256)


def load_example(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location(f"{name}_example", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    target = make_target()
    tokenizer = byte_tokenizer()
    tokenizer.padding_side = "left"
    models = LoadedModels(target, tokenizer, adapted_drafter(vocab_size=target.config.vocab_size))
    monkeypatch.setattr(embedded_target, "load_target", lambda *a, **k: LoadedTarget(make_target(), byte_tokenizer()))
    if hasattr(module, "load_models"):
        monkeypatch.setattr(module, "load_models", lambda *a: models)
    monkeypatch.setenv("COLUMNS", "160")
    return module


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "maths.jsonl"
    path.write_text("\n".join(json.dumps({"question": f"{i} + 1?"}) for i in range(8)), encoding="utf-8")
    return path


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    path = tmp_path / "base"
    adapted_drafter(vocab_size=len(SPECIAL_TOKENS) + 256).save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("quick_start", ["Why?", "--max-new-tokens", "12"], "tokens per verification"),
        ("chat", ["--say", "One.", "--say", "Two.", "--max-new-tokens", "8"], "you: Two."),
        ("batch", ["--question", "Short?", "--question", "A longer one?", "--max-new-tokens", "8"], "A longer one?"),
        ("sampling", ["Why?", "--answers", "2", "--max-new-tokens", "8"], "sample: tau"),
    ],
)
def test_generating(
    name: str,
    arguments: list[str],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    load_example(name, monkeypatch).main(arguments)
    assert expected in capsys.readouterr().out


def test_training_from_scratch(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = load_example("train_from_scratch", monkeypatch)
    budgets = ["--max-new-tokens", "8", "--steps", "3", "--layers", "1", "--block-size", "4"]
    example.main(["--out", str(tmp_path / "run"), "--prompts", str(prompts), "--count", "8", *budgets])
    shown = capsys.readouterr().out
    assert shown.index("$ adaflash trajectories") < shown.index("$ adaflash train") < shown.index("$ adaflash inspect")
    drafter = DFlashDrafterModel.from_pretrained(tmp_path / "run" / "drafter")
    assert drafter.config.num_hidden_layers == 1 and drafter.length_head is not None


def test_adapting_with_lora_and_then_a_head(
    prompts: Path, drafter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    budgets = ["--max-new-tokens", "8", "--steps", "3", "--drafter", str(drafter)]
    lora = load_example("lora_adaptation", monkeypatch)
    arguments = ["--out", str(tmp_path / "lora"), "--prompts", str(prompts), "--held-out", "2", "--rank", "2"]
    assert lora.main([*arguments, *budgets]) == 0
    assert "held-out tau:" in capsys.readouterr().out
    assert (tmp_path / "lora" / "drafter" / "adapter" / "adapter_config.json").is_file()
    head = load_example("length_head_only", monkeypatch)
    made = ["--trajectories", str(tmp_path / "lora" / "trajectories"), "--count", "8"]
    assert head.main(["--out", str(tmp_path / "head"), *made, *budgets]) == 0
    assert "use it with length_policy='length_head'" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name", ["measure_speedup", "check_lossless", "check_engine_lossless", "compare_loop_overhead"]
)
def test_mistakes_are_told_in_a_line_before_models_are_loaded(
    name: str, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loading, "load_models", None)
    mistakes = [(["--prompts", "gone.jsonl"], "gone.jsonl"), (["--prompts", str(prompts), "--limit", "-1"], "--limit")]
    if name == "measure_speedup":
        mistakes.append((["--prompts", str(prompts), "--out", str(prompts / "out.json")], "writing failed"))
    for arguments, message in mistakes:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        assert ended.value.code == 2
        assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    "arguments",
    [
        ["quick_start"],
        ["chat", "--say", "One."],
        ["batch"],
        ["sampling"],
        ["engine_streaming"],
        ["export_and_serve", "--out", "out"],
        ["length_head_only", "--out", "out"],
        ["lora_adaptation", "--out", "out", "--prompts", "prompts.jsonl"],
        ["push_to_hub", "org/mine"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_missing_drafter_is_told_in_a_line(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(embedded_target, "load_target", None)
    monkeypatch.setattr(loading, "load_target", None)
    monkeypatch.setattr(sys, "argv", [*arguments, "--drafter", "./gone"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / f"{arguments[0]}.py"), run_name="__main__")
    assert ended.value.code == 2
    assert "`--drafter` is './gone' and cannot be loaded" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("write_code_prompts", {"--tasks": "gone.jsonl", "--out": "stubs"}, "--tasks cannot be read"),
        ("write_code_prompts", {"--tasks": "broken", "--out": "stubs"}, "--tasks cannot be read"),
        ("write_code_prompts", {"--tasks": "numbers", "--out": "stubs"}, "each record must be a JSON object"),
        ("write_code_prompts", {"--tasks": "tasks", "--out": "tasks/stubs"}, "--out cannot be written"),
        ("write_chat_prompts", {"--out": "tasks/chat"}, "--out cannot be written"),
        ("write_maths_prompts", {"--questions": "gone.jsonl", "--out": "new"}, "--questions cannot be read"),
        ("write_maths_prompts", {"--questions": "tasks", "--out": "new"}, "0 questions have numbers"),
    ],
)
def test_files_that_cannot_be_read_or_written_are_told_in_a_line(
    name: str,
    options: dict[str, str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "tasks").write_text('{"text": "Print it."}\n', encoding="utf-8")
    (tmp_path / "broken").write_text("{", encoding="utf-8")
    (tmp_path / "numbers").write_text("[1, 2]", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, *(word for option in options.items() for word in option)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert ended.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_comparing_loops(prompts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    example = load_example("compare_loop_overhead", monkeypatch)
    assert example.main(["--prompts", str(prompts), "--limit", "2", "--max-new-tokens", "8"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["prompts"] == 2
    assert found["adaflash_ms_per_round"] > 0 and found["transformers_ms_per_round"] > 0


def test_exporting(
    drafter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "target"
    make_target().save_pretrained(target)
    example = load_example("export_and_serve", monkeypatch)
    places = ["--target", str(target), "--drafter", str(drafter)]
    assert example.main(["--out", str(tmp_path / "out"), "--to", "vllm", *places]) == 0
    shown = capsys.readouterr().out
    assert "vllm serve" in shown and (tmp_path / "out" / "vllm" / "model.safetensors").is_file()


def test_pushing(
    drafter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with running_hub() as hub:
        hub.serve_this_process(monkeypatch, tmp_path / "cache")
        load_example("push_to_hub", monkeypatch).main(["org/mine", "--drafter", str(drafter)])
        assert b"AdaFlash drafter for" in hub.repositories["org/mine"]["README.md"]
    assert "the same drafter came back" in capsys.readouterr().out


def test_pushing_where_no_hub_can_be_reached(
    drafter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    closed = HubServer()
    closed.server_close()
    closed.serve_this_process(monkeypatch, tmp_path / "cache")
    monkeypatch.setattr(sys, "argv", ["push_to_hub", "org/mine", "--drafter", str(drafter)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / "push_to_hub.py"), run_name="__main__")
    assert ended.value.code == 2
    assert f"See that {closed.endpoint} can be reached" in capsys.readouterr().err.splitlines()[-1]


def test_chat_prompts_are_varied_whole_and_the_same_each_time(tmp_path, monkeypatch):
    for name in ("a", "b"):
        command = ["write_chat_prompts.py", "--out", str(tmp_path / name), "--count", "300"]
        monkeypatch.setattr(sys, "argv", command)
        runpy.run_path(str(EXAMPLES / command[0]), run_name="__main__")
    text = (tmp_path / "a").read_text(encoding="utf-8")
    prompts = [json.loads(line)["prompt"] for line in text.splitlines()]
    assert text == (tmp_path / "b").read_text(encoding="utf-8")
    assert len(set(prompts)) == 300
    assert all("{}" not in prompt and "\n" not in prompt and "  " not in prompt for prompt in prompts)


def test_a_solved_task_becomes_a_stub_that_is_asked_as_humaneval_is(tmp_path, monkeypatch):
    records = [
        {
            "text": "Write a function to add two\nnumbers.",
            "code": "import math\r\ndef helper(x):\r\n    return x\r\ndef add(a, b=1):\r\n    return helper(a) + b",
            "test_list": ["assert add(1, 2) == 3", "assert add([1])", "assert 'no end"],
        },
        {"instruction": "Say it in JavaScript.", "output": "console.log('it');"},
        {"instruction": "Print it.", "output": "print('it')"},
    ]
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    as_list = tmp_path / "tasks.json"
    as_list.write_text(json.dumps(records), encoding="utf-8")
    command = [
        "write_code_prompts.py",
        "--out",
        str(tmp_path / "stubs"),
        "--tasks",
        str(tasks),
        "--tasks",
        str(as_list),
    ]
    monkeypatch.setattr(sys, "argv", command)
    runpy.run_path(str(EXAMPLES / command[0]), run_name="__main__")
    (line,) = (tmp_path / "stubs").read_text(encoding="utf-8").splitlines()
    (asked,) = read_prompt_file(tmp_path / "stubs", "code")
    assert json.loads(line)["prompt"] == asked.messages[0][1]
    stub = (
        "import math\n\n\ndef add(a, b=1):\n"
        '    """ Write a function to add two numbers.\n    >>> add(1, 2)\n    3\n    """'
    )
    tests = tmp_path / "humaneval.jsonl"
    tests.write_text(json.dumps({"prompt": stub + "\n"}) + "\n", encoding="utf-8")
    assert asked.messages == load_workload("humaneval", tmp_path).prompts[0].messages


def test_a_question_is_asked_with_other_numbers(tmp_path, monkeypatch):
    asked = ["Of 12 eggs, 3 break; 12 - 3 = ?", "Who is she?", "It cost $40.50."]
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps({"question": text}) + "\n" for text in asked), encoding="utf-8")
    made = []
    for seed in ("0", "0", "1"):
        command = ["write_maths_prompts.py", "--questions", str(questions), "--out", str(tmp_path / "new")]
        monkeypatch.setattr(sys, "argv", [*command, "--count", "2", "--seed", seed])
        runpy.run_path(str(EXAMPLES / command[0]), run_name="__main__")
        made.append([prompt.messages[-1][1] for prompt in read_prompt_file(tmp_path / "new", "maths")])
    assert made[0] == made[1] != made[2]
    for prompts in made:
        cost, eggs = sorted(prompts, key=len)
        found = re.fullmatch(r"Of ([1-9]\d) eggs, ([1-9]) break; (\d+) - (\d+) = \?", eggs)
        assert found is not None and found.group(1, 2) == found.group(3, 4) and eggs not in asked
        assert re.fullmatch(r"It cost \$[1-9]\d\.[1-9]\d\.", cost)
