"""Strict loading of PEFT adapters: their tensors are compared with those that the model takes, before one is loaded.

PEFT and transformers leave a missing tensor as it was initialised, drop one that has no place, and unpickle `.bin`
files. An adapter of another drafter then loads without an error and drafts nothing that is accepted.
"""

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import cached_file

from .checkpoint_files import listed_names, tensor_shapes
from .errors import DrafterCheckpointError, MissingDependencyError


ADAPTER_CONFIG_NAME = "adapter_config.json"
ADAPTER_WEIGHTS_NAME = "adapter_model.safetensors"


@dataclass(frozen=True)
class AdapterBase:
    """
    The model that an adapter changes.

    Attributes:
        name_or_path: Directory or Hub repository.
        revision: Commit of the repository that the adapter was trained on; None if that is not recorded.
    """

    name_or_path: str
    revision: str | None = None

    def load_arguments(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """`from_pretrained`'s arguments for the base, made of those for the adapter, which is in another place."""
        others = {name: value for name, value in kwargs.items() if name not in ("revision", "subfolder")}
        return {**others, "revision": self.revision or "main"}


def base_of_adapter(path: Any, hub: Mapping[str, Any]) -> AdapterBase | None:
    """
    The model that a PEFT adapter directory or repository belongs to; None if `path` is not one.

    Args:
        path (`str` or `os.PathLike`): Directory or Hub repository.
        hub (`dict`): Arguments of `from_pretrained` that say where on the Hub.

    Raises:
        DrafterCheckpointError: It is an adapter that does not say.
    """
    file = cached_file(path, ADAPTER_CONFIG_NAME, _raise_exceptions_for_missing_entries=False, **hub)
    if file is None:
        return None
    with open(file, encoding="utf-8") as handle:
        fields = json.load(handle)
    base = fields.get("base_model_name_or_path")
    if not base:
        raise DrafterCheckpointError(
            f"{path}: `base_model_name_or_path` in {ADAPTER_CONFIG_NAME} is {base!r}, so the drafter that the adapter "
            "changes is unknown. Write its path there, or load that drafter and call `load_adapter`."
        )
    return AdapterBase(str(base), fields.get("revision"))


def check_adapter_fits(model: PreTrainedModel, path: Any, hub: Mapping[str, Any] | None = None) -> None:
    """
    Compares the tensors in an adapter's file with those that the adapter has when put on `model`.

    Args:
        model (`PreTrainedModel`): The base; only its configuration is used.
        path (`str` or `os.PathLike`): Directory or Hub repository of the adapter.
        hub (`dict`, *optional*): Arguments of `from_pretrained` that say where on the Hub.

    Raises:
        DrafterCheckpointError: The adapter is for another model, incomplete, or pickled.
        MissingDependencyError: PEFT is not installed.
    """
    # Inside `try`, which also tells transformers that drafters themselves load without PEFT.
    try:
        import peft
    except ImportError as error:
        raise MissingDependencyError(
            f"{path} is a PEFT adapter, and peft is not installed; run: pip install peft"
        ) from error
    hub = dict(hub or {})
    weights = cached_file(path, ADAPTER_WEIGHTS_NAME, _raise_exceptions_for_missing_entries=False, **hub)
    if weights is None:
        raise DrafterCheckpointError(
            f"{path} has no `{ADAPTER_WEIGHTS_NAME}`. Pickled adapters (.bin) are never opened, because opening one "
            "can run code; save the adapter again as safetensors."
        )
    hub.pop("proxies", None)  # PEFT does not take it
    config = peft.PeftConfig.from_pretrained(path, **hub)
    if hasattr(config, "init_lora_weights"):
        config.init_lora_weights = False  # some ways to start compute with the base's weights
    with torch.device("meta"):
        skeleton = type(model)(copy.deepcopy(model.config))
        skeleton.name_or_path = config.base_model_name_or_path  # PEFT warns of another name
        try:
            adapted = peft.get_peft_model(skeleton, config)
        except ValueError as error:
            raise DrafterCheckpointError(
                f"{path}: the adapter cannot be put on a {type(model).__name__} ({error}). Load it on its own base."
            ) from error
    expected = {name: tuple(tensor.shape) for name, tensor in peft.get_peft_model_state_dict(adapted).items()}
    _compare(expected, tensor_shapes([weights]), path)


def _compare(expected: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]], path: Any) -> None:
    if missing := sorted(expected.keys() - found.keys()):
        raise DrafterCheckpointError(
            f"{path}: {len(missing)} tensors of the adapter are missing: {listed_names(missing)}. It was trained on a "
            "drafter with fewer layers or another head, or its file is incomplete; load it on its own base."
        )
    if unexpected := sorted(found.keys() - expected.keys()):
        raise DrafterCheckpointError(
            f"{path}: {len(unexpected)} tensors of the adapter have no place in the drafter: "
            f"{listed_names(unexpected)}. {_hint(unexpected)}"
        )
    for name, shape in expected.items():
        if found[name] != shape:
            raise DrafterCheckpointError(
                f"{path}: `{name}` has shape {list(found[name])}, on this drafter it would be {list(shape)}. The "
                "adapter belongs to a drafter of other sizes; load it on its own base."
            )


def _hint(unexpected: list[str]) -> str:
    if any("length_head." in name for name in unexpected):
        return "It brings a length head of another shape, or for a drafter that has none; load it on its own base."
    return "It was trained on a drafter with more layers or another head; load it on its own base."


__all__ = [
    "ADAPTER_CONFIG_NAME",
    "ADAPTER_WEIGHTS_NAME",
    "AdapterBase",
    "base_of_adapter",
    "check_adapter_fits",
]
