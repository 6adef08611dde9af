from __future__ import annotations

import pytest
import torch

from adaflash_hf import DFlashDrafterModel
from adaflash_hf.errors import InvalidInputError
from adaflash_hf.training.presets import PRESETS, find_preset


# Layers, hidden, MLP, query and key-value heads, target layers, ids, mask token, vocabulary, positions, theta.
PUBLISHED = {
    "qwen3-1.7b": (5, 2048, 6144, 16, 8, 28, [1, 7, 13, 19, 25], 151669, 151936, 40960, 1e6),
    "qwen3-4b": (5, 2560, 9728, 32, 8, 36, [1, 9, 17, 25, 33], 151669, 151936, 40960, 1e6),
    "qwen3-8b": (5, 4096, 12288, 32, 8, 36, [1, 9, 17, 25, 33], 151669, 151936, 40960, 1e6),
    "qwen3-coder-30b-a3b": (8, 2048, 6144, 32, 4, 48, [1, 12, 23, 34, 45], 151669, 151936, 262144, 1e7),
    "qwen3.5-9b": (5, 4096, 12288, 32, 8, 32, [1, 8, 15, 22, 29], 248070, 248320, 262144, 1e7),
}
HEAD_DIM = 128


def published_layout(layers, hidden, intermediate, heads, kv_heads, features):
    """Tensor names and shapes of a DFlash checkpoint: three and eleven per layer, no embedding, no LM head."""
    shapes = {"fc.weight": [hidden, features * hidden], "hidden_norm.weight": [hidden], "norm.weight": [hidden]}
    for layer in range(layers):
        shapes |= {
            f"layers.{layer}.input_layernorm.weight": [hidden],
            f"layers.{layer}.post_attention_layernorm.weight": [hidden],
            f"layers.{layer}.self_attn.q_proj.weight": [heads * HEAD_DIM, hidden],
            f"layers.{layer}.self_attn.k_proj.weight": [kv_heads * HEAD_DIM, hidden],
            f"layers.{layer}.self_attn.v_proj.weight": [kv_heads * HEAD_DIM, hidden],
            f"layers.{layer}.self_attn.o_proj.weight": [hidden, heads * HEAD_DIM],
            f"layers.{layer}.self_attn.q_norm.weight": [HEAD_DIM],
            f"layers.{layer}.self_attn.k_norm.weight": [HEAD_DIM],
            f"layers.{layer}.mlp.gate_proj.weight": [intermediate, hidden],
            f"layers.{layer}.mlp.up_proj.weight": [intermediate, hidden],
            f"layers.{layer}.mlp.down_proj.weight": [hidden, intermediate],
        }
    return shapes


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_the_published_tensors_and_configuration(name):
    layers, hidden, intermediate, heads, kv_heads, depth, ids, mask, vocabulary, positions, theta = PUBLISHED[name]
    preset = find_preset(name)
    config = preset.config()
    with torch.device("meta"):
        tensors = {key: list(value.shape) for key, value in DFlashDrafterModel(config).state_dict().items()}
    assert tensors == published_layout(layers, hidden, intermediate, heads, kv_heads, len(ids))
    assert len(tensors) == 3 + 11 * layers
    assert config.target_layer_ids == ids and config.num_target_layers == depth and config.block_size == 16
    assert config.mask_token_id == mask < config.vocab_size == vocabulary
    assert config.max_position_embeddings == positions and config.rope_parameters["rope_theta"] == theta
    assert config.rms_norm_eps == 1e-6 and config.hidden_act == "silu" and not config.attention_bias
    assert config.target_model_name_or_path == preset.target and config.length_head_config is None


def test_presets_can_be_overridden_and_are_all_checked():
    assert set(PRESETS) == set(PUBLISHED)
    assert find_preset("qwen3-8b").config(block_size=8, num_hidden_layers=3).block_size == 8
    with pytest.raises(InvalidInputError, match="Did you mean 'qwen3-8b'"):
        find_preset("Qwen3-8")
