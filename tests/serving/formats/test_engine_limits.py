from __future__ import annotations

from typing import Any

import pytest
from tiny_checkpoints import HEAD
from tiny_models import tiny_drafter_config

from adaflash_hf.errors import DrafterExportError
from adaflash_hf.serving.formats.engine_limits import READERS, limits_of, refuse_what_is_lost


def fatal_for(**fields: Any) -> set[str]:
    config = tiny_drafter_config(**fields)
    return {reader for reader in READERS if any(limit.is_fatal for limit in limits_of(config, reader))}


@pytest.mark.parametrize(
    ("fields", "readers"),
    [
        ({"length_head_config": HEAD}, set()),
        ({"block_layout": "anchor_first", "length_head_config": HEAD}, set(READERS) - {"speculators"}),
        ({"vocab_size": None, "length_head_config": HEAD}, set(READERS)),
        (
            {"input_embedding_scale": 2.0, "length_head_config": HEAD},
            {"sglang", "sglang-plugin", "vllm", "speculators"},
        ),
        (
            {"target_hidden_size": 16, "length_head_config": HEAD},
            {"z-lab", "adaflash-authors", "sglang", "sglang-plugin"},
        ),
        ({"hidden_act": "gelu", "length_head_config": HEAD}, {"sglang", "sglang-plugin", "vllm"}),
        ({"is_causal": True, "length_head_config": HEAD}, {"speculators"}),
        ({}, {"adaflash-authors"}),
        ({"length_head_config": {"bottleneck_size": 4}}, {"adaflash-authors"}),
    ],
)
def test_who_cannot_take_what(fields: dict[str, Any], readers: set[str]) -> None:
    assert fatal_for(**fields) == readers


@pytest.mark.parametrize(
    ("reader", "fields", "note"),
    [
        ("sglang", {"length_head_config": HEAD}, "length head is left out"),
        ("vllm", {"length_head_config": HEAD}, "length head is left out"),
        ("sglang", {"draft_vocab_size": 5}, "draft vocabulary of 5 tokens is left out"),
        (
            "vllm",
            {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4},
            "VLLM_USE_V2_MODEL_RUNNER=1",
        ),
        ("vllm", {"output_multiplier": 0.5}, "unknown to vLLM"),
        ("speculators", {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4}, "from the anchor"),
        (
            "speculators",
            {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4},
            "every layer of a speculators checkpoint causal",
        ),
    ],
)
def test_what_is_left_out_is_noted(reader: str, fields: dict[str, Any], note: str) -> None:
    assert any(note in text for text in refuse_what_is_lost(tiny_drafter_config(**fields), reader))


def test_nothing_is_said_without_cause() -> None:
    config = tiny_drafter_config()
    assert [refuse_what_is_lost(config, reader) for reader in ("sglang", "sglang-plugin", "vllm", "speculators")] == (
        [[]] * 4
    )


def test_a_refusal_names_everything_at_once() -> None:
    config = tiny_drafter_config(block_layout="anchor_first", input_embedding_scale=3.0)
    with pytest.raises(DrafterExportError, match="written for SGLang's DFLASH: .*anchor_first.*embedding_scale` is 3"):
        refuse_what_is_lost(config, "sglang")
