"""The target's hidden states that a drafter is conditioned on: how to ask for them and where to find them.

Layer ids are zero-based layer OUTPUTS throughout this package. What transformers means by an index has changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.utils import output_capturing


__all__ = ["concatenate_context_features", "hidden_states_to_request"]

# A list given as `output_hidden_states` counts layer outputs before transformers 5.23, and `hidden_states` entries,
# of which the embeddings are the first, since then. Remove with support for 5.22.
_FIRST_LAYER = 1 if hasattr(output_capturing, "selected_hidden_states") else 0


def hidden_states_to_request(layer_ids: Sequence[int]) -> list[int]:
    """Value of `output_hidden_states` that makes the target keep the outputs of these layers and no others.

    Args:
        layer_ids (`Sequence[int]`): Zero-based layers.
    """
    return [layer_id + _FIRST_LAYER for layer_id in layer_ids]


def concatenate_context_features(
    hidden_states: Sequence[Any],
    layer_ids: Sequence[int],
    num_layers: int,
    rows: int | None = None,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Puts the outputs of some layers side by side.

    Args:
        hidden_states (`Sequence`):
            The target's `hidden_states`, each `(batch_size, n, target_hidden_size)`; those not asked for are None.
        layer_ids (`Sequence[int]`): Zero-based layers.
        num_layers (`int`): Depth of the target.
        rows (`int`, *optional*): Keep only the first rows.
        device (`torch.device`, *optional*): Where to put them.

    Returns:
        `torch.Tensor` of shape `(batch_size, rows, len(layer_ids) * target_hidden_size)`.
    """
    # The length tells both conventions apart, and also models that ignore the list and return everything.
    first_layer = len(hidden_states) - num_layers
    return torch.cat([hidden_states[first_layer + i][:, :rows].to(device) for i in layer_ids], dim=-1)
