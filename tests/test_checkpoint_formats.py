"""Other projects' checkpoints are read as the same drafter, or refused by name with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_checkpoints import (
    HEAD,
    HEAD_FLAGS,
    ZLAB_CONFIG,
    as_written_by_the_authors,
    assert_same_drafter,
    hidden,
    perturb,
    without,
    write,
)
from tiny_models import tiny_drafter
from transformers import AutoModel

from adaflash_hf import DFlashDrafterConfig, DFlashDrafterModel, DrafterCheckpointError
from adaflash_hf.checkpoint_formats import native_config_dict, native_tensor_name


ZLAB_VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "published": (ZLAB_CONFIG, {}),
    "rope_parameters": (
        {**without(ZLAB_CONFIG, "rope_theta"), "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
        {},
    ),
    "both_ropes": ({**ZLAB_CONFIG, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, {}),
    "rope_scaling": (
        {**ZLAB_CONFIG, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_theta": 1e6, "rope_type": "linear", "factor": 2.0}},
    ),
    "no_rope": (without(ZLAB_CONFIG, "rope_theta"), {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}),
    "all_nested": (
        {
            **without(ZLAB_CONFIG, "block_size", "num_target_layers"),
            "dflash_config": {**ZLAB_CONFIG["dflash_config"], "block_size": 4, "num_target_layers": 4},
        },
        {},
    ),
    "nested_wins": ({**ZLAB_CONFIG, "mask_token_id": 50, "target_layer_ids": [1, 3]}, {}),
    "all_top_level": (
        {**without(ZLAB_CONFIG, "dflash_config"), "mask_token_id": 3, "target_layer_ids": [0, 2]},
        {},
    ),
    "default_block": (without(ZLAB_CONFIG, "block_size"), {"block_size": 16}),
    "default_layer_ids": (
        {**ZLAB_CONFIG, "num_target_layers": 9, "dflash_config": {"mask_token_id": 3}},
        {"num_target_layers": 9, "target_layer_ids": [1, 6]},
    ),
    "sliding_legacy": (
        {**ZLAB_CONFIG, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5},
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5},
    ),
    "sliding_bidirectional": (
        {**ZLAB_CONFIG, "layer_types": ["sliding_attention"] * 2, "sliding_window": 5, "is_causal": False},
        {"layer_types": ["sliding_attention"] * 2, "sliding_window": 5, "is_causal": False},
    ),
    "use_swa": (
        {**ZLAB_CONFIG, "dflash_config": {**ZLAB_CONFIG["dflash_config"], "use_swa": True, "swa_window_size": 5}},
        {"layer_types": ["sliding_attention"] * 2, "sliding_window": 5, "is_causal": False},
    ),
    "max_window_layers": (
        {**ZLAB_CONFIG, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
        {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 5},
    ),
    "causal_heads": (
        {**ZLAB_CONFIG, "dflash_config": {**ZLAB_CONFIG["dflash_config"], "causal": True}},
        {"is_causal": True},
    ),
    "scaled": (
        {**ZLAB_CONFIG, "output_multiplier": 0.2, "final_logit_softcapping": 20.0, "input_embedding_scale": 5.5},
        {"output_multiplier": 0.2, "final_logit_softcapping": 20.0, "input_embedding_scale": 5.5},
    ),
    "anchor_first": (
        {**ZLAB_CONFIG, "dflash_config": {**ZLAB_CONFIG["dflash_config"], "sample_from_anchor": True}},
        {"block_layout": "anchor_first"},
    ),
}


@pytest.mark.parametrize("variant", ZLAB_VARIANTS)
def test_zlab_checkpoints_are_the_same_drafter(variant: str, tmp_path: Path) -> None:
    config, ours = ZLAB_VARIANTS[variant]
    original = tiny_drafter(**{"rope_theta": 1e6, **ours})
    loaded = DFlashDrafterModel.from_pretrained(write(tmp_path, config, original.state_dict()))
    assert_same_drafter(loaded, original)
    defaults = DFlashDrafterConfig().to_dict()
    ignored = ("transformers_version", "_name_or_path", "architectures", "dtype", "initializer_range")
    for name in without(defaults, *ignored):
        assert getattr(loaded.config, name) == getattr(original.config, name), name


def test_a_foreign_checkpoint_is_saved_in_our_format(tmp_path: Path) -> None:
    original = tiny_drafter(rope_theta=1e6)
    loaded = DFlashDrafterModel.from_pretrained(write(tmp_path / "zlab", ZLAB_CONFIG, original.state_dict()))
    perturb(loaded)
    loaded.save_pretrained(tmp_path / "ours")
    written = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert written["model_type"] == "dflash_drafter"
    assert written["architectures"] == ["DFlashDrafterModel"]
    assert "dflash_config" not in written and "rope_theta" not in written
    assert_same_drafter(AutoModel.from_pretrained(tmp_path / "ours"), loaded)


def test_adaflash_authors_checkpoints(tmp_path: Path) -> None:
    original = tiny_drafter(rope_theta=1e6, length_head_config=HEAD)
    tensors = as_written_by_the_authors(original)
    assert "thresh_head_two_model.res.0.weight" in tensors
    config = {**ZLAB_CONFIG, "dflash_config": {**ZLAB_CONFIG["dflash_config"], **HEAD_FLAGS}}
    loaded = DFlashDrafterModel.from_pretrained(write(tmp_path / "authors", config, tensors))
    assert_same_drafter(loaded, original)
    torch.testing.assert_close(
        loaded.length_head(hidden(loaded)).ratio, original.length_head(hidden(original)).ratio, rtol=0, atol=0
    )
    loaded.save_pretrained(tmp_path / "ours")
    saved = load_file(tmp_path / "ours" / "model.safetensors")
    assert saved.keys() == original.state_dict().keys(), "saving must not bring the foreign names back"


def test_model_prefix_is_tolerated(tmp_path: Path) -> None:
    original = tiny_drafter(rope_theta=1e6)
    tensors = {f"model.{name}": tensor for name, tensor in original.state_dict().items()}
    for config in (ZLAB_CONFIG, original.config.to_dict()):
        config = {name: value for name, value in config.items() if name != "dtype"}
        loaded = DFlashDrafterModel.from_pretrained(write(tmp_path / config["model_type"], config, tensors))
        assert_same_drafter(loaded, original)


REFUSED_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "dflash2": ({"architectures": ["DFlash2DraftModel"]}, "DFlash2 drafter"),
    "dflash2_fields": ({"dflash_config": {"mask_token_id": 3, "selector_rank": 256}}, "candidate selector"),
    "domino": ({"architectures": ["DominoDraftModel"]}, "Domino drafter"),
    "domino_fields": ({"dflash_config": {"mask_token_id": 3, "shift_label": True}}, "Domino drafter"),
    "speculators": (
        {"architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash", "model_type": None},
        "layer ids are one higher",
    ),
    "speculators_fields": ({"aux_hidden_state_layer_ids": [2, 10]}, "layer ids are one higher"),
    "deepspec": ({"architectures": ["Qwen3DSparkModel"], "target_layer_ids": [0, 2]}, "owns an embedding"),
    "deepspec_fields": ({"markov_rank": 8}, "anchor-first"),
    "torchspec": ({"model_type": "dflash", "target_num_hidden_layers": 36}, "TorchSpec"),
    "torchspec_or_verl": ({"model_type": "dflash"}, "may count captured layers"),
    "verl_speco": ({"architectures": ["DFlashForCausalLM"], "model_type": "dflash"}, "verl-speco"),
    "muse": ({"architectures": ["MuseGlimmerAssistantModel"]}, "load it with transformers"),
    "causal_lm": ({"architectures": ["Qwen3ForCausalLM"]}, "`architectures` is ['Qwen3ForCausalLM']"),
    "sinks": ({"dflash_config": {"mask_token_id": 3, "attention_sink_bias": True}}, "sink biases"),
    "value_scale": ({"dflash_config": {"mask_token_id": 3, "attention_value_scale": 0.612}}, "values by 0.612"),
    "interleaved_rope": ({"is_neox_style": False}, "interleaved RoPE"),
    "indirect_head": (
        {"dflash_config": {**ZLAB_CONFIG["dflash_config"], **HEAD_FLAGS, "thresh_head_direct_len": False}},
        "does not predict the length directly",
    ),
    "no_mask": ({"dflash_config": {"target_layer_ids": [0, 2]}}, "`mask_token_id` is neither in `dflash_config`"),
    "no_depth": ({"num_target_layers": None}, "`num_target_layers` is neither"),
    "two_ropes": ({"rope_parameters": {"rope_theta": 10000.0}}, "`rope_theta` is 1000000 but `rope_parameters` says"),
}


@pytest.mark.parametrize("name", REFUSED_CONFIGS)
def test_foreign_configurations_are_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    changes, reason = REFUSED_CONFIGS[name]
    folder = write(tmp_path, {**ZLAB_CONFIG, **changes}, tiny_drafter().state_dict())
    with pytest.raises(DrafterCheckpointError) as error:
        DFlashDrafterModel.from_pretrained(folder)
    assert reason in str(error.value)
    assert str(folder) in str(error.value)


REFUSED_TENSORS: dict[str, str] = {
    "layers.0.attention_conv.base_kernel": "DFlash2",
    "candidate_selector.predecessor_codebook.weight": "DFlash2",
    "context_proj.weight": "TorchSpec",
    "embed_tokens.weight": "DeepSpec and verl-speco",
    "lm_head.weight": "DeepSpec and verl-speco",
    "d2t": "reduced draft vocabulary",
    "markov_head.markov_w1.weight": "DSpark",
    "mask_embedding": "`mask_token_id` row",
    "layers.0.self_attn.qkv_proj.weight": "fused projections",
    "encoder.fc.weight": "Muse Glimmer",
}


@pytest.mark.parametrize("tensor", REFUSED_TENSORS)
def test_foreign_tensors_are_refused_with_the_reason(tensor: str, tmp_path: Path) -> None:
    tensors = {**tiny_drafter().state_dict(), tensor: torch.zeros(2)}
    with pytest.raises(DrafterCheckpointError) as error:
        DFlashDrafterModel.from_pretrained(write(tmp_path, ZLAB_CONFIG, tensors))
    assert f"`{tensor}`" in str(error.value)
    assert REFUSED_TENSORS[tensor] in str(error.value)


def test_translation_leaves_its_argument_and_our_own_configurations_alone() -> None:
    given = json.loads(json.dumps(ZLAB_CONFIG))
    native_config_dict(given)
    assert given == ZLAB_CONFIG
    ours = tiny_drafter().config.to_dict()
    assert native_config_dict(ours) is ours
    assert native_config_dict({"hidden_size": 8}) == {"hidden_size": 8}


@pytest.mark.parametrize(
    ("name", "native"),
    [
        ("fc.weight", "fc.weight"),
        ("model.layers.0.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight"),
        ("thresh_head_two_model.out.bias", "length_head.out.bias"),
        ("model.thresh_head_two_model.out.bias", "length_head.out.bias"),
        ("model.other.weight", "model.other.weight"),
    ],
)
def test_tensor_names(name: str, native: str) -> None:
    assert native_tensor_name(name) == native
