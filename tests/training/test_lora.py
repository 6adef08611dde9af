from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from hub_server import running_hub
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tiny_checkpoints import hidden
from tiny_models import random_block, tiny_drafter, tiny_target
from tiny_trainer import LAYER_IDS, KillAt, make_trainer, weights_of
from tiny_trajectories import make_trajectories, run_until_killed

from adaflash_hf import DFlashDrafterModel
from adaflash_hf.errors import DrafterCheckpointError, InvalidInputError
from adaflash_hf.training.drafter_trainer import last_complete_checkpoint
from adaflash_hf.training.lora import LORA_TARGET_MODULES, add_lora, is_adapted, load_lora, merge_lora


HEAD = {"length_head_config": {"bottleneck_size": 4}}
PROMPT = torch.tensor([[5, 17, 8, 30, 11]])
# The merged product is rounded once more than the two that are added.
MERGED = {"atol": 1e-5, "rtol": 1e-4}


def saved_base(folder, **fields):
    tiny_drafter(**{**HEAD, **fields}).save_pretrained(folder)
    return DFlashDrafterModel.from_pretrained(folder)


def adapted_and_changed(base):
    """As training leaves it: no part of the adapter zero, the length head moved."""
    torch.manual_seed(3)
    adapted = add_lora(base, rank=2)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return adapted.eval()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A base and a changed adapter on it."""
    folder = tmp_path_factory.mktemp("lora")
    adapted = adapted_and_changed(saved_base(folder / "base"))
    adapted.save_pretrained(folder / "adapter")
    return folder


def ratio(drafter):
    with torch.no_grad():
        states = drafter(*random_block(drafter.config)).last_hidden_state
        return drafter.length_head(states).ratio


def test_a_new_adapter_changes_nothing_and_trains_every_matrix_and_the_head(tmp_path):
    base = saved_base(tmp_path)
    before = hidden(base)
    adapted = add_lora(base, rank=3, alpha=5.0)
    assert torch.equal(hidden(adapted), before)
    assert isinstance(adapted, PeftModel) and is_adapted(adapted) and not is_adapted(tiny_drafter())
    trainable = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    # Two factors for each of seven matrices in each of two layers, and for fc.
    assert len({name for name in trainable if "lora_" in name}) == 2 * (7 * 2 + 1)
    assert len({name for name in trainable if "length_head." in name}) == 4
    assert len(trainable) == 34
    config = adapted.peft_config["default"]
    assert (config.r, config.lora_alpha, config.base_model_name_or_path) == (3, 5.0, str(tmp_path))
    assert set(config.target_modules) == set(LORA_TARGET_MODULES)


def test_saved_and_loaded_in_every_way_it_is_the_same_drafter(folders):
    reference = adapted_and_changed(DFlashDrafterModel.from_pretrained(folders / "base"))
    assert (hidden(reference) - hidden(DFlashDrafterModel.from_pretrained(folders / "base"))).abs().max() > 1e-2
    assert {path.name for path in (folders / "adapter").iterdir()} >= {"adapter_model.safetensors"}
    for loaded in (
        load_lora(folders / "adapter"),
        load_lora(folders / "adapter", DFlashDrafterModel.from_pretrained(folders / "base")),
        DFlashDrafterModel.from_pretrained(folders / "adapter"),
    ):
        assert torch.equal(hidden(loaded), hidden(reference)) and torch.equal(ratio(loaded), ratio(reference))
        assert is_adapted(loaded) and not any(module.training for module in loaded.modules())
    again = load_lora(folders / "adapter", is_trainable=True)
    assert sum(parameter.requires_grad for parameter in again.parameters()) == 34


def test_merged_it_is_a_plain_drafter(folders, tmp_path):
    adapted = load_lora(folders / "adapter")
    merged = merge_lora(adapted)
    assert type(merged) is DFlashDrafterModel and is_adapted(adapted) and not is_adapted(merged)
    merged.save_pretrained(tmp_path)
    loaded = DFlashDrafterModel.from_pretrained(tmp_path)
    torch.testing.assert_close(hidden(loaded), hidden(adapted), **MERGED)
    torch.testing.assert_close(ratio(loaded), ratio(adapted), **MERGED)
    half = load_lora(folders / "adapter", dtype=torch.bfloat16)
    assert merge_lora(half).dtype == torch.bfloat16


def test_drafts_the_same_tokens_adapted_and_merged(folders):
    target = tiny_target()
    plain = target.generate(PROMPT, do_sample=False, max_new_tokens=16)
    adapted = load_lora(folders / "adapter")
    counts = []
    for drafter in (adapted, merge_lora(adapted), DFlashDrafterModel.from_pretrained(folders / "adapter")):
        for length_policy in ("fixed", "length_head"):
            answer = target.generate(
                PROMPT, do_sample=False, max_new_tokens=16, assistant_model=drafter, length_policy=length_policy
            )
            assert torch.equal(answer, plain)
            stats = drafter.last_generation_stats
            counts.append((stats.rounds, stats.drafted_tokens, stats.accepted_tokens))
    assert counts == counts[:2] * 3


ON_A_HUB = """
import sys, torch
from transformers import AutoModel
from adaflash_hf import DFlashDrafterModel
from adaflash_hf.training.lora import add_lora, load_lora, merge_lora
base_folder, block, out = sys.argv[1:]
DFlashDrafterModel.from_pretrained(base_folder).push_to_hub("org/base")
base = DFlashDrafterModel.from_pretrained("org/base")
adapted = add_lora(base, rank=2)
with torch.no_grad():
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.add_(0.1)
adapted.push_to_hub("org/adapter")
merge_lora(adapted).push_to_hub("org/merged")
# The base moves on; the adapter stays with the commit it was trained on.
other = DFlashDrafterModel.from_pretrained("org/base")
torch.nn.init.zeros_(other.norm.weight)
other.push_to_hub("org/base")
noise, context = torch.load(block)
def hidden(drafter):
    with torch.no_grad():
        return drafter.eval()(noise_embeds=noise, context_hidden_states=context).last_hidden_state
