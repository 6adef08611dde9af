"""Puts trajectories into a padded batch, with the anchors of this epoch and the labels of their blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .anchors import label_positions, sample_anchors
from .objectives import IGNORED_LABEL


__all__ = ["DrafterDataCollator"]


class DrafterDataCollator:
    """
    Makes batches of [`TrajectoryDataset`] rows.

    A batch holds `input_ids` `[batch, n]` (padded on the right), `anchors` `[batch, num_anchors]` (0 where there are
    fewer), `labels` `[batch, num_anchors, draft_length]` (`IGNORED_LABEL` where there is no token), `finished` and
    `domain_ids` `[batch]`, and where the rows have them `context_hidden_states` `[batch, n - 1, layers * hidden]`,
    `teacher_ids` and `teacher_log_probs` `[batch, num_anchors, draft_length, k]`.

    Args:
        draft_length (`int`):
            Drafts of a block.
        anchors_per_trajectory (`int`, *optional*):
            Anchors sampled from each trajectory; None takes all.
        seed (`int`, *optional*, defaults to 0):
            With `epoch` and a row's index it decides the row's anchors.

    Attributes:
        epoch (`int`): Set by the trainer at the start of each epoch.
    """

    def __init__(self, draft_length: int, anchors_per_trajectory: int | None, seed: int = 0) -> None:
        self.draft_length = draft_length
        self.anchors_per_trajectory = anchors_per_trajectory
        self.seed = seed
        self.epoch = 0

    def __call__(self, examples: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        anchors = [self._anchors(example) for example in examples]
        longest = max(len(example["input_ids"]) for example in examples)
        count = max(len(positions) for positions in anchors)
        batch = {
            "input_ids": torch.zeros(len(examples), longest, dtype=torch.long),
            "anchors": torch.zeros(len(examples), count, dtype=torch.long),
            "labels": torch.full((len(examples), count, self.draft_length), IGNORED_LABEL),
            "finished": torch.tensor([example["finished"] for example in examples]),
            "domain_ids": torch.tensor([example["domain_id"] for example in examples]),
        }
        for row, (example, positions) in enumerate(zip(examples, anchors, strict=True)):
            ids = example["input_ids"]
            batch["input_ids"][row, : len(ids)] = ids
            batch["anchors"][row, : len(positions)] = positions
            places = label_positions(positions, self.draft_length)  # [anchors, draft_length]
            exists = places < len(ids)
            labels = ids[places.clamp(max=len(ids) - 1)]
            batch["labels"][row, : len(positions)] = labels.masked_fill(~exists, IGNORED_LABEL)
        if "teacher_ids" in examples[0]:
            batch |= self._teacher(examples, anchors, count)
        if "context_hidden_states" in examples[0]:
            batch["context_hidden_states"] = _pad(
                [example["context_hidden_states"] for example in examples], longest - 1
            )
        return batch

    def _anchors(self, example: dict[str, Any]) -> torch.Tensor:
        # The last token of a trajectory has nothing after it to draft.
        first, end = example["prompt_length"], len(example["input_ids"]) - 1
        return sample_anchors(first, end, self.anchors_per_trajectory, (self.seed, self.epoch, example["index"]))

    def _teacher(
        self, examples: Sequence[dict[str, Any]], anchors: Sequence[torch.Tensor], count: int
    ) -> dict[str, torch.Tensor]:
        batch = {}
        for name in ("teacher_ids", "teacher_log_probs"):
            first = examples[0][name]
            shape = (len(examples), count, self.draft_length, first.shape[-1])
            batch[name] = torch.zeros(shape, dtype=torch.long if name == "teacher_ids" else first.dtype)
            for row, (example, positions) in enumerate(zip(examples, anchors, strict=True)):
                # Row r of the teacher is its distribution of response token r. Places beyond the end repeat the last
                # row; their labels are ignored.
                places = label_positions(positions, self.draft_length) - example["prompt_length"]
                values = example[name][places.clamp(max=len(example[name]) - 1)]
                batch[name][row, : len(positions)] = values.to(batch[name].dtype)
        return batch


def _pad(rows: Sequence[torch.Tensor], length: int) -> torch.Tensor:
    padded = rows[0].new_zeros(len(rows), length, rows[0].shape[-1])
    for row, values in enumerate(rows):
        padded[row, : len(values)] = values
    return padded
