"""Requests of `adaflash train` as its options would make them, for tests of its parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from adaflash_hf.commands.train_request import TrainRequest


def make_request(trajectories: Path, out: Path, **changes: Any) -> TrainRequest:
    """A new drafter of default settings, three trajectories held out."""
    fields: dict[str, Any] = {
        "start": "scratch" if changes.get("init") is None else "init",
        "target": "smollm2-135m",
        "dtype": "float32",
        "device": "cpu",
        "trajectories": [trajectories],
        "out": out,
        "init": None,
        "preset": None,
        "only": None,
        "lora": None,
        "shape": {},
        "causal_blocks": None,
        "length_head": "mean_linear",
        "given": {},
        "droppable": [],
        "teacher": "auto",
        "features": "auto",
        "steps": None,
        "held_out": 3,
        "max_tokens": 2048,
        "seed": 0,
        "resume": True,
        "report_to": [],
        "push_to_hub": None,
        "private": False,
        "license": None,
        "options": {},
    }
    return TrainRequest(**{**fields, **changes})
