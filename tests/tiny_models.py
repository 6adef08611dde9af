"""Tiny random targets of each supported architecture and drafters that fit them, built in milliseconds."""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from adaflash_hf import DFlashDrafterConfig, DFlashDrafterModel
from adaflash_hf.generation.prepacking import PrepackedLinear


VOCAB_SIZE = 96
HIDDEN_SIZE = 32
NUM_TARGET_LAYERS = 4
TARGET_LAYER_IDS = [0, 2]
BLOCK_SIZE = 4
MASK_TOKEN_ID = 3
SLIDING_WINDOW = 8

COMMON_FIELDS: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 48,
    "num_hidden_layers": NUM_TARGET_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    # Ten times the usual spread, so that the two best logits are far apart and greedy decoding has no near-ties.
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
ALTERNATING_LAYERS = ["sliding_attention", "full_attention"] * (NUM_TARGET_LAYERS // 2)
ARCHITECTURE_FIELDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "gemma3_text": {
        "layer_types": ALTERNATING_LAYERS,
        "sliding_window": SLIDING_WINDOW,
        "query_pre_attn_scalar": 8,
        "tie_word_embeddings": True,
    },
    "gpt_oss": {
        "layer_types": ALTERNATING_LAYERS,
        "sliding_window": SLIDING_WINDOW,
        "num_local_experts": 4,
        # Its default is YaRN for 131072 positions, which a config of 512 positions contradicts.
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "num_experts_per_tok": 2,
    },
    "qwen3_next": {
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
    },
}
ARCHITECTURES = tuple(ARCHITECTURE_FIELDS)
# More hybrids, for what concerns their caches: convolutions without recurrence, and recurrence with 3-D positions.
ARCHITECTURE_FIELDS["lfm2"] = {"layer_types": ["conv", "full_attention"] * (NUM_TARGET_LAYERS // 2)}
ARCHITECTURE_FIELDS["qwen3_5_text"] = {
    name: value for name, value in ARCHITECTURE_FIELDS["qwen3_next"].items() if name.startswith(("layer", "linear"))
}
MAMBA2_FIELDS: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}
ARCHITECTURE_FIELDS["bamba"] = {**MAMBA2_FIELDS, "attn_layer_indices": [1, 3]}
ARCHITECTURE_FIELDS["falcon_h1"] = {**MAMBA2_FIELDS, "mamba_d_ssm": 64}
ARCHITECTURE_FIELDS["nemotron_h"] = {
    "layers_block_type": ["mamba", "attention", "mamba", "moe"],
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "n_groups": 1,
    "chunk_size": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 24,
}
ARCHITECTURE_FIELDS["zamba2"] = {
    "layers_block_type": ["mamba", "hybrid"] * (NUM_TARGET_LAYERS // 2),
    "mamba_d_state": 8,
    "mamba_ngroups": 1,
    "n_mamba_heads": 4,
    "chunk_size": 8,
    "num_mem_blocks": 1,
    "adapter_rank": 4,
}
MAMBA2_ARCHITECTURES = ("bamba", "falcon_h1", "nemotron_h", "zamba2")
# A hybrid whose recurrent layers begin anew when they are given several tokens at once.
ARCHITECTURE_FIELDS["jamba"] = {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2}
RECURRENT_ARCHITECTURES = ("qwen3_next",)


def tiny_target(architecture: str = "qwen3", seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """
    A random causal language model in float32 and evaluation mode.

    Args:
        architecture (`str`): One of `ARCHITECTURES`, a transformers `model_type`.
        seed (`int`): Seed of the weights.
        overrides: Configuration fields to change.
    """
    fields = {**COMMON_FIELDS, **ARCHITECTURE_FIELDS[architecture], **overrides}
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[architecture](**fields), dtype=torch.float32)
    # Otherwise generate() would stop at the default id 50256 or similar, which some architectures declare.
    model.generation_config.eos_token_id = fields["eos_token_id"]
    model.generation_config.pad_token_id = 0
    return model.eval()


def tiny_drafter_config(target: PreTrainedModel | None = None, **overrides: Any) -> DFlashDrafterConfig:
    """A two-layer drafter configuration for `target`, or for the default tiny target."""
    config = None if target is None else target.config.get_text_config()
    fields: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE if config is None else config.vocab_size,
        "hidden_size": HIDDEN_SIZE if config is None else config.hidden_size,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "block_size": BLOCK_SIZE,
        "mask_token_id": MASK_TOKEN_ID,
        "num_target_layers": NUM_TARGET_LAYERS if config is None else config.num_hidden_layers,
        "target_layer_ids": TARGET_LAYER_IDS,
    }
    return DFlashDrafterConfig(**{**fields, **overrides})


def tiny_drafter(target: PreTrainedModel | None = None, seed: int = 1, **overrides: Any) -> DFlashDrafterModel:
    """A random drafter in float32 and evaluation mode; norms are random too, so that none can be mixed up."""
    torch.manual_seed(seed)
    drafter = DFlashDrafterModel(tiny_drafter_config(target, **overrides))
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return drafter.eval()


def random_block(
    config: DFlashDrafterConfig, batch_size: int = 2, new_context: int = 7, seed: int = 2
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random `noise_embeds` `[batch_size, block_size, H]` and context features `[batch_size, new_context, K*H]`."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(batch_size, config.block_size, config.hidden_size, generator=generator)
    context = torch.randn(batch_size, new_context, config.context_feature_size, generator=generator)
    return noise, context


def rounding_allowed(model: torch.nn.Module) -> set[bool]:
    """What the prepacked layers of a model say of rounding their weights."""
    return {module.allows_rounding for module in model.modules() if isinstance(module, PrepackedLinear)}
