from __future__ import annotations

import json

import pytest
import torch
from stand_ins import byte_target, load_byte_target
from tiny_trajectories import byte_trajectories, run_train

from adaflash_hf import DFlashDrafterModel
from adaflash_hf.cli import main
from adaflash_hf.commands.train_lora import LoraOptions, lora_options
from adaflash_hf.errors import InvalidInputError
from adaflash_hf.training.lora import LORA_TARGET_MODULES, is_adapted, load_lora, merge_lora


@pytest.fixture(autouse=True)
def tiny_targets(monkeypatch):
    load_byte_target(monkeypatch)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return byte_trajectories(tmp_path_factory.mktemp("trajectories"))


def run(directory, out, *extra):
    return run_train(directory, out, *extra, steps=4)


def test_an_adapter_is_trained_saved_loaded_and_merged(directory, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(directory, "base", "--layers", 2, "--block-size", 4) == 0
    assert run(directory, "tuned", "--init", "base", "--lora-rank", 2, "--lora-target-modules", "fc,q_proj") == 0
    shown = " ".join(capsys.readouterr().out.split())
    for expected in ("lora_rank", "twice the rank", "attention", "its adapter in tuned/adapter"):
        assert expected in shown

    # It names its base by a place that is the same from any directory.
    monkeypatch.chdir(directory)
    adapted = load_lora(tmp_path / "tuned" / "adapter", dtype=torch.float32)
    config = adapted.peft_config["default"]
    assert (config.r, config.lora_alpha, set(config.target_modules)) == (2, 4.0, {"fc", "q_proj"})
    assert any("lora_B" in name and tensor.abs().max() > 0 for name, tensor in adapted.named_parameters())
    merged = DFlashDrafterModel.from_pretrained(tmp_path / "tuned")
    assert is_adapted(adapted) and not is_adapted(merged)
    for name, tensor in merge_lora(adapted).state_dict().items():
        assert torch.equal(merged.state_dict()[name], tensor.to(torch.bfloat16))

    target = byte_target()
    prompts = torch.tensor([[40, 41, 42, 43], [44, 45, 46, 47]])
    plain = target.generate(prompts, do_sample=False, max_new_tokens=12)
    for drafter in (adapted, merge_lora(adapted), merged.float()):
        answer = target.generate(prompts, do_sample=False, max_new_tokens=12, assistant_model=drafter)
        assert torch.equal(answer, plain)

    settings = json.loads((tmp_path / "tuned" / "run.json").read_text())["settings"]
    assert settings["lora_target_modules"] == ["fc", "q_proj"] and settings["lora_alpha"] == 4.0
    card = (tmp_path / "tuned" / "README.md").read_text()
    assert "by an adapter of rank 2" in card and "| lora_alpha | 4.0 | twice the rank |" in card
    assert str(tmp_path) not in card

    # The configuration repeats it.
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--config", "tuned/train_config.yaml", "--out", "again"]) == 0
    first, second = load_lora("tuned/adapter").state_dict(), load_lora("again/adapter").state_dict()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())

    # A head that the base lacks is not smuggled in by an adapter.
    assert run(directory, "headless", "--layers", 2, "--block-size", 4, "--length-head", "none") == 0
    capsys.readouterr()
    assert run(directory, "refused", "--init", "headless", "--lora-rank", 2) == 2
    assert "has no length head" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "refused" / "run.json").exists()


def test_defaults_are_shown_with_their_reason():
    assert [tuple(decision) for decision in LoraOptions(8).decisions()] == [
        ("lora_rank", 8, "given"),
        ("lora_alpha", 16.0, "twice the rank"),
        ("lora_target_modules", list(LORA_TARGET_MODULES), "every matrix of the drafter"),
    ]
    given = LoraOptions(8, 3.0, ("fc",)).decisions()
    assert [(decision.value, decision.reason) for decision in given[1:]] == [(3.0, "given"), (["fc"], "given")]


@pytest.mark.parametrize(
    ("arguments", "start", "given", "message"),
    [
        ((4, None, None), "scratch", {}, "--init"),
        ((4, None, None), "length_head", {}, "--only"),
        ((4, None, None), "init", {"draft_vocabulary": True}, "--draft-vocabulary"),
        ((None, 8.0, None), "init", {}, "--lora-rank"),
        ((None, None, "fc"), "init", {}, "--lora-rank"),
    ],
)
def test_an_adapter_without_a_place_is_refused(arguments, start, given, message):
    with pytest.raises(InvalidInputError, match=message):
        lora_options(*arguments, start=start, given=given)


def test_without_the_options_there_is_none():
    assert lora_options(None, None, None, start="scratch", given={}) is None
    assert lora_options(2, None, "fc, q_proj", start="init", given={}) == LoraOptions(2, None, ("fc", "q_proj"))
