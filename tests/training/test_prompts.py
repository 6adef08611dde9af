from __future__ import annotations

import json

import pytest
from stand_ins import byte_tokenizer

from adaflash_hf.errors import InvalidInputError
from adaflash_hf.training.prompts import Prompt, encode_prompts, read_prompt_file


def written(tmp_path, *records, name="file.jsonl"):
    path = tmp_path / name
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"question": "How many?", "answer": "5"}, "How many?"),
        ({"instruction": "Add", "input": "1, 2", "output": "3"}, "Add\n1, 2"),
        ({"instruction": "Sing", "input": ""}, "Sing"),
        ({"id": "seed_0", "instruction": "Sum", "instances": [{"input": "1", "output": "1"}]}, "Sum\n1"),
        ({"text": "Write a function", "code": "def f(): ..."}, "Write a function"),
        ({"task_id": "HumanEval/0", "prompt": "def f():"}, "def f():"),
        ({"turns": ["First", "Second"]}, "First"),
        ({"prompt": [{"role": "user", "content": "Hello"}]}, "Hello"),
        ({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]}, "Hi"),
        ({"conversations": [{"from": "human", "value": "Hey"}, {"from": "gpt", "value": "Yes?"}]}, "Hey"),
    ],
)
def test_fields_of_public_data_sets(tmp_path, record, expected):
    (prompt,) = read_prompt_file(written(tmp_path, record))
    assert prompt == Prompt((("user", expected),), "file")


def test_a_conversation_is_kept_up_to_its_last_user(tmp_path):
    roles = ["system", "user", "assistant", "user", "assistant"]
    record = {"messages": [{"role": role, "content": f"{i}"} for i, role in enumerate(roles)]}
    (prompt,) = read_prompt_file(written(tmp_path, record))
    assert prompt.messages == (("system", "0"), ("user", "1"), ("assistant", "2"), ("user", "3"))


def test_arrays_and_domains(tmp_path):
    path = tmp_path / "mixed.json"
    path.write_text(json.dumps([{"text": "a", "domain": "code"}, {"text": "b"}]), encoding="utf-8")
    assert [prompt.domain for prompt in read_prompt_file(path)] == ["code", "mixed"]
    assert [prompt.domain for prompt in read_prompt_file(path, "chat")] == ["chat", "chat"]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "no record"),
        ("{not json", "cannot be read"),
        ('{"answer": "5"}', "line 1 of .*'answer'"),
        ("3", "int"),
        ('{"messages": ["hello"]}', "unexpected form"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "no text of the user"),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path, text, match):
    path = tmp_path / "bad.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InvalidInputError, match=match):
        read_prompt_file(path)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(InvalidInputError, match=r"gone\.jsonl"):
        read_prompt_file(tmp_path / "gone.jsonl")


def test_prompts_go_through_the_chat_template_if_there_is_one():
    prompts = [Prompt((("system", "S"), ("user", text)), "d") for text in ("one", "two")] * 200
    tokenizer = byte_tokenizer()
    encoded = encode_prompts(tokenizer, prompts)
    assert len(encoded) == 400
    assert tokenizer.decode(encoded[1]) == "<|system|>S<|user|>two<|assistant|>"
    plain = byte_tokenizer(chat=False)
    assert plain.decode(encode_prompts(plain, prompts)[0]) == "S\n\none"
