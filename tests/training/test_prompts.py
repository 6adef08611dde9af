from __future__ import annotations

import json

import pytest
from stand_ins import byte_tokenizer

from adaflash_hf.errors import InvalidInputError, OutputError
from adaflash_hf.training.prompts import Prompt, encode_prompts, read_prompt_file, write_prompt_file


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
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": part} for part in "ab"]}]}, "ab"),
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
        ("{not json", r"line 1 of .*bad\.jsonl is not JSON"),
        ('{"text": "a"}\n\n{"text": \n', r"line 3 of .*bad\.jsonl is not JSON \(Expecting value, column 10\)"),
        ('[{"text": "a"},\n', r"line 2 of .*bad\.jsonl is not JSON"),
        ('{"answer": "5"}', "line 1 of .*'answer'"),
        ("3", "int"),
        ('{"text": "a"}\n{"prompt": "", "id": 1}', r"`prompt` in line 2 of .* is empty \(''\)"),
        ('{"messages": ["hello"]}', "unexpected form"),
        ('{"prompt": "a"}\n{"prompt": 3}', "`prompt` in line 2 of .* has 3 where text is expected"),
        ('{"instruction": 3, "input": "a"}', "`instruction` in line 1 of .* has 3 where"),
        ('{"turns": [3]}', "`turns` in line 1 of .* has 3 where"),
        ('{"messages": [{"role": "user", "content": null}]}', "`messages` in line 1 of .* has None where"),
        (
            '{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}',
            "`messages` in line 1 of .* a part of the type 'image_url'",
        ),
        ('{"messages": [{"role": "user", "content": ["a"]}]}', "a part of the type 'str'"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "no text of the user"),
        ('{"prompt": "ab\\ud83d"}', r"`prompt` in line 1 of .* has half of a character at position 2 \('\\ud83d'"),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path, text, match):
    path = tmp_path / "bad.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InvalidInputError, match=match):
        read_prompt_file(path)


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85"])
def test_a_record_ends_with_its_line_and_not_at_separators_in_strings(tmp_path, separator):
    path = tmp_path / "file.jsonl"
    path.write_text(f'{{"text": "a{separator}b"}}\r\n{{"text": "c"}}', encoding="utf-8", newline="")
    assert [prompt.messages[0][1] for prompt in read_prompt_file(path)] == [f"a{separator}b", "c"]


@pytest.mark.parametrize("text", ['{"text": "a"}\n', '[{"text": "a"}]'])
def test_a_byte_order_mark_is_no_content(tmp_path, text):
    path = tmp_path / "file.jsonl"
    path.write_text(text, encoding="utf-8-sig")
    assert read_prompt_file(path) == [Prompt((("user", "a"),), "file")]


def test_what_is_no_text_file_is_told_as_such(tmp_path):
    with pytest.raises(InvalidInputError, match=r"gone\.jsonl', which is not there"):
        read_prompt_file(tmp_path / "gone.jsonl")
    with pytest.raises(InvalidInputError, match="which is a directory"):
        read_prompt_file(tmp_path)
    path = tmp_path / "file.jsonl"
    path.write_bytes(b'{"text": "\xff"}')
    with pytest.raises(InvalidInputError, match="not text in UTF-8"):
        read_prompt_file(path)


def test_prompts_go_through_the_chat_template_if_there_is_one():
    prompts = [Prompt((("system", "S"), ("user", text)), "d") for text in ("one", "two")] * 200
    tokenizer = byte_tokenizer()
    encoded = encode_prompts(tokenizer, prompts)
    assert len(encoded) == 400
    assert tokenizer.decode(encoded[1]) == "<|system|>S<|user|>two<|assistant|>"
    plain = byte_tokenizer(chat=False)
    assert plain.decode(encode_prompts(plain, prompts)[0]) == "S\n\none"


def test_a_written_file_is_read_back(tmp_path):
    path = tmp_path / "new" / "prompts.jsonl"
    write_prompt_file(path, ["Who?", "Two\nlines\u2028and more"])
    assert [prompt.messages for prompt in read_prompt_file(path, "x")] == [
        (("user", "Who?"),),
        (("user", "Two\nlines\u2028and more"),),
    ]
    with pytest.raises(OutputError, match="out"):
        write_prompt_file(path / "below", ["Who?"])
    assert [file.name for file in path.parent.iterdir()] == ["prompts.jsonl"]
