from __future__ import annotations

import io
from pathlib import Path

import peft
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from stand_ins import byte_tokenizer
from tiny_models import rounding_allowed, tiny_drafter, tiny_target

from adaflash_hf import ConfidenceHeadModel
from adaflash_hf.commands import loading
from adaflash_hf.commands.loading import check_checkpoint, find_baseline, find_drafter, load_drafter, load_models
from adaflash_hf.embedded_target import EMBEDDED_TARGET_NAME
from adaflash_hf.errors import DrafterCheckpointError, DrafterCompatibilityError, InvalidInputError
from adaflash_hf.generation.prepacking import PrepackedLinear, prepack_linear_layers
from adaflash_hf.training.initialization import new_confidence_head
from adaflash_hf.training.lora import add_lora


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=200)


def save_tiny_models(directory: Path) -> None:
    target = tiny_target("llama")
    target.save_pretrained(directory / "target")
    byte_tokenizer().save_pretrained(directory / "target")
    tiny_drafter(target).save_pretrained(directory / "drafter")


def test_the_given_drafter_is_taken():
    assert find_drafter("org/target", "org/drafter") == "org/drafter"


def test_another_target_needs_its_own_drafter():
    with pytest.raises(InvalidInputError, match="`--target` is 'org/target'.*--drafter"):
        find_drafter("org/target", None)


def test_the_default_drafter_is_in_the_source_checkout(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "_CHECKPOINTS_DIRECTORY", tmp_path)
    with pytest.raises(InvalidInputError, match="only in a source checkout.*pass --drafter"):
        find_drafter(EMBEDDED_TARGET_NAME, None)
    directory = tmp_path / "adaflash-drafter-smollm2-135m"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    assert find_drafter(EMBEDDED_TARGET_NAME, None) == str(directory)


def test_models_load_in_one_dtype(tmp_path, console):
    save_tiny_models(tmp_path)
    models = load_models(str(tmp_path / "target"), str(tmp_path / "drafter"), "bfloat16", "cpu", True, console)
    assert models.target_model.dtype == models.drafter.dtype == torch.bfloat16
    assert not models.target_model.training
    assert not models.drafter.training
    assert "Loading" in console.file.getvalue()


def test_a_missing_drafter_is_told_in_one_line(tmp_path):
    with pytest.raises(InvalidInputError) as caught:
        load_drafter(str(tmp_path / "nothing"), tiny_target("llama"))
    assert str(tmp_path / "nothing") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_drafter_in_the_target_s_place_is_told(tmp_path, console):
    save_tiny_models(tmp_path)
    target, drafter = str(tmp_path / "target"), str(tmp_path / "drafter")
    with pytest.raises(InvalidInputError, match=r"`target` is .*drafter' and cannot be loaded \(it is a drafter\)"):
        load_models(drafter, target, "float32", "cpu", False, console)


def test_the_drafter_is_looked_for_before_the_target_loads(monkeypatch, console):
    monkeypatch.setattr(loading, "load_target", lambda *args, **kwargs: pytest.fail("the target was loaded"))
    with pytest.raises(InvalidInputError):
        load_models("org/target", None, "auto", None, True, console)


@pytest.mark.parametrize("name", ["checkpoints/nope", "./nope", "~/nope", "/nope", "nope", "a/b/c"])
def test_a_missing_directory_is_told_before_the_target_loads(name, tmp_path, monkeypatch, console):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    monkeypatch.setattr(loading, "load_target", lambda *args, **kwargs: pytest.fail("the target was loaded"))
    with pytest.raises(InvalidInputError, match="no such directory here"):
        load_models("smollm2-135m", name, "auto", None, True, console)


def test_a_drafter_of_another_target_is_refused_before_that_is_loaded(tmp_path, monkeypatch, console):
    save_tiny_models(tmp_path)
    other = tiny_target("llama", hidden_size=64)
    other.save_pretrained(tmp_path / "other")
    (tmp_path / "other" / "model.safetensors").unlink()
    monkeypatch.setattr(loading, "load_target", lambda *args, **kwargs: pytest.fail("the target was loaded"))
    with pytest.raises(DrafterCompatibilityError, match="`target_hidden_size` = 32, the target's `hidden_size` is 64"):
        load_models(str(tmp_path / "other"), str(tmp_path / "drafter"), "auto", None, True, console)
    # An adapter of the other target has its base's configuration.
    peft.LoraConfig(base_model_name_or_path=str(tmp_path / "other")).save_pretrained(tmp_path / "adapter")
    with pytest.raises(DrafterCompatibilityError, match="the target's `hidden_size` is 64"):
        check_checkpoint(str(tmp_path / "drafter"), target=str(tmp_path / "adapter"))
    (tmp_path / "other" / "config.json").write_text("{}")  # for those who load it to refuse
    check_checkpoint(str(tmp_path / "drafter"), target=str(tmp_path / "other"))


def test_a_checkpoint_is_checked_without_its_weights(tmp_path, monkeypatch, console):
    """And before the target is loaded."""
    save_tiny_models(tmp_path)
    target, drafter = tmp_path / "target", tmp_path / "drafter"
    add_lora(tiny_drafter(target_model := tiny_target("llama")), base_name_or_path=drafter).save_pretrained(
        tmp_path / "adapter"
    )
    new_confidence_head(tiny_drafter(target_model)).save_pretrained(tmp_path / "head")
    for path in (drafter, tmp_path / "adapter"):
        assert check_checkpoint(str(path)).target_layer_ids == tiny_drafter(target_model).config.target_layer_ids
    assert check_checkpoint(str(tmp_path / "head"), "--head", ConfidenceHeadModel).draft_length == 3
    with pytest.raises(DrafterCheckpointError):
        check_checkpoint(str(tmp_path / "head"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DrafterCheckpointError, match="empty has no `model.safetensors`"):
        check_checkpoint(str(tmp_path / "empty"), "--head", ConfidenceHeadModel)
    with pytest.raises(InvalidInputError, match="`length_policy` asks for a length head"):
        check_checkpoint(str(drafter), length_policy="length_head")

    monkeypatch.setattr(loading, "load_target", lambda *args, **kwargs: pytest.fail("the target was loaded"))
    weights = drafter / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(weights).items() if name != "fc.weight"}, weights)
    with pytest.raises(DrafterCheckpointError, match="fc.weight"):
        load_models(str(target), str(drafter), "auto", None, True, console)


@pytest.mark.parametrize("prepack", [True, False])
def test_prepacks_both_models_when_asked(tmp_path, console, prepack):
    save_tiny_models(tmp_path)
    models = load_models(str(tmp_path / "target"), str(tmp_path / "drafter"), "float32", "cpu", prepack, console)
    for model in (models.target_model, models.drafter):
        assert any(isinstance(module, PrepackedLinear) for module in model.modules()) is prepack
    if prepack:
        assert (rounding_allowed(models.target_model), rounding_allowed(models.drafter)) == ({False}, {True})


def test_plain_decoding_runs_on_the_model_as_loaded_or_on_the_same_weights(console):
    target = tiny_target("llama")
    assert find_baseline(target, "loaded", console) is target
    prepack_linear_layers(target)
    assert find_baseline(target, "prepacked", console) is target
    baseline = find_baseline(target, "loaded", console)
    assert not any(isinstance(module, PrepackedLinear) for module in baseline.modules())
