"""The drafter in `checkpoints/` on its real target: a sound file, the target's own tokens, useful drafts."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModel

from adaflash_hf.cli import main
from adaflash_hf.embedded_target import load_target
from adaflash_hf.evaluation.prompts import encode_prompt, load_demo_prompts


ROOT = Path(__file__).resolve().parents[1]
CHECKPOINT = ROOT / "checkpoints" / "adaflash-drafter-smollm2-135m"
NEW_TOKENS = 40


@pytest.fixture(scope="module")
def models():
    target, tokenizer = load_target("smollm2-135m", dtype="float32")
    return target, tokenizer, AutoModel.from_pretrained(CHECKPOINT, dtype=torch.float32)


def test_file_is_small_bfloat16_safetensors():
    weights = CHECKPOINT / "model.safetensors"
    assert weights.stat().st_size <= 45_000_000
    with safe_open(weights, framework="pt") as tensors:
        dtypes = {tensors.get_slice(name).get_dtype() for name in tensors.keys() if name != "draft_token_ids"}
        assert all(tensors.get_tensor(name).isfinite().all() for name in tensors.keys())
    assert dtypes == {"BF16"}


def test_config_says_what_it_was_trained_for():
    config = json.loads((CHECKPOINT / "config.json").read_text())
    assert config["target_model_name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert config["num_target_layers"] == 30
    assert config["length_head_config"] is not None


def test_the_card_is_what_make_cards_writes(tmp_path, monkeypatch, capsys):
    """Of the results that are committed; after new ones or other notes, run `make cards`."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", "")
    [line] = re.findall(r"adaflash (card .*)", makefile)
    command = shlex.split(line)
    place = tmp_path / CHECKPOINT.name
    shutil.copytree(CHECKPOINT, place, ignore=shutil.ignore_patterns("*.safetensors"))
    monkeypatch.chdir(ROOT)
    assert command[1] == str(CHECKPOINT.relative_to(ROOT))
    assert main([command[0], str(place), *command[2:]]) == 0, capsys.readouterr().err
    assert (place / "README.md").read_bytes() == (CHECKPOINT / "README.md").read_bytes()


@pytest.mark.slow
def test_greedy_tokens_are_the_targets_own_and_drafts_are_accepted(models):
    target, tokenizer, drafter = models
    prompts = [prompt.text for prompt in load_demo_prompts() if prompt.domain == "maths"][:1]
    prompts.append("Write a Python function that returns the larger of two numbers.")
    encoded = [encode_prompt(tokenizer, text)["input_ids"][0] for text in prompts]
    longest = max(map(len, encoded))
    input_ids = torch.full((2, longest), tokenizer.pad_token_id)
    for row, ids in enumerate(encoded):
        input_ids[row, longest - len(ids) :] = ids
    columns = torch.arange(longest)
    mask = torch.stack([(columns >= longest - len(ids)).long() for ids in encoded])
    settings = {"attention_mask": mask, "max_new_tokens": NEW_TOKENS, "do_sample": False}
    expected = target.generate(input_ids, **settings)
    for length_policy in ("fixed", "length_head"):
        actual = target.generate(input_ids, **settings, assistant_model=drafter, length_policy=length_policy)
        assert torch.equal(actual, expected)
        # A drafter that did not fit its target would have nothing accepted: 1.0.
        assert drafter.last_generation_stats.acceptance_length > 1.4
