"""What export and conversion need of a target without loading it: its configuration, its embedding, its LM head."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import safe_open
from transformers import AutoConfig, PreTrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from ...embedded_target import EMBEDDED_TARGET_NAME, embedded_target_directory
from ...error_text import first_line
from ...errors import InvalidInputError
from ...hub_connection import hub_or_cache


__all__ = ["TargetFiles"]

_EMBEDDING_ENDING = "embed_tokens.weight"
_HEAD_ENDING = "lm_head.weight"


class TargetFiles:
    """
    A target's files. Nothing is read before it is asked for.

    Args:
        name (`str`): Directory, Hub id, or the name of the embedded target.
        hub (`Mapping`, *optional*): Arguments of transformers' `cached_file`, such as `token`.
    """

    def __init__(self, name: str, hub: Mapping[str, Any] | None = None) -> None:
        self.name = name
        self._hub = dict(hub or {})

    @cached_property
    def path(self) -> str:
        """What to give to another program as the target: a directory or a Hub id."""
        return str(embedded_target_directory()) if self.name == EMBEDDED_TARGET_NAME else self.name

    @cached_property
    def full_config(self) -> PreTrainedConfig:
        """
        Its configuration.

        Raises:
            InvalidInputError: It cannot be found or read.
        """
        try:
            with hub_or_cache(self.path):
                return AutoConfig.from_pretrained(self.path, trust_remote_code=False, **self._hub)
        except (OSError, ValueError, KeyError, StrictDataclassError) as error:
            reason = first_line(error)
            raise InvalidInputError(
                f"`target` is {self.name!r} and its config.json cannot be read ({reason}). Pass the directory or Hub "
                "id of the model the drafter was trained for."
            ) from error

    @cached_property
    def config(self) -> PreTrainedConfig:
        """The part of its configuration that describes the decoder."""
        return self.full_config.get_text_config(decoder=True)

    def embedding(self) -> torch.Tensor:
        """The token embedding, `[vocab_size, hidden_size]`."""
        return self._read(_EMBEDDING_ENDING)

    def lm_head(self) -> torch.Tensor:
        """The LM head's weight, `[vocab_size, hidden_size]`: the embedding's where the two are tied."""
        if not any(name.endswith(_HEAD_ENDING) for name in self._files_of_tensors):
            return self._read(_EMBEDDING_ENDING)
        return self._read(_HEAD_ENDING)

    @cached_property
    def _files_of_tensors(self) -> dict[str, str]:
        """For each tensor the name of its file."""
        index = self._find(SAFE_WEIGHTS_INDEX_NAME)
        if index is not None:
            return dict(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"])
        single = self._find(SAFE_WEIGHTS_NAME)
        if single is None:
            raise InvalidInputError(
                f"`target` is {self.name!r}, which has no safetensors weights, and its embedding or LM head is "
                "needed. Pass a directory or Hub id that has."
            )
        with safe_open(single, framework="pt") as handle:
            return dict.fromkeys(handle.keys(), SAFE_WEIGHTS_NAME)

    def _read(self, ending: str) -> torch.Tensor:
        # Multimodal targets keep their decoder deeper down, under varying prefixes.
        names = [name for name in self._files_of_tensors if name == ending or name.endswith(f".{ending}")]
        if len(names) != 1:
            raise InvalidInputError(
                f"`target` is {self.name!r}; {len(names)} of its tensors are called {ending!r}: {names[:3]}. Expected "
                "exactly one."
            )
        file = self._find(self._files_of_tensors[names[0]])
        if file is None:
            raise InvalidInputError(f"`target` is {self.name!r}; its file with {names[0]!r} is missing.")
        with safe_open(file, framework="pt") as handle:
            return handle.get_tensor(names[0])

    def _find(self, filename: str) -> str | None:
        try:
            with hub_or_cache(self.path):
                found = cached_file(self.path, filename, _raise_exceptions_for_missing_entries=False, **self._hub)
        except (OSError, ValueError) as error:
            reason = first_line(error)
            raise InvalidInputError(f"`target` is {self.name!r} and cannot be read ({reason}).") from error
        return None if found is None else os.fspath(found)
