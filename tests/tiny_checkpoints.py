"""Tiny checkpoint directories as other projects write them, and comparisons of what is loaded from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_models import random_block

from adaflash_hf import DFlashDrafterModel


ZLAB_CONFIG: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "model_type": "qwen3",
    "block_size": 4,
    "num_target_layers": 4,
    "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 2]},
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "vocab_size": 96,
}
HEAD_FLAGS = {"use_thresh_head_two_model": True, "thresh_head_bottleneck_dim": 5, "thresh_head_direct_len": True}
HEAD = {"head_type": "mean_last_residual", "bottleneck_size": 5}


def without(fields: dict[str, Any], *names: str) -> dict[str, Any]:
    """`fields` less those named."""
    return {name: value for name, value in fields.items() if name not in names}


def write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    """A checkpoint directory holding `config.json` and one safetensors file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def hidden(drafter: DFlashDrafterModel) -> torch.Tensor:
    """What the drafter makes of a fixed random block and context."""
    with torch.no_grad():
        return drafter(*random_block(drafter.config, new_context=11)).last_hidden_state


def assert_same_drafter(loaded: DFlashDrafterModel, original: DFlashDrafterModel) -> None:
    """Same tensors, and the same output to the last bit."""
    assert type(loaded) is DFlashDrafterModel
    assert not loaded.training
    assert loaded.state_dict().keys() == original.state_dict().keys()
    torch.testing.assert_close(hidden(loaded), hidden(original), rtol=0, atol=0)


def perturb(drafter: DFlashDrafterModel) -> None:
    """Changes every parameter a little, in place."""
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))


def as_written_by_the_authors(drafter: DFlashDrafterModel) -> dict[str, torch.Tensor]:
    """The tensors under the names of the AdaFlash authors' code."""
    return {name.replace("length_head.", "thresh_head_two_model."): t for name, t in drafter.state_dict().items()}
