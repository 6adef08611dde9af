"""Tiny drafters with length heads and the versions tests publish of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny_models import tiny_drafter

from adaflash_hf import DFlashDrafterModel
from adaflash_hf.online.published_versions import VersionManifest
from adaflash_hf.online.publisher import Publisher


def adapted_drafter(seed: int = 4, **overrides: Any) -> DFlashDrafterModel:
    """A drafter with a length head; other seeds are other weights of the same configuration."""
    return tiny_drafter(seed=seed, length_head_config={"head_type": "mean_linear"}, **overrides)


def publish(publisher: Publisher, drafter: Any, **fields: Any) -> int:
    """Publishes the next version, as the child of the one in use."""
    pointer = publisher.pointer()
    parent = None if pointer is None else pointer.version
    manifest = VersionManifest(**{"version": publisher.next_version(), "parent": parent, **fields})
    return publisher.publish(drafter, manifest).version


def publish_constant(publisher: Publisher, value: float) -> int:
    """Publishes a version whose every weight is one number, so that a mixture of two versions would show."""
    drafter = adapted_drafter()
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.fill_(value)
    return publish(publisher, drafter)


def forge(directory: Path, name: str, change: Any) -> None:
    """Changes one tensor of a version on the disk and makes its checksums agree, as a careful attacker would."""
    import json

    from safetensors.torch import load_file, save_file

    from adaflash_hf.online.published_versions import MANIFEST_FILE, checksums_of

    tensors = load_file(directory / "model.safetensors")
    tensors[name] = change(tensors[name])
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    manifest = json.loads((directory / MANIFEST_FILE).read_text())
    manifest["files"] = checksums_of(directory)
    (directory / MANIFEST_FILE).write_text(json.dumps(manifest))


def train_on(drafter: DFlashDrafterModel, target: Any, trajectories: list, steps: int = 60) -> DFlashDrafterModel:
    """Teaches a tiny drafter some trajectories by heart, so that it drafts and broken weights do not."""
    from adaflash_hf.training.collator import DrafterDataCollator
    from adaflash_hf.training.draft_step import DraftStep
    from adaflash_hf.training.objectives import DraftObjective

    step = DraftStep(drafter, target, DraftObjective(hard_label_weight=1.0, labels="trajectory"))
    collator = DrafterDataCollator(drafter.config.draft_length, None)
    batch = collator([trajectory.example(0) for trajectory in trajectories])
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-2)
    for _ in range(steps):
        outcome = step.run(drafter, batch)
        loss = outcome.draft.loss if outcome.head is None else outcome.draft.loss + outcome.head.loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return drafter
