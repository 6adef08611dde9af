"""Training of drafters and length heads: trajectories, objectives, and a trainer on transformers' `Trainer`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy_imports import lazy_names


if TYPE_CHECKING:
    from .chunked_loss import draft_loss
    from .draft_step import DraftStep
    from .drafter_trainer import DrafterTrainer, last_complete_checkpoint
    from .initialization import (
        attach_length_head,
        choose_mask_token_id,
        drafter_config_for_target,
        initialize_from_target,
        new_confidence_head,
    )
    from .objectives import DraftObjective
    from .training_arguments import DrafterTrainingArguments
    from .trajectories import TrajectorySettings, generate_trajectories
    from .trajectory_dataset import TrajectoryDataset, cache_target_features, split_by_prompt
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "chunked_loss": ["draft_loss"],
            "draft_step": ["DraftStep"],
            "drafter_trainer": ["DrafterTrainer", "last_complete_checkpoint"],
            "initialization": [
                "attach_length_head",
                "choose_mask_token_id",
                "drafter_config_for_target",
                "initialize_from_target",
                "new_confidence_head",
            ],
            "objectives": ["DraftObjective"],
            "training_arguments": ["DrafterTrainingArguments"],
            "trajectories": ["TrajectorySettings", "generate_trajectories"],
            "trajectory_dataset": ["TrajectoryDataset", "cache_target_features", "split_by_prompt"],
        },
    )

__all__ = [
    "DraftObjective",
    "DraftStep",
    "DrafterTrainer",
    "DrafterTrainingArguments",
    "TrajectoryDataset",
    "TrajectorySettings",
    "attach_length_head",
    "cache_target_features",
    "choose_mask_token_id",
    "draft_loss",
    "drafter_config_for_target",
    "generate_trajectories",
    "initialize_from_target",
    "last_complete_checkpoint",
    "new_confidence_head",
    "split_by_prompt",
]
