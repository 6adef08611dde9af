"""The target's hidden states that a drafter is conditioned on: how to ask for them and where to find them.

Layer ids are zero-based layer OUTPUTS throughout this package. What transformers means by an index has changed.

transformers records outputs with hooks on every layer and every attention, which stay once they are there: a forward
pass of SmolLM2-135M over four rows takes 3 % longer for that, plain decoding's included. Where a model says which
layers its hidden states are the outputs of, hooks on those that are wanted do the same.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn
from transformers.utils import output_capturing

from ..errors import UnsupportedGenerationError
from .compatibility import unwrap_model


__all__ = ["concatenate_context_features", "forward_with_features", "hidden_states_to_request"]

# A list given as `output_hidden_states` counts layer outputs before transformers 5.23, and `hidden_states` entries,
# of which the embeddings are the first, since then. Remove with support for 5.22.
_FIRST_LAYER = 1 if hasattr(output_capturing, "selected_hidden_states") else 0


def hidden_states_to_request(layer_ids: Sequence[int]) -> list[int]:
    """Value of `output_hidden_states` that makes the target keep the outputs of these layers and no others.

    Args:
        layer_ids (`Sequence[int]`): Zero-based layers.
    """
    return [layer_id + _FIRST_LAYER for layer_id in layer_ids]


class _Recording(threading.local):
    """Outputs of the layers that the forward pass of this thread wants, None of those it has not come to yet."""

    outputs: dict[nn.Module, torch.Tensor | None] | None = None


_RECORDING = _Recording()
# Models and the layers whose outputs are their hidden states; None if nobody can say.
_LAYERS: weakref.WeakKeyDictionary[nn.Module, Sequence[nn.Module] | None] = weakref.WeakKeyDictionary()
_HOOKING = threading.Lock()


def forward_with_features(model: Any, layer_ids: Sequence[int], **inputs: Any) -> Any:
    """
    A forward pass that keeps the outputs of some layers.

    Args:
        model (`PreTrainedModel`): The target, possibly wrapped.
        layer_ids (`Sequence[int]`): Zero-based layers; without any this is the model's own forward pass.
        **inputs: What the model takes.

    Returns:
        `ModelOutput`: The model's output; its `hidden_states` are for [`concatenate_context_features`].

    Raises:
        UnsupportedGenerationError: If the model does not run all of its layers.
    """
    if not layer_ids:
        return model(return_dict=True, **inputs)
    layers = _layers_of(model)
    # What transformers calls the last layer's hidden state is that of the final norm after it.
    if layers is None or len(layers) - 1 in layer_ids:
        return model(return_dict=True, output_hidden_states=hidden_states_to_request(layer_ids), **inputs)
    before, recorded = _RECORDING.outputs, _hooked([layers[i] for i in layer_ids])
    _RECORDING.outputs = recorded
    try:
        outputs = model(return_dict=True, **inputs)
    finally:
        _RECORDING.outputs = before
    if missing := [i for i in layer_ids if recorded[layers[i]] is None]:
        del _LAYERS[unwrap_model(model)]  # found anew next time
        raise UnsupportedGenerationError(
            f"The target ran without its layers {missing}, whose outputs the drafter reads. If layers were exchanged "
            "just now, call again; a target that skips layers cannot be drafted for."
        )
    outputs.hidden_states = tuple(recorded.get(layer) for layer in layers)
    return outputs


def _record(layer: nn.Module, args: Any, output: Any) -> None:
    if torch.compiler.is_compiling():
        return  # compiled after it was hooked; nothing is recorded of such a model
    recorded = _RECORDING.outputs
    if recorded is not None and layer in recorded:
        recorded[layer] = output[0] if isinstance(output, tuple) else output


def _hooked(layers: Sequence[nn.Module]) -> dict[nn.Module, torch.Tensor | None]:
    """Layers with our hook on each and nothing recorded yet."""
    for layer in layers:
        if _record not in layer._forward_hooks.values():
            with _HOOKING:
                if _record not in layer._forward_hooks.values():
                    layer.register_forward_hook(_record)
    return dict.fromkeys(layers)


def _layers_of(model: Any) -> Sequence[nn.Module] | None:
    """The layers whose outputs transformers would record; None if nobody can say or a hook on them would hurt."""
    base = unwrap_model(model)
    if base not in _LAYERS:
        _LAYERS[base] = _find_layers(base)
    layers = _LAYERS[base]
    if layers is None or any(map(_is_compiled, (model, base, base.get_decoder(), layers[0]))):
        return None
    return layers


def _find_layers(model: Any) -> Sequence[nn.Module] | None:
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    kind = (getattr(decoder, "_can_record_outputs", None) or {}).get("hidden_states")
    if decoder is None or not inspect.isclass(kind):
        return None  # recorded by other rules, or by the model's own code
    layers: list[nn.Module] = [module for module in decoder.modules() if isinstance(module, cast("Any", kind))]
    return layers if len(layers) == model.config.get_text_config(decoder=True).num_hidden_layers else None


def _is_compiled(module: Any) -> bool:
    """Whether `torch.compile` has made a graph of a module, which a hook in it would break."""
    return (
        hasattr(module, "_orig_mod")
        or getattr(module, "_compiled_call_impl", None) is not None
        or hasattr(module.forward, "_torchdynamo_orig_callable")
    )


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
        device (`torch.device`, *optional*): Where to put them; by default where the first of the layers is.

    Returns:
        `torch.Tensor` of shape `(batch_size, rows, len(layer_ids) * target_hidden_size)`.

    Raises:
        UnsupportedGenerationError: If a layer returns something else.
    """
    # The length tells both conventions apart, and also models that ignore the list and return everything.
    first_layer = len(hidden_states) - num_layers
    states = [hidden_states[first_layer + i][:, :rows] for i in layer_ids]
    if states[0].ndim != 3:
        raise UnsupportedGenerationError(
            f"The target's layers return hidden states of shape {tuple(states[0].shape)}; a drafter reads one vector "
            "per token. Targets with several residual streams, such as DeepSeek-V4 or Gemma 3n, cannot be drafted "
            "for: generate without `assistant_model`."
        )
    # Layers may sit on different devices.
    return torch.cat([each.to(device or states[0].device) for each in states], dim=-1)
