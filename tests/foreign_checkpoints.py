"""Tiny checkpoints as speculators, DeepSpec and TorchSpec write them, spelled out by hand from those projects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny_checkpoints import ZLAB_CONFIG, without, write
from transformers import PreTrainedModel

from adaflash_hf import DFlashDrafterModel


# Of a tiny drafter for the tiny Qwen3 target: two layers, outputs of the target's layers 0 and 2.
LAYER_FIELDS: dict[str, Any] = {
    name: ZLAB_CONFIG[name]
    for name in (
        "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim hidden_act "
        "max_position_embeddings rms_norm_eps rope_theta attention_bias vocab_size"
    ).split()
}


def speculators_config(verifier: str | None, **overrides: Any) -> dict[str, Any]:
    """The config.json of speculators 0.9 for a DFlash drafter."""
    fields: dict[str, Any] = {
        "architectures": ["DFlashSpeculator"],
        "aux_hidden_state_layer_ids": [1, 3],
        "block_size": 4,
        "draft_vocab_size": 96,
        "dtype": "float32",
        "mask_token_id": 3,
        "sample_from_anchor": False,
        "sliding_window_non_causal": False,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}],
            "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": verifier},
        },
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": {
            "model_type": "qwen3",
            **without(LAYER_FIELDS, "rope_theta"),
            "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
        },
    }
    return {**fields, **overrides}


def deepspec_config(**overrides: Any) -> dict[str, Any]:
    """The config.json of DeepSpec's DFlash: its DSpark class without heads."""
    fields = {
        **LAYER_FIELDS,
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "block_size": 4,
        "num_target_layers": 4,
        "target_layer_ids": [0, 2],
        "mask_token_id": 3,
        "num_anchors": 512,
        "markov_rank": 0,
        "enable_confidence_head": False,
        "layer_types": ["full_attention"] * 2,
        "tie_word_embeddings": False,
    }
    return {**fields, **overrides}


def torchspec_config(**overrides: Any) -> dict[str, Any]:
    """The config.json of TorchSpec: `num_target_layers` counts features."""
    fields = {
        **without(LAYER_FIELDS, "head_dim", "hidden_act", "attention_bias"),
        "architectures": ["DFlashDraftModel"],
        "model_type": "dflash",
        "num_target_layers": 2,
        "target_num_hidden_layers": 4,
        "target_hidden_size": 32,
        "target_layer_ids": [0, 2],
        "mask_token_id": 3,
        "tie_word_embeddings": False,
    }
    return {**fields, **overrides}


def target_copies(target: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The embedding and LM head that DeepSpec's drafters hold."""
    return {
        "embed_tokens.weight": target.get_input_embeddings().weight.detach().clone(),
        "lm_head.weight": target.get_output_embeddings().weight.detach().clone(),
    }


def torchspec_tensors(drafter: DFlashDrafterModel, target: PreTrainedModel) -> dict[str, torch.Tensor]:
    """A drafter's tensors under TorchSpec's names, with the embedding it carries."""
    renames = {"fc.": "context_proj.", "hidden_norm.": "context_norm.", "norm.": "final_norm."}
    tensors = {"embed_tokens.weight": target.get_input_embeddings().weight.detach().clone()}
    for name, tensor in drafter.state_dict().items():
        prefix = next((old for old in renames if name.startswith(old)), None)
        tensors[name if prefix is None else name.replace(prefix, renames[prefix], 1)] = tensor
    return tensors


def write_deepspec(folder: Path, drafter: DFlashDrafterModel, target: PreTrainedModel, **overrides: Any) -> Path:
    """A DeepSpec checkpoint directory of the drafter."""
    return write(folder, deepspec_config(**overrides), {**drafter.state_dict(), **target_copies(target)})


def write_torchspec(folder: Path, drafter: DFlashDrafterModel, target: PreTrainedModel, **overrides: Any) -> Path:
    """A TorchSpec checkpoint directory of the drafter."""
    return write(folder, torchspec_config(**overrides), torchspec_tensors(drafter, target))
