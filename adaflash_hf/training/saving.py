"""Writes what was trained as an ordinary checkpoint, however it was wrapped, sharded or adapted in training."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..atomic_directories import files_written_aside
from ..generation.compatibility import unwrap_model
from .lora import merge_lora


__all__ = ["ADAPTER_DIRECTORY", "save_trained"]

ADAPTER_DIRECTORY = "adapter"
_COMPILED = "_orig_mod."


def save_trained(
    model: Any, state_dict: Mapping[str, torch.Tensor], directory: str | Path, dtype: torch.dtype | None = None
) -> None:
    """
    Write a drafter or head from its full state dict. Of one with a LoRA adapter, the merged drafter goes into
    `directory` and the adapter into `directory/adapter`. What is there is replaced when all of it is written.

    Args:
        model (`nn.Module`):
            What was trained; only its configuration and its adapter's are used, so its weights may be sharded.
        state_dict (`Mapping[str, torch.Tensor]`):
            All of its weights, under the names that training gave them.
        directory (`str` or `Path`):
            Where to write.
        dtype (`torch.dtype`, *optional*):
            What to round the weights to; by default they stay as they are. An adapter is not rounded.
    """
    weights = {name.replace(_COMPILED, ""): tensor for name, tensor in state_dict.items()}
    trained = getattr(model, "_orig_mod", model)
    whole = unwrap_model(trained)
    with torch.device("meta"):
        rebuilt = type(whole)(copy.deepcopy(whole.config))
    with files_written_aside(Path(directory)) as partial:
        if hasattr(trained, "peft_config"):
            adapted = _adapted_skeleton(rebuilt, trained.peft_config)
            _fill(adapted, weights)
            adapted.save_pretrained(partial / ADAPTER_DIRECTORY)
            rebuilt = merge_lora(adapted)
        else:
            _fill(rebuilt, weights)
        rebuilt.to(dtype or rebuilt.dtype).save_pretrained(partial)


def _adapted_skeleton(base: Any, configs: Mapping[str, Any]) -> Any:
    from peft import get_peft_model

    ((name, config),) = configs.items()
    config = copy.deepcopy(config)
    config.init_lora_weights = False  # some ways to start compute with the base's weights
    base.name_or_path = config.base_model_name_or_path  # PEFT would write the base's own
    with torch.device("meta"):
        adapted = get_peft_model(base, config, adapter_name=name)
    adapted.peft_config[name].init_lora_weights = configs[name].init_lora_weights
    return adapted


def _fill(model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Gives a model without weights these; what is computed from the configuration is not among them."""
    model.load_state_dict(weights, assign=True)
