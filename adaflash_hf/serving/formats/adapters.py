"""PEFT adapters on drafters: merged into the weights, because no engine loads a drafter with an adapter on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...checkpoint_loading import ADAPTER_CONFIG_NAME
from ...configuration_dflash_drafter import DFlashDrafterConfig
from ...errors import DrafterCheckpointError
from .checkpoint_format import DrafterBundle
from .stored_checkpoint import open_json


__all__ = ["is_adapter", "read_adapter"]


def is_adapter(path: str, hub: Mapping[str, Any]) -> bool:
    """Whether a directory or Hub repository holds a PEFT adapter."""
    return open_json(path, ADAPTER_CONFIG_NAME, hub) is not None


def read_adapter(path: str, hub: Mapping[str, Any]) -> DrafterBundle:
    """
    Merges an adapter into the drafter it names.

    Args:
        path (`str`): Directory or Hub id of the adapter.
        hub (`Mapping`): Arguments of transformers' `cached_file`.

    Raises:
        DrafterCheckpointError: The drafter it names cannot be read, or the adapter does not fit it.
    """
    # Importing the training package takes seconds, which only adapters are worth.
    from ...training.lora import load_lora, merge_lora

    try:
        # In float32: the product of the adapter's factors is small beside the weight it is added to.
        merged = merge_lora(load_lora(path, dtype=torch.float32, **dict(hub)))
    except (OSError, RuntimeError, KeyError, ValueError) as error:
        base = (open_json(path, ADAPTER_CONFIG_NAME, hub) or {}).get("base_model_name_or_path")
        reason = " ".join(str(error).split())
        raise DrafterCheckpointError(f"{path} cannot be merged into its drafter {base}: {reason}") from error
    config = DFlashDrafterConfig.from_dict(merged.config.to_dict())
    note = "The adapter was merged into its drafter, in float32."
    return DrafterBundle(config, dict(merged.state_dict()), path, [note])
