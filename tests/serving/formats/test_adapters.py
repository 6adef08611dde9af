"""PEFT adapters on drafters are merged on export."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import random_block, tiny_drafter

from adaflash_hf import DFlashDrafterModel
from adaflash_hf.errors import DrafterCheckpointError
from adaflash_hf.serving.formats import convert_drafter, read_drafter
from adaflash_hf.serving.formats.adapters import is_adapter


def save_adapter(folder: Path) -> torch.Tensor:
    """Saves a drafter and an adapter that changes it, and returns what the two compute together."""
    tiny_drafter(length_head_config={"bottleneck_size": 4}).save_pretrained(folder / "base")
    base = DFlashDrafterModel.from_pretrained(folder / "base")
    config = LoraConfig(r=2, target_modules=["q_proj", "fc"], modules_to_save=["norm"], init_lora_weights=False)
    wrapped = get_peft_model(base, config).eval()
    with torch.no_grad():
        wrapped.get_base_model().norm.weight.mul_(1.5)
        output = wrapped(*random_block(base.config, new_context=11)).last_hidden_state
    wrapped.save_pretrained(folder / "adapter")
    return output


def test_merged_weights_compute_what_the_adapter_did(tmp_path: Path) -> None:
    expected = save_adapter(tmp_path)
    assert is_adapter(str(tmp_path / "adapter"), {}) and not is_adapter(str(tmp_path / "base"), {})
    bundle, _ = convert_drafter(tmp_path / "adapter", tmp_path / "out", "native")
    assert any("merged into its drafter" in note for note in bundle.notes)
    merged = DFlashDrafterModel.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        found = merged(*random_block(merged.config, new_context=11)).last_hidden_state
    torch.testing.assert_close(found, expected)
    assert merged.length_head is not None
    assert not any("lora" in name for name in bundle.tensors)


def test_engines_get_the_merged_weights(tmp_path: Path) -> None:
    save_adapter(tmp_path)
    base = DFlashDrafterModel.from_pretrained(tmp_path / "base").state_dict()
    convert_drafter(tmp_path / "adapter", tmp_path / "out", "sglang-plugin")
    tensors = read_drafter(tmp_path / "out").tensors
    changed = {name for name in base if not torch.equal(tensors[name], base[name].to(torch.bfloat16))}
    assert changed == {"fc.weight", "norm.weight", *(f"layers.{i}.self_attn.q_proj.weight" for i in range(2))}


def test_an_adapter_without_its_drafter_is_refused(tmp_path: Path) -> None:
    save_adapter(tmp_path)
    config = tmp_path / "adapter" / "adapter_config.json"
    text = config.read_text()
    config.write_text(text.replace(str(tmp_path / "base"), str(tmp_path / "gone")))
    with pytest.raises(DrafterCheckpointError, match="cannot be merged into its drafter .*gone") as error:
        read_drafter(tmp_path / "adapter")
    assert "\n" not in str(error.value)
    config.write_text(text.replace(f'"{tmp_path / "base"}"', "null"))
    with pytest.raises(DrafterCheckpointError, match="the drafter that the adapter changes is unknown"):
        read_drafter(tmp_path / "adapter")
