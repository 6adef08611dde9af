"""Online trainers of tiny drafters, on buffers of a tiny target's real answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from published_drafters import adapted_drafter
from safetensors.torch import load_file
from transformers import PreTrainedModel

from adaflash_hf import DFlashDrafterModel
from adaflash_hf.online.online_arguments import OnlineTrainingArguments
from adaflash_hf.online.online_trainer import OnlineTrainer
from adaflash_hf.online.publisher import Publisher
from adaflash_hf.online.recorded_trajectory import RecordedTrajectory
from adaflash_hf.online.replay_buffer import BufferSettings, ReplayBuffer


FAST: dict[str, Any] = {
    "round_size": 4,
    "epochs": 1,
    "learning_rate": 1e-2,
    "min_held_out": 1,
    "anchors_per_trajectory": 4,
}


def make_buffer(tmp_path: Path, traffic: list[RecordedTrajectory], **settings: Any) -> ReplayBuffer:
    """A buffer in `tmp_path / "buffer"` that holds a third of the prompts out."""
    buffer = ReplayBuffer(tmp_path / "buffer", BufferSettings(**{"held_out_share": 0.3, **settings}))
    buffer.append(traffic)
    return buffer


def make(
    tmp_path: Path,
    target: PreTrainedModel,
    drafter: DFlashDrafterModel | None = None,
    name: str = "published",
    **fields: Any,
) -> OnlineTrainer:
    """A trainer on that buffer; `fields` are training arguments."""
    arguments = OnlineTrainingArguments(**{**FAST, **fields})
    publisher = Publisher(tmp_path / name, keep_versions=20)
    buffer = ReplayBuffer(tmp_path / "buffer")
    return OnlineTrainer(drafter or adapted_drafter(), target, buffer, publisher, arguments, poll_s=0.01)


def published_weights(tmp_path: Path, version: int, name: str = "published") -> dict[str, torch.Tensor]:
    """Of one version."""
    return load_file(Publisher(tmp_path / name).path_of(version) / "model.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether two state dicts are equal."""
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


def times_trained(buffer: ReplayBuffer) -> dict[int, int]:
    """By trajectory."""
    with buffer.database.reading() as db:
        return dict(db.execute("SELECT id, times_trained FROM trajectories").fetchall())