pulled = [load_lora("org/adapter"), DFlashDrafterModel.from_pretrained("org/adapter")]
pulled.append(AutoModel.from_pretrained("org/merged"))
torch.save([hidden(adapted), *map(hidden, pulled), base.checkpoint_commit], out)
"""


@pytest.mark.slow
def test_pushed_to_a_hub_and_pulled(folders, tmp_path):
    torch.save(random_block(tiny_drafter().config), tmp_path / "block.pt")
    with running_hub() as hub:
        environment = {**os.environ, **hub.environment(tmp_path / "home")}
        command = [sys.executable, "-c", ON_A_HUB, folders / "base", tmp_path / "block.pt", tmp_path / "out.pt"]
        result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=1200)
        assert result.returncode == 0, result.stderr
    assert set(hub.repositories["org/adapter"]) >= {"adapter_config.json", "adapter_model.safetensors", "README.md"}
    assert "model.safetensors" not in hub.repositories["org/adapter"]
    *outputs, commit = torch.load(tmp_path / "out.pt", weights_only=True)
    config = json.loads(hub.repositories["org/adapter"]["adapter_config.json"])
    assert (config["base_model_name_or_path"], config["revision"]) == ("org/base", commit)
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], **MERGED)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_hidden_layers": 3}, "tensors of the adapter are missing.*layers.2"),
        ({"num_hidden_layers": 1}, "have no place.*more layers"),
        ({"intermediate_size": 64}, r"has shape \[48, 2\], on this drafter it would be \[64, 2\]"),
        ({"length_head_config": None}, "have no place.*length head"),
        ({"length_head_config": {"bottleneck_size": 6}}, "length_head.*has shape"),
    ],
)
@pytest.mark.parametrize("load", [load_lora, lambda adapter, base: base.load_adapter(adapter)])
def test_an_adapter_of_another_drafter_is_refused(folders, load, fields, message):
    base = tiny_drafter(**{**HEAD, **fields})
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    with pytest.raises(DrafterCheckpointError, match=message):
        load(folders / "adapter", base)
    assert before.keys() == base.state_dict().keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in base.state_dict().items())


@pytest.mark.parametrize("load", [load_lora, DFlashDrafterModel.from_pretrained])
def test_a_damaged_adapter_is_refused(folders, tmp_path, load):
    shutil.copytree(folders / "adapter", tmp_path / "adapter")
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(weights)
    tensors["base_model.model.fc.lora_A.weight"][0, 0] = torch.nan
    save_file(tensors, weights)
    with pytest.raises(DrafterCheckpointError, match="NaN"):
        load(tmp_path / "adapter")
    del tensors["base_model.model.fc.lora_A.weight"]
    save_file(tensors, weights)
    with pytest.raises(DrafterCheckpointError, match="missing: `base_model.model.fc.lora_A.weight`"):
        load(tmp_path / "adapter")
    torch.save(tensors, weights.with_suffix(".bin"))
    weights.unlink()
    with pytest.raises(DrafterCheckpointError, match="Pickled adapters"):
        load(tmp_path / "adapter")


def test_wrong_usage_is_refused(folders):
    base = DFlashDrafterModel.from_pretrained(folders / "base")
    for arguments, message in (
        ({"rank": 0}, "`rank` is 0"),
        ({"target_modules": ["q_proj", "w1"]}, r"\['w1'\] names a linear layer"),
        ({"target_modules": []}, "nothing"),
        ({"target_modules": ["fc", "length_head.down"]}, "trained as a whole"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            add_lora(base, **arguments)
    with pytest.raises(InvalidInputError, match="base_name_or_path"):
        add_lora(tiny_drafter())
    adapted = add_lora(tiny_drafter(), base_name_or_path="org/base", target_modules=["fc"])
    assert adapted.peft_config["default"].modules_to_save is None
    for occupied in (adapted, DFlashDrafterModel.from_pretrained(folders / "adapter")):
        with pytest.raises(InvalidInputError, match="already has an adapter"):
            add_lora(occupied)
    with pytest.raises(InvalidInputError, match="already has an adapter"):
        load_lora(folders / "adapter", DFlashDrafterModel.from_pretrained(folders / "adapter"))
    with pytest.raises(InvalidInputError, match="load_lora"):
        merge_lora(base)
    with pytest.raises(DrafterCheckpointError, match="not a PEFT adapter"):
        load_lora(folders / "base")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("trajectories")
    return make_trajectories(path, tiny_target("llama"), teacher_top_k=8, capture_layer_ids=tuple(LAYER_IDS))


def train(directory, output_dir, **fields):
    trainer = make_trainer(tiny_target("llama"), directory, output_dir, with_head=True, lora_rank=2, **fields)
    before = weights_of(trainer)
    trainer.train(resume_from_checkpoint=True)
    after = weights_of(trainer)
    return trainer, {name for name in before if not torch.equal(before[name], after[name])}


@pytest.mark.parametrize(
    ("train_only", "factors", "head"), [(None, 30, 4), ("drafter", 30, 0), ("length_head", 0, 4)]
)  # fmt: skip
def test_training_moves_the_adapter_and_the_head_alone(directory, tmp_path, train_only, factors, head):
    trainer, moved = train(directory, tmp_path, train_only=train_only, num_train_epochs=1, bf16=True)
    assert len({name for name in moved if "lora_" in name}) == factors
    assert len({name for name in moved if "length_head.modules_to_save" in name}) == head
    assert len(moved) == factors + head
    trainer.save_drafter(tmp_path / "saved", torch.bfloat16)
    adapted, merged = load_lora(tmp_path / "saved" / "adapter"), DFlashDrafterModel.from_pretrained(tmp_path / "saved")
    assert adapted.peft_config["default"].base_model_name_or_path == str(tmp_path / "base")
    expected = trainer.model.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in adapted.state_dict().items())
    assert merged.dtype == torch.bfloat16
    for name, tensor in merge_lora(adapted).state_dict().items():
        assert torch.equal(merged.state_dict()[name], tensor.to(torch.bfloat16))


def test_killed_and_resumed_an_adapter_ends_as_if_never_interrupted(directory, tmp_path):
    fields = {"save_strategy": "steps", "save_steps": 4, "gradient_checkpointing": True}
    whole, _ = train(directory, tmp_path / "whole", **fields)
    killed = tmp_path / "killed"
    run_until_killed(lambda: train(directory, killed, callbacks=[KillAt(6)], **fields))
    checkpoint = last_complete_checkpoint(killed)
    assert checkpoint.name == "checkpoint-4"
    # Of the drafter the checkpoint holds the adapter alone.
    assert (checkpoint / "adapter_model.safetensors").exists() and not (checkpoint / "model.safetensors").exists()
    resumed, _ = train(directory, killed, **fields)
    assert resumed.state.global_step == whole.state.global_step == 15
    expected = weights_of(whole)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights_of(resumed).items())


def test_an_adapter_without_the_head_cannot_train_it(directory, tmp_path):
    trainer = make_trainer(tiny_target("llama"), directory, tmp_path, with_head=True)
    adapted = add_lora(trainer.model, 2, base_name_or_path=tmp_path, modules_to_save=None)
    with pytest.raises(InvalidInputError, match="modules_to_save"):
        type(trainer)(
            adapted,
            trainer.target_model,
            dataclasses.replace(trainer.args, train_only="length_head"),
            trainer.train_dataset,
        )
