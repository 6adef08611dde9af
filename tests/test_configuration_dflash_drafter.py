"""Drafter configuration: defaults, derived values, both RoPE spellings, and the refusal of values that cannot work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassFieldValidationError
from tiny_models import tiny_drafter_config
from transformers import AutoConfig

from adaflash_hf import DFlashDrafterConfig, InvalidInputError, LengthHeadConfig, build_target_layer_ids


@pytest.mark.parametrize(
    ("num_target_layers", "num_features", "expected"),
    [
        (36, 5, [1, 9, 17, 25, 33]),
        (28, 5, [1, 7, 13, 19, 25]),
        (32, 5, [1, 8, 15, 22, 29]),
        (48, 5, [1, 12, 23, 34, 45]),
        (64, 5, [1, 16, 31, 46, 61]),
        (24, 5, [1, 6, 11, 16, 21]),
        (30, 1, [15]),
        (5, 2, [1, 2]),
    ],
)
def test_target_layer_ids_are_those_of_published_drafters(
    num_target_layers: int, num_features: int, expected: list[int]
) -> None:
    assert build_target_layer_ids(num_target_layers, num_features) == expected


def test_too_many_features_for_a_shallow_target_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"`num_features` is 5, but a target of 6 layers"):
        build_target_layer_ids(6, 5)


def test_derived_values() -> None:
    config = DFlashDrafterConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=None, head_dim=None)
    assert config.num_key_value_heads == 4
    assert config.head_dim == 16
    assert config.target_hidden_size == 64
    assert config.layer_types == ["full_attention"] * 5
    assert config.target_layer_ids == [1, 9, 17, 25, 33]
    assert config.context_feature_size == 5 * 64


@pytest.mark.parametrize(("layout", "drafts"), [("anchor_then_masks", 15), ("anchor_first", 16)])
def test_draft_length_follows_the_layout(layout: str, drafts: int) -> None:
    assert DFlashDrafterConfig(block_layout=layout).draft_length == drafts


@pytest.mark.parametrize(("is_causal", "expected"), [(None, [True, False]), (False, [False] * 2), (True, [True] * 2)])
def test_causality_of_layers(is_causal: bool | None, expected: list[bool]) -> None:
    config = tiny_drafter_config(
        layer_types=["sliding_attention", "full_attention"], sliding_window=8, is_causal=is_causal
    )
    assert [config.is_causal_layer(i) for i in range(2)] == expected
    assert [config.window_of_layer(i) for i in range(2)] == [8, None]


def test_both_spellings_of_rope_give_the_same_configuration() -> None:
    old = tiny_drafter_config(rope_theta=5e5, rope_scaling={"rope_type": "linear", "factor": 2.0})
    new = tiny_drafter_config(rope_parameters={"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0})
    assert old.rope_parameters == new.rope_parameters == {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}


def test_rope_per_layer_type_is_refused() -> None:
    rope = {"full_attention": {"rope_theta": 1e6, "rope_type": "default"}}
    with pytest.raises(InvalidInputError, match="`rope_parameters`"):
        tiny_drafter_config(rope_parameters=rope)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_size", 1),
        ("mask_token_id", 96),
        ("mask_token_id", -1),
        ("target_layer_ids", [0, 4]),
        ("target_layer_ids", [-1, 2]),
        ("target_layer_ids", [1, 1]),
        ("target_layer_ids", []),
        ("block_layout", "masks_first"),
        ("layer_types", ["full_attention"]),
        ("layer_types", ["full_attention", "linear_attention"]),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("num_key_value_heads", 3),
        ("hidden_size", 0),
        ("num_target_layers", 0),
        ("sliding_window", 0),
        ("block_size", 10**9),
        ("final_logit_softcapping", 0),
        ("output_multiplier", float("nan")),
        ("input_embedding_scale", float("inf")),
    ],
)
def test_a_value_that_cannot_work_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidInputError) as error:
        tiny_drafter_config(**{field: value})
    # The window is what is missing when a layer slides, not the layer type.
    is_windowless = isinstance(value, list) and "sliding_attention" in value
    assert f"`{'sliding_window' if is_windowless else field}`" in str(error.value)


@pytest.mark.parametrize(("field", "value"), [("block_size", "16"), ("block_size", True), ("target_layer_ids", 2)])
def test_a_value_of_the_wrong_type_is_refused_by_the_strict_dataclass(field: str, value: Any) -> None:
    with pytest.raises(StrictDataclassFieldValidationError, match=field):
        tiny_drafter_config(**{field: value})


def test_mask_token_is_not_checked_against_an_unknown_vocabulary() -> None:
    assert tiny_drafter_config(vocab_size=None, mask_token_id=10**6).mask_token_id == 10**6


def test_length_head_takes_the_drafters_width() -> None:
    config = tiny_drafter_config(length_head_config={"bottleneck_size": 8})
    assert isinstance(config.length_head_config, LengthHeadConfig)
    assert config.length_head_config.hidden_size == config.hidden_size
    with pytest.raises(InvalidInputError, match="is 48 but the drafter's `hidden_size` is 32"):
        tiny_drafter_config(length_head_config={"hidden_size": 48})


def test_round_trip_keeps_every_field(tmp_path: Path) -> None:
    config = tiny_drafter_config(
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=9,
        is_causal=False,
        block_layout="anchor_first",
        input_embedding_scale=2.5,
        output_multiplier=0.5,
        final_logit_softcapping=20.0,
        target_model_name_or_path="org/target",
        length_head_config={"head_type": "mean_last_residual", "bottleneck_size": 6},
    )
    config.save_pretrained(tmp_path)
    reloaded = AutoConfig.from_pretrained(tmp_path)
    assert type(reloaded) is DFlashDrafterConfig
    assert {**reloaded.to_dict(), "_name_or_path": ""} == config.to_dict()
    assert reloaded.length_head_config.head_type == "mean_last_residual"
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["model_type"] == "dflash_drafter"
    assert written["block_size"] == config.block_size, "fields at their default must be written too"


def test_caller_dictionaries_are_not_modified() -> None:
    head = {"bottleneck_size": 8}
    tiny_drafter_config(length_head_config=head)
    assert head == {"bottleneck_size": 8}


def test_what_a_trainer_leaves_on_a_configuration_is_not_kept(tmp_path: Path) -> None:
    config = tiny_drafter_config()
    config.use_cache = False
    config.save_pretrained(tmp_path)
    assert "use_cache" not in json.loads((tmp_path / "config.json").read_text())
