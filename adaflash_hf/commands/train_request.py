"""What the options of one run of `adaflash train` came to."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from ..training.presets import DrafterPreset
    from .train_lora import LoraOptions


__all__ = ["TrainRequest"]

_CONFIDENCE_HEAD = "confidence-head"


@dataclass(frozen=True)
class TrainRequest:
    """
    What is asked of a run.

    Attributes:
        start: What is trained, see `Situation`.
        lora: An adapter to train in place of all weights.
        shape: Given fields of a new drafter, by option name.
        causal_blocks: Whether rows of a block see only those before them, if that was given.
        given: Given settings that have defaults in `recipes.py`.
        droppable: Those of them that a configuration file gave, which may turn out to have no effect.
        options: All options by name, for the configuration written beside the drafter.
    """

    start: Any
    target: str
    dtype: str
    device: str | None
    trajectories: list[Path]
    out: Path
    init: str | None
    preset: DrafterPreset | None
    only: str | None
    lora: LoraOptions | None
    shape: dict[str, Any]
    causal_blocks: bool | None
    length_head: str | None
    given: dict[str, Any]
    droppable: list[str]
    teacher: str
    features: str
    steps: int | None
    held_out: int
    max_tokens: int
    seed: int
    resume: bool
    report_to: list[str]
    push_to_hub: str | None
    private: bool
    license: str | None
    options: dict[str, Any]

    @property
    def is_main(self) -> bool:
        """Whether this process speaks and writes: one of several does, started by torchrun or accelerate."""
        return os.environ.get("RANK", "0") == "0"

    @property
    def num_processes(self) -> int:
        """How many processes train together."""
        return int(os.environ.get("WORLD_SIZE", "1"))

    @property
    def checkpoints(self) -> Path:
        """Where the run is kept to be resumed."""
        from ..training.run_records import CHECKPOINTS

        return self.out / CHECKPOINTS

    @property
    def trains_confidence_head(self) -> bool:
        """Whether it is a head beside the drafter that is trained."""
        return self.only == _CONFIDENCE_HEAD
