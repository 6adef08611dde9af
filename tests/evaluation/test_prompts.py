from __future__ import annotations

import pytest
from stand_ins import byte_tokenizer

from adaflash_hf.errors import InvalidInputError
from adaflash_hf.evaluation.prompts import encode_prompt, load_demo_prompts


def test_the_shipped_prompts_are_two_of_each_domain():
    prompts = load_demo_prompts()
    assert [prompt.domain for prompt in prompts] == ["maths", "maths", "code", "code", "chat", "chat"]
    assert len({prompt.source for prompt in prompts}) == 6
    assert all(prompt.text == prompt.text.strip() != "" for prompt in prompts)


def test_chat_template_is_used_when_there_is_one():
    tokenizer = byte_tokenizer()
    inputs = encode_prompt(tokenizer, "hello")
    assert tokenizer.decode(inputs["input_ids"][0]) == "<|user|>hello<|assistant|>"
    assert inputs["attention_mask"].shape == inputs["input_ids"].shape
    assert set(inputs) == {"input_ids", "attention_mask"}


def test_system_message_goes_first():
    tokenizer = byte_tokenizer()
    inputs = encode_prompt(tokenizer, "hello", system="be brief")
    assert tokenizer.decode(inputs["input_ids"][0]) == "<|system|>be brief<|user|>hello<|assistant|>"


@pytest.mark.parametrize(("has_template", "chat"), [(True, False), (False, None), (False, False)])
def test_raw_text_without_template(has_template, chat):
    tokenizer = byte_tokenizer(chat=has_template)
    inputs = encode_prompt(tokenizer, "hello", chat=chat)
    assert tokenizer.decode(inputs["input_ids"][0]) == "hello"


def test_chat_needs_a_template():
    with pytest.raises(InvalidInputError, match="no chat template"):
        encode_prompt(byte_tokenizer(chat=False), "hello", chat=True)


def test_system_message_needs_chat():
    with pytest.raises(InvalidInputError, match="`system` is 'be brief'"):
        encode_prompt(byte_tokenizer(), "hello", chat=False, system="be brief")


def test_a_prompt_without_tokens_is_refused():
    with pytest.raises(InvalidInputError, match="gives no token"):
        encode_prompt(byte_tokenizer(chat=False), "")
