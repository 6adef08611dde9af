"""Shapes of published drafters, to train ones that serving engines take for the same.

Sizes, layer ids and mask tokens are those of the DFlash checkpoints released for these targets; for Qwen3-1.7B, which
has none, they follow the same rules. What is not listed is the same for all: blocks of 16, heads of 128, RMS norms
with 1e-6, no biases.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from ..configuration_dflash_drafter import DFlashDrafterConfig
from ..errors import InvalidInputError


__all__ = ["PRESETS", "DrafterPreset", "find_preset"]


@dataclass(frozen=True)
class DrafterPreset:
    """
    The shape of one target's drafter.

    Attributes:
        name: What the command line calls it.
        target: Hub id of the target.
        fields: Fields of [`DFlashDrafterConfig`].
    """

    name: str
    target: str
    fields: Mapping[str, Any]

    def config(self, **overrides: Any) -> DFlashDrafterConfig:
        """
        The drafter's configuration.

        Args:
            overrides:
                Fields to change.
        """
        return DFlashDrafterConfig(**{**self.fields, "target_model_name_or_path": self.target, **overrides})


def find_preset(name: str) -> DrafterPreset:
    """
    A preset by its name.

    Args:
        name (`str`):
            Key of `PRESETS`.
    """
    if name not in PRESETS:
        close = get_close_matches(name.lower(), PRESETS, n=1)
        nearest = f" Did you mean {close[0]!r}?" if close else ""
        raise InvalidInputError(f"`preset` is {name!r}; known presets are {', '.join(PRESETS)}.{nearest}")
    return PRESETS[name]


def _preset(
    name: str,
    target: str,
    *,
    layers: int = 5,
    sizes: tuple[int, int],
    heads: tuple[int, int],
    target_layers: int,
    layer_ids: list[int],
    vocab_size: int = 151936,
    mask_token_id: int = 151669,
    positions: int = 40960,
    theta: float = 1e6,
) -> DrafterPreset:
    fields = {
        "num_hidden_layers": layers,
        "hidden_size": sizes[0],
        "intermediate_size": sizes[1],
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "hidden_act": "silu",
        "block_size": 16,
        "num_target_layers": target_layers,
        "target_layer_ids": layer_ids,
        "mask_token_id": mask_token_id,
        "vocab_size": vocab_size,
        "max_position_embeddings": positions,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
    }
    return DrafterPreset(name, target, fields)


PRESETS: Mapping[str, DrafterPreset] = {
    preset.name: preset
    for preset in (
        _preset(
            "qwen3-1.7b",
            "Qwen/Qwen3-1.7B",
            sizes=(2048, 6144),
            heads=(16, 8),
            target_layers=28,
            layer_ids=[1, 7, 13, 19, 25],
        ),
        _preset(
            "qwen3-4b",
            "Qwen/Qwen3-4B",
            sizes=(2560, 9728),
            heads=(32, 8),
            target_layers=36,
            layer_ids=[1, 9, 17, 25, 33],
        ),
        _preset(
            "qwen3-8b",
            "Qwen/Qwen3-8B",
            sizes=(4096, 12288),
            heads=(32, 8),
            target_layers=36,
            layer_ids=[1, 9, 17, 25, 33],
        ),
        _preset(
            "qwen3-coder-30b-a3b",
            "Qwen/Qwen3-Coder-30B-A3B-Instruct",
            layers=8,
            sizes=(2048, 6144),
            heads=(32, 4),
            target_layers=48,
            layer_ids=[1, 12, 23, 34, 45],
            positions=262144,
            theta=1e7,
        ),
        _preset(
            "qwen3.5-9b",
            "Qwen/Qwen3.5-9B",
            sizes=(4096, 12288),
            heads=(32, 8),
            target_layers=32,
            layer_ids=[1, 8, 15, 22, 29],
            vocab_size=248320,
            mask_token_id=248070,
            positions=262144,
            theta=1e7,
        ),
    )
}
