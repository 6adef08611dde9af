"""The pieces every format is made of: a drafter in native terms, what a writer makes of it, and how both are named."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ...configuration_dflash_drafter import DFlashDrafterConfig
from .reading import Reading, ReadOptions
from .stored_checkpoint import StoredCheckpoint
from .target_files import TargetFiles


__all__ = ["CheckpointFormat", "DrafterBundle", "DrafterForm", "WriteOptions"]


@dataclass(frozen=True)
class DrafterBundle:
    """
    A drafter in native terms.

    Args:
        config (`DFlashDrafterConfig`): Its configuration.
        tensors (`Mapping[str, torch.Tensor]`): Its tensors under native names, exactly those the model has.
        source (`str`): Where it came from, for messages.
        notes (`list[str]`): What reading it changed or assumed.
    """

    config: DFlashDrafterConfig
    tensors: Mapping[str, torch.Tensor]
    source: str
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class WriteOptions:
    """
    Args:
        target (`TargetFiles`, *optional*): The target, for formats that name it or hold rows of its LM head.
        dtype (`torch.dtype`, *optional*): Of the weights; the format's own choice by default.
    """

    target: TargetFiles | None = None
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class DrafterForm:
    """
    What a writer makes of a drafter, before it is on the disk.

    Args:
        config (`dict`): The config.json to be written.
        tensors (`Mapping[str, torch.Tensor]`): The tensors to be written, under the format's names.
        holds (`DrafterBundle`): The drafter that a reader of the files must find in them.
        notes (`list[str]`): What the format leaves out, and what the user should know.
    """

    config: dict[str, Any]
    tensors: Mapping[str, torch.Tensor]
    holds: DrafterBundle
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class CheckpointFormat:
    """
    Args:
        name (`str`): As on the command line.
        title (`str`): For people.
        matches (`Callable`, *optional*): Whether a checkpoint is in this format; None for a variant of another one.
        read (`Callable`, *optional*): None if the format is only written.
        write (`Callable`, *optional*): None if the format is only read.
        dtype (`torch.dtype`, *optional*): What its reader needs the weights in; None for any.
    """

    name: str
    title: str
    matches: Callable[[StoredCheckpoint], bool] | None = None
    read: Callable[[StoredCheckpoint, ReadOptions], Reading] | None = None
    write: Callable[[DrafterBundle, WriteOptions], DrafterForm] | None = None
    dtype: torch.dtype | None = None
