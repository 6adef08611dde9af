from __future__ import annotations

import json

import pytest
import torch
from stand_ins import SPECIAL_TOKENS, byte_tokenizer
from tiny_models import tiny_target

from adaflash_hf.errors import InvalidInputError
from adaflash_hf.training import prompt_synthesis
from adaflash_hf.training.batched_decoding import DecodedResponse
from adaflash_hf.training.prompt_synthesis import SynthesisSettings, find_user_turn, synthesize_prompts
from adaflash_hf.training.prompts import read_prompt_file


EOS = 2
CHATML = (
    "{% if messages[0]['role'] != 'system' %}<mask>system\nBe kind.</s>\n{% endif %}"
    "{% for message in messages %}{{ '<mask>' + message['role'] + '\n' + message['content'] + '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<mask>assistant\n{% endif %}"
)


def make_target(eos=EOS):
    target = tiny_target("llama", vocab_size=len(SPECIAL_TOKENS) + 256)
    target.generation_config.eos_token_id = eos
    return target


def chat_tokenizer():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHATML
    return tokenizer


def prompts_in(path):
    return [json.loads(line)["prompt"] for line in path.read_text(encoding="utf-8").splitlines()]


def scripted(monkeypatch, tokenizer, *batches):
    """Replaces the target's sampling by the given texts; `...` at the end stands for a turn without an end."""
    seen, script = [], list(batches)

    def decode_batch(target, prompt_ids, settings, generator):
        seen.append([tokenizer.decode(ids) for ids in prompt_ids])
        texts = script.pop(0) if len(script) > 1 else script[0]
        responses = []
        for text in texts:
            ids = tokenizer(text.removesuffix("..."))["input_ids"]
            finished = not text.endswith("...")
            responses.append(DecodedResponse(torch.tensor([*ids, EOS] if finished else ids), finished))
        return responses

    monkeypatch.setattr(prompt_synthesis, "decode_batch", decode_batch)
    return seen


def test_the_turn_begins_after_the_default_system_prompt_and_ends_with_its_special_token():
    tokenizer = chat_tokenizer()
    turn = find_user_turn(make_target(eos=[7, 9]), tokenizer)
    assert turn.beginning == "<mask>system\nBe kind.</s>\n<mask>user\n"
    assert turn.end_token_ids == (EOS, 7, 9)
    # A template that puts nothing special after the user's words leaves the target's own ends.
    assert find_user_turn(make_target(eos=[7, 9]), byte_tokenizer()).end_token_ids == (EOS, 7, 9)


def test_only_usable_turns_are_kept(monkeypatch, tmp_path):
    tokenizer = chat_tokenizer()
    batches = [
        ["How far is the moon? ", "too short", "How far is the moon?", "It never ends at all..."],
        ["Say </s> to me, my friend", "What is <|im_start|> for?", " Name three rivers.\n", "Why is the sea salty?"],
    ]
    seen = scripted(monkeypatch, tokenizer, *batches)
    path = tmp_path / "new" / "prompts.jsonl"
    report = synthesize_prompts(make_target(), tokenizer, path, SynthesisSettings(3, "chat", batch_size=4))
    assert prompts_in(path) == ["How far is the moon?", "Name three rivers.", "Why is the sea salty?"]
    assert report.held == 3 and report.drawn == 8
    assert report.dropped == {"too short": 1, "duplicate": 1, "unfinished": 1, "special tokens": 2}
    assert set(seen[0]) == {"<mask>system\nBe kind.</s>\n<mask>user\n"}
    assert [prompt.domain for prompt in read_prompt_file(path)] == ["chat"] * 3


def test_prefixes_take_turns_and_a_space_at_their_end_is_left_to_the_target(monkeypatch, tmp_path):
    tokenizer = chat_tokenizer()
    texts = [" add(a, b) of two", " is the sky so blue?", "ine a good function", " is the grass green?"]
    seen = scripted(monkeypatch, tokenizer, texts)
    settings = SynthesisSettings(3, "code", prefixes=("def ", "Why"), batch_size=4)
    report = synthesize_prompts(make_target(), tokenizer, tmp_path / "p.jsonl", settings)
    assert [text.rpartition("\n")[2] for text in seen[0]] == ["def", "Why", "def", "Why"]
    assert prompts_in(tmp_path / "p.jsonl") == [
        "def add(a, b) of two",
        "Why is the sky so blue?",
        "Why is the grass green?",
    ]
    assert report.dropped == {"other beginnings": 1}


