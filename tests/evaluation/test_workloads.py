"""Prompts of the shipped and of the user's workloads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from adaflash_hf import InvalidInputError
from adaflash_hf.evaluation.workloads import load_workload


@pytest.mark.parametrize(("name", "domain"), [("gsm8k", "maths"), ("humaneval", "code"), ("vicuna", "chat")])
def test_shipped(name: str, domain: str) -> None:
    workload = load_workload(name)
    assert len(workload.prompts) == 64
    assert {prompt.domain for prompt in workload.prompts} == {domain}
    assert len({prompt.messages for prompt in workload.prompts}) == 64


def test_blend_takes_turns() -> None:
    blend = load_workload("blend")
    assert [prompt.domain for prompt in blend.prompts[:4]] == ["maths", "code", "chat", "maths"]
    assert len(blend.prompts) == 192


def test_whole_files(tmp_path: Path) -> None:
    (tmp_path / "gsm8k_test.jsonl").write_text(json.dumps({"question": "1+1?", "answer": "2"}))
    (tmp_path / "humaneval.jsonl").write_text(json.dumps({"task_id": "HumanEval/0", "prompt": "def f():\n"}))
    (tmp_path / "vicuna_bench_question.jsonl").write_text(json.dumps({"turns": ["Hi", "Again"]}))
    (question,) = load_workload("gsm8k", tmp_path).prompts
    assert question.messages == (("user", "1+1?"),)
    (task,) = load_workload("humaneval", tmp_path).prompts
    assert task.messages == (("user", "Complete this Python function:\n\n```python\ndef f():\n```"),)
    assert [p.domain for p in load_workload("blend", tmp_path).prompts] == ["maths", "code", "chat"]
    # The shipped form of the same task is the same request.
    published = json.loads((tmp_path / "humaneval.jsonl").read_text())
    assert published["prompt"].strip() in task.messages[0][1]
    (tmp_path / "humaneval.jsonl").unlink()
    with pytest.raises(InvalidInputError, match="has no humaneval.jsonl"):
        load_workload("blend", tmp_path)


def test_own_file_and_repetition(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(json.dumps({"text": text, "domain": "x"}) for text in "abc"))
    workload = load_workload(str(path))
    assert workload.name == "mine"
    assert [prompt.messages[0][1] for prompt in workload.take(5)] == ["a", "b", "c", "a", "b"]
    with pytest.raises(InvalidInputError, match="neither one of gsm8k"):
        load_workload("humanevil")
