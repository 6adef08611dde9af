"""The contract with the SGLang plugin, spelled out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_checkpoints import HEAD
from tiny_models import tiny_drafter

from adaflash_hf import DFlashDrafterModel
from adaflash_hf.serving.formats import DrafterBundle, write_drafter


@pytest.mark.parametrize(
    ("head", "shapes"),
    [
        (
            {"head_type": "mean_linear", "bottleneck_size": 5},
            {"down.weight": [5, 32], "down.bias": [5], "out.weight": [1, 5], "out.bias": [1]},
        ),
        (
            HEAD,
            {
                "down.weight": [5, 64],
                "down.bias": [5],
                "res.0.weight": [5, 5],
                "res.0.bias": [5],
                "out.weight": [1, 5],
                "out.bias": [1],
            },
        ),
        (None, {}),
    ],
)
def test_what_the_plugin_finds(head: dict | None, shapes: dict[str, list[int]], tmp_path: Path) -> None:
    drafter = tiny_drafter(length_head_config=head)
    written = write_drafter(
        DrafterBundle(drafter.config, drafter.state_dict(), "memory"), tmp_path / "out", "sglang-plugin"
    )
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["AdaFlashDraftModel"]
    assert config["model_type"] == "qwen3"
    assert config["adaflash_config"] == {"format_version": 1, "length_head": head, "draft_vocab_size": None}
    assert config["block_size"] == 4
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    found = {name: list(tensor.shape) for name, tensor in tensors.items() if name.startswith("length_head.")}
    assert found == {f"length_head.{name}": shape for name, shape in shapes.items()}
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert any("no length head" in note for note in written.notes) == (head is None)
    # The same files are a drafter for generate().
    loaded = DFlashDrafterModel.from_pretrained(tmp_path / "out")
    assert (loaded.length_head is None) == (head is None)


def test_the_draft_vocabulary_is_a_list_of_tokens(tmp_path: Path) -> None:
    drafter = tiny_drafter()
    drafter.set_draft_vocabulary(torch.tensor([2, 7, 90]))
    write_drafter(DrafterBundle(drafter.config, drafter.state_dict(), "memory"), tmp_path / "out", "sglang-plugin")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["adaflash_config"]["draft_vocab_size"] == 3
    token_ids = load_file(tmp_path / "out" / "model.safetensors")["draft_token_ids"]
    assert token_ids.dtype == torch.int64 and token_ids.tolist() == [2, 7, 90]
    assert DFlashDrafterModel.from_pretrained(tmp_path / "out").draft_token_ids.tolist() == [2, 7, 90]
