"""Prompts of the shipped and of the user's workloads."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import pytest
from hub_server import running_hub

from adaflash_hf import InvalidInputError
from adaflash_hf.evaluation.workloads import WORKLOADS, describe_workloads, load_workload
from adaflash_hf.training import prompt_datasets
from adaflash_hf.training.prompt_datasets import DatasetPrompts, PromptDataset
from adaflash_hf.training.prompts import Prompt


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


def test_names_of_data_sets_on_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each is asked for by id, split and field when it is named, and of a training set only a part."""
    asked: dict[str, tuple[PromptDataset, int | None]] = {}

    def read(source: PromptDataset, limit: int | None = None) -> DatasetPrompts:
        asked[source.name] = (source, limit)
        return DatasetPrompts([Prompt((("user", f"from {source.name}"),), source.domain or "")], 0)

    monkeypatch.setattr(prompt_datasets, "read_prompt_dataset", read)
    for name in set(WORKLOADS) - {"gsm8k", "humaneval", "vicuna", "blend"}:
        workload = load_workload(name)
        assert workload.name == name and workload.prompts[0].domain in ("maths", "code", "chat")
    assert asked["HuggingFaceH4/MATH-500"][0].column == "problem" and asked["HuggingFaceH4/MATH-500"][1] is None
    assert asked["allenai/math_qa"][0].revision == "refs/convert/parquet"
    assert asked["nvidia/OpenCodeInstruct"][1] == asked["Aeala/ShareGPT_Vicuna_unfiltered"][1] == 256
    assert load_workload("org/sums:test:sum").name == "sums"
    assert asked["org/sums"] == (PromptDataset("org/sums", "test", column="sum"), 256)
    # A file of a directory goes before the Hub.
    (tmp_path / "mbpp.jsonl").write_text(json.dumps({"text": "Write f."}))
    assert load_workload("mbpp", tmp_path).prompts[0].messages == (("user", "Write f."),)
    assert {name for name, _ in describe_workloads()} >= set(WORKLOADS)


def test_a_data_set_from_a_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets-cache")
    with running_hub() as hub:
        hub.serve_this_process(monkeypatch, tmp_path / "cache")
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub.endpoint)
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
        lines = [json.dumps({"problem": f"{n}?", "answer": "no"}) for n in range(3)]
        hub.repositories["datasets/HuggingFaceH4/MATH-500"] = {"test.jsonl": "\n".join(lines).encode()}
        workload = load_workload("math500")
    assert [prompt.messages[0][1] for prompt in workload.prompts] == ["0?", "1?", "2?"]


def test_own_file_and_repetition(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(json.dumps({"text": text, "domain": "x"}) for text in "abc"))
    workload = load_workload(str(path))
    assert workload.name == "mine"
    assert [prompt.messages[0][1] for prompt in workload.take(5)] == ["a", "b", "c", "a", "b"]
    with pytest.raises(InvalidInputError, match="neither one of gsm8k"):
        load_workload("humanevil")
