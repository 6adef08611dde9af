from __future__ import annotations

import io
import sys

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hub_server import running_hub

from adaflash_hf.errors import InvalidInputError, MissingDependencyError
from adaflash_hf.training import prompt_datasets
from adaflash_hf.training.prompt_datasets import PromptDataset, read_prompt_dataset


CHAT = [
    {"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello?"}], "domain": "chat"},
    {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}], "domain": ""},
    {"messages": [{"role": "assistant", "content": "Nobody asked."}], "domain": "chat"},
]


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets-cache")
    datasets.disable_progress_bars()


def contents(found):
    return [prompt.messages[-1][1] for prompt in found.prompts]


def test_a_saved_dataset_with_messages(tmp_path):
    datasets.Dataset.from_list(CHAT).save_to_disk(tmp_path / "chats")
    found = read_prompt_dataset(PromptDataset(str(tmp_path / "chats")))
    assert [prompt.messages for prompt in found.prompts] == [
        (("system", "Be kind."), ("user", "Hello?")),
        (("user", "Why?"),),
    ]
    assert [prompt.domain for prompt in found.prompts] == ["chat", "chats"] and found.skipped == 1
    datasets.DatasetDict({"test": datasets.Dataset.from_list(CHAT)}).save_to_disk(tmp_path / "splits")
    assert len(read_prompt_dataset(PromptDataset(str(tmp_path / "splits"), split="test")).prompts) == 2
    with pytest.raises(InvalidInputError, match="split 'train'.*cannot be read"):
        read_prompt_dataset(PromptDataset(str(tmp_path / "splits")))


def test_files_and_columns_of_any_name(tmp_path):
    table = pa.table(
        {
            "talk": [[{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Hi."}]],
            "asked": [["First?", "Second?"]],
            "question": ["Third?"],
        }
    )
    folder = tmp_path / "folder"
    folder.mkdir()
    path = str(folder / "questions.parquet")
    pq.write_table(table, path)
    by_column = {
        column: contents(read_prompt_dataset(PromptDataset(path, column=column)))
        for column in (None, "talk", "asked", "question")
    }
    assert by_column == {None: ["Third?"], "talk": ["Hi?"], "asked": ["First?"], "question": ["Third?"]}
    assert read_prompt_dataset(PromptDataset(path)).prompts[0].domain == "questions"
    assert read_prompt_dataset(PromptDataset(path, domain="math")).prompts[0].domain == "math"
    # A directory of files is read as `datasets` reads it.
    assert contents(read_prompt_dataset(PromptDataset(str(folder)))) == ["Third?"]
    with pytest.raises(InvalidInputError, match="`column` is 'ask'.*talk, asked, question"):
        read_prompt_dataset(PromptDataset(path, column="ask"))


def test_a_limit_draws_at_random_and_repeatably(tmp_path):
    datasets.Dataset.from_dict({"text": [f"Question {i}?" for i in range(50)]}).save_to_disk(tmp_path / "many")
    source = PromptDataset(str(tmp_path / "many"))
    first, again, other = (contents(read_prompt_dataset(source, 5, seed)) for seed in (1, 1, 2))
    assert len(set(first)) == 5 and first == again != other
    assert first != [f"Question {i}?" for i in range(5)]


def test_a_hub_dataset_is_downloaded_or_streamed(tmp_path, monkeypatch):
    buffer = io.BytesIO()
    pq.write_table(pa.table({"question": [f"{i} + {i}?" for i in range(20)], "answer": ["?"] * 20}), buffer)
    with running_hub() as hub:
        hub.serve_this_process(monkeypatch, tmp_path / "cache")
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub.endpoint)
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
        hub.repositories["datasets/org/sums"] = {"data/train-00000-of-00001.parquet": buffer.getvalue()}
        streamed = read_prompt_dataset(PromptDataset("org/sums"), limit=3)
        assert not list(tmp_path.rglob("*.arrow")), "streaming keeps nothing"
        assert len(set(contents(streamed))) == 3 and streamed.prompts[0].domain == "sums"
        whole = read_prompt_dataset(PromptDataset("org/sums", column="question"))
        assert contents(whole) == [f"{i} + {i}?" for i in range(20)] and list(tmp_path.rglob("*.arrow"))
        for source in (PromptDataset("org/nothing"), PromptDataset("org/sums", split="test")):
            with pytest.raises(InvalidInputError, match=f"`dataset` is '{source.name}'.*cannot be read"):
                read_prompt_dataset(source)


def test_what_holds_no_prompts_is_refused(tmp_path, monkeypatch):
    datasets.Dataset.from_dict({"number": [1, 2]}).save_to_disk(tmp_path / "numbers")
    with pytest.raises(InvalidInputError, match="none of its records holds a prompt.*number"):
        read_prompt_dataset(PromptDataset(str(tmp_path / "numbers")))
    (tmp_path / "prompts.docx").write_text("Hello?")
    with pytest.raises(InvalidInputError, match=r"\.parquet"):
        read_prompt_dataset(PromptDataset(str(tmp_path / "prompts.docx")))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingDependencyError, match=r"adaflash-hf\[train\]"):
        prompt_datasets.read_prompt_dataset(PromptDataset("org/data"))
