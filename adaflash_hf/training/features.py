"""Target features of trajectories: computed by a forward pass, or read from safetensors shards beside them.

The shard of `trajectories-00007.parquet` is `features-00007.safetensors`; its tensor `"12"` belongs to row 12 and has
the shape `[prompt + response - 1, layers * hidden]`: the last token's features are never context of anything.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..atomic_files import written_aside
from ..errors import InvalidInputError
from ..generation.context_features import concatenate_context_features, forward_with_features


if TYPE_CHECKING:
    from transformers import PreTrainedModel


__all__ = ["FeatureShard", "TargetFeatures", "compute_target_features", "features_path", "write_features"]

FEATURES_PREFIX = "features"


class TargetFeatures(NamedTuple):
    """
    What the target's forward pass over whole sequences gives a drafter's training.

    Attributes:
        context: `[batch, n, layers * hidden]`, the outputs of the captured layers side by side.
        final: `[batch, n, hidden]`, input of the LM head; None unless asked for.
    """

    context: torch.Tensor
    final: torch.Tensor | None


@torch.no_grad()
def compute_target_features(
    target_model: PreTrainedModel, input_ids: torch.Tensor, layer_ids: Sequence[int], *, with_final: bool = False
) -> TargetFeatures:
    """
    Run the target over sequences padded on the right; padding cannot reach back into them, so no mask is needed.

    Args:
        target_model (`PreTrainedModel`):
            A causal target.
        input_ids (`torch.Tensor` of shape `[batch, n]`):
            Whole sequences.
        layer_ids (`Sequence[int]`):
            Layers to capture, zero-based: id i is the output of layer i.
        with_final (`bool`, *optional*, defaults to `False`):
            Whether to return the input of the LM head as well.
    """
    depth = target_model.config.get_text_config().num_hidden_layers
    kept = [*layer_ids, depth - 1] if with_final else layer_ids
    output = forward_with_features(target_model, kept, input_ids=input_ids, use_cache=False, logits_to_keep=1)
    context = concatenate_context_features(output.hidden_states, layer_ids, depth)
    # transformers puts the last layer's output there after the final norm.
    return TargetFeatures(context, output.hidden_states[-1] if with_final else None)


def features_path(trajectory_shard: Path) -> Path:
    """File of the features that belong to a shard of trajectories."""
    number = trajectory_shard.stem.rpartition("-")[2]
    return trajectory_shard.with_name(f"{FEATURES_PREFIX}-{number}.safetensors")


def write_features(
    path: Path, features: Sequence[torch.Tensor | None], target_model: PreTrainedModel, layer_ids: Sequence[int]
) -> None:
    """
    Write the features of one shard; the file appears when it is complete.

    Args:
        path (`Path`):
            See [`features_path`].
        features (`Sequence[torch.Tensor]`):
            `[n_i, layers * hidden]` for each row of the shard.
        target_model (`PreTrainedModel`):
            Where they come from; its name is kept with them.
        layer_ids (`Sequence[int]`):
            Layers they come from.
    """
    tensors = {str(row): tensor.contiguous() for row, tensor in enumerate(features) if tensor is not None}
    metadata = {"target": str(target_model.name_or_path), "target_layer_ids": json.dumps(list(layer_ids))}
    with written_aside(path) as partial:
        save_file(tensors, partial, metadata=metadata)


class FeatureShard:
    """
    Features of one shard, read row by row.

    The file is opened at each access: its header is small, and a data set can have more shards than a process may
    have open files.

    Args:
        path (`Path`):
            See [`features_path`].
        layer_ids (`Sequence[int]`, *optional*):
            Layers the drafter reads; features of others are refused. By default of whichever they are.
    """

    def __init__(self, path: Path, layer_ids: Sequence[int] | None = None) -> None:
        self.path = path
        if not path.exists():
            raise InvalidInputError(
                f"`{path.name}` is not in {str(path.parent)!r}: these trajectories were made without --features. "
                "Compute them on the fly (--features compute), or once, beside the trajectories (--features cache)."
            )
        with self._open() as file:
            stored = json.loads((file.metadata() or {}).get("target_layer_ids", "null"))
        self._num_layers = len(stored or [])
        if layer_ids is not None and stored != list(layer_ids):
            raise InvalidInputError(
                f"`{path.name}` in {str(path.parent)!r} holds features of the layers {stored}, but the drafter's "
                f"`target_layer_ids` are {list(layer_ids)}. Compute them on the fly (--features compute), or make "
                "new trajectories with these layers."
            )

    def __getitem__(self, row: int) -> torch.Tensor:
        with self._open() as file:
            return file.get_tensor(str(row))

    def check_width(self, hidden_size: int) -> None:
        """
        Refuse features of another target.

        Args:
            hidden_size (`int`):
                Of the target.

        Raises:
            InvalidInputError: they are of another width.
        """
        with self._open() as file:
            # Rows too short to learn from have none.
            width = next((file.get_slice(row).get_shape()[-1] for row in file.keys()), None)
        if width not in (None, self._num_layers * hidden_size):
            raise InvalidInputError(
                f"`{self.path.name}` in {str(self.path.parent)!r} holds features of width {width} from "
                f"{self._num_layers} layers, but the target's hidden size is {hidden_size}: another model made them. "
                "Make new trajectories with this target (adaflash trajectories), or pass their target."
            )

    def _open(self) -> Any:
        try:
            return safe_open(self.path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise InvalidInputError(
                f"`{self.path.name}` in {str(self.path.parent)!r} cannot be read ({error}); remove it, and have "
                "features computed on the fly (--features compute) or cached anew (--features cache)."
            ) from error