class Stop(Exception):
    pass


def test_a_run_that_was_stopped_ends_with_the_same_file(tmp_path):
    # One in 24 bytes ends a turn.
    target, tokenizer = make_target(eos=list(range(4, 260, 24))), byte_tokenizer()
    settings = SynthesisSettings(6, "chat", temperature=2.0, max_new_tokens=60, batch_size=8, seed=3)
    whole, stopped, torn = (tmp_path / name for name in ("whole", "stopped", "torn"))
    synthesize_prompts(target, tokenizer, whole, settings)
    assert len(prompts_in(whole)) == len(set(prompts_in(whole))) == 6

    def stop_half_way(report):
        if report.held >= 2:
            raise Stop

    with pytest.raises(Stop):
        synthesize_prompts(target, tokenizer, stopped, settings, stop_half_way)
    assert 2 <= len(prompts_in(stopped)) < 6
    torn.write_bytes(stopped.read_bytes() + b'{"prompt": "cut o')
    for path in (stopped, torn):
        synthesize_prompts(target, tokenizer, path, settings)
        assert path.read_bytes() == whole.read_bytes()
    # Enough is enough; another domain is counted apart.
    assert synthesize_prompts(target, tokenizer, whole, settings).drawn == 0
    other = SynthesisSettings(2, "other", temperature=2.0, max_new_tokens=60, batch_size=8, seed=4)
    assert synthesize_prompts(target, tokenizer, whole, other).held == 2 and len(prompts_in(whole)) == 8


def test_a_file_with_line_separators_in_a_prompt_is_gone_on_with(monkeypatch, tmp_path):
    tokenizer, path = chat_tokenizer(), tmp_path / "p.jsonl"
    scripted(monkeypatch, tokenizer, ["One line\u2028and another one"], ["Something else that is new"])
    for count in (1, 2):
        report = synthesize_prompts(make_target(), tokenizer, path, SynthesisSettings(count, "chat", batch_size=1))
        assert report.held == count
    assert read_prompt_file(path)[0].messages[0][1] == "One line\u2028and another one"


def test_targets_that_cannot_are_told_apart(monkeypatch, tmp_path):
    tokenizer, path = chat_tokenizer(), tmp_path / "p.jsonl"
    with pytest.raises(InvalidInputError, match="no chat template"):
        synthesize_prompts(make_target(), byte_tokenizer(chat=False), path, SynthesisSettings(1, "chat"))
    deaf = chat_tokenizer()
    deaf.chat_template = "<mask>user\nHello"
    with pytest.raises(InvalidInputError, match="does not repeat"):
        synthesize_prompts(make_target(), deaf, path, SynthesisSettings(1, "chat"))
    with pytest.raises(InvalidInputError, match="turns do not end within `max_new_tokens` = 5"):
        synthesize_prompts(
            make_target(), tokenizer, path, SynthesisSettings(1, "chat", max_new_tokens=5, batch_size=2)
        )
    scripted(monkeypatch, tokenizer, ["Always the very same words"])
    with pytest.raises(InvalidInputError, match="nothing new.*holds 1 of"):
        synthesize_prompts(make_target(), tokenizer, path, SynthesisSettings(2, "chat", batch_size=1))


def test_bad_input_is_refused(tmp_path):
    for fields in (
        {"count": 0},
        {"temperature": 0.0},
        {"temperature": float("nan")},
        {"batch_size": 0},
        {"domain": ""},
        {"prefixes": ()},
    ):
        with pytest.raises(InvalidInputError, match=next(iter(fields))):
            SynthesisSettings(**{"count": 1, "domain": "chat", **fields})
    path = tmp_path / "other.jsonl"
    path.write_text('{"question": "not ours"}\n')
    with pytest.raises(InvalidInputError, match="line 1"):
        synthesize_prompts(make_target(), chat_tokenizer(), path, SynthesisSettings(1, "chat"))
    assert path.read_text() == '{"question": "not ours"}\n'
