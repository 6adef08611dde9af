"""Says before the first token whether a drafter fits a target.

A drafter that does not fit either fails deep inside a matmul or, worse, runs and has nothing accepted: neither tells
the user what is wrong. Only shapes, configurations and dtypes are read, so offloaded models cost nothing to check.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from ..errors import DrafterCompatibilityError


__all__ = ["check_drafter_fits_target", "unwrap_model"]

DRAFTER_MODEL_TYPE = "dflash_drafter"


def check_drafter_fits_target(drafter: nn.Module, target: nn.Module) -> None:
    """
    Compares a drafter with the target it is to draft for. Both may be wrapped by PEFT, `torch.compile` or DDP.

    Args:
        drafter (`DFlashDrafterModel`): The drafter.
        target (`PreTrainedModel`): The target, a decoder-only model with an LM head.

    Raises:
        DrafterCompatibilityError: They do not fit in architecture, depth, layer ids, hidden size, vocabulary, mask
            token or dtype. The message names both values and what to do.
    """
    base_drafter, base_target = unwrap_model(drafter), unwrap_model(target)
    config = getattr(base_drafter, "config", None)
    if config is None or config.model_type != DRAFTER_MODEL_TYPE:
        raise DrafterCompatibilityError(
            f"`drafter` is a {type(base_drafter).__name__} of type {getattr(config, 'model_type', None)!r}; expected "
            f"{DRAFTER_MODEL_TYPE!r}. Load it with `DFlashDrafterModel.from_pretrained`."
        )
    embedding, head = _token_layers(base_target)
    text_config = base_target.config.get_text_config(decoder=True)
    _check_depth(config, text_config)
    _check_hidden_size(config, text_config, embedding)
    _check_vocabulary(config, embedding, head)
    _check_dtype(base_drafter, base_target, embedding)
    _check_quantization(base_target)


def unwrap_model(module: Any) -> Any:
    """The model inside any stack of `torch.compile`, DDP and PEFT wrappers."""
    while True:
        if hasattr(module, "_orig_mod"):
            module = module._orig_mod
        elif isinstance(module, nn.parallel.DistributedDataParallel):
            module = module.module
        elif hasattr(module, "get_base_model"):
            module = module.get_base_model()
        else:
            return module


def _check_quantization(target: nn.Module) -> None:
    """Weights in few bits do no harm; activations whose scale is taken over all rows do."""
    if any(type(module).__module__.startswith("torch.ao.nn.quantized.dynamic") for module in target.modules()):
        raise DrafterCompatibilityError(
            "The target has dynamically quantised layers (`quantize_dynamic`), which scale activations by the largest "
            "of all rows: a block of tokens is computed otherwise than one token at a time. Quantise weights only, or "
            "generate without `assistant_model`."
        )


def _token_layers(target: Any) -> tuple[nn.Module, nn.Module]:
    """The target's input embedding and LM head, which the drafter borrows."""
    name = type(target).__name__
    config = getattr(target, "config", None)
    if config is None or not hasattr(target, "get_output_embeddings"):
        raise DrafterCompatibilityError(
            f"`target` is a {name}, not a transformers model. Load it with `AutoModelForCausalLM.from_pretrained`."
        )
    if config.is_encoder_decoder:
        raise DrafterCompatibilityError(
            f"`target` is a {name}, an encoder-decoder (`is_encoder_decoder` is True); the drafter reads hidden "
            "states of a decoder-only model. Generate without `assistant_model`."
        )
    head = target.get_output_embeddings()
    if head is None:
        raise DrafterCompatibilityError(
            f"`target` is a {name}, whose `get_output_embeddings()` is None, but the drafter needs the target's LM "
            "head to turn hidden states into tokens. Load it with `AutoModelForCausalLM.from_pretrained`."
        )
    return target.get_input_embeddings(), head


def _check_depth(config: PreTrainedConfig, text_config: PreTrainedConfig) -> None:
    depth = text_config.num_hidden_layers
    if config.num_target_layers != depth:
        raise DrafterCompatibilityError(
            f"The drafter was trained for a target of `num_target_layers` = {config.num_target_layers} layers, this "
            f"target has `num_hidden_layers` = {depth}.{_trained_for(config)} Use the drafter's own target or a "
            "drafter trained for this one."
        )
    outside = [layer_id for layer_id in config.target_layer_ids if not 0 <= layer_id < depth]
    if outside:
        raise DrafterCompatibilityError(
            f"`target_layer_ids` of the drafter is {config.target_layer_ids}, but the target's layers are numbered 0 "
            f"to {depth - 1}. Correct the ids in the drafter's config; they are zero-based layer outputs."
        )


def _check_hidden_size(config: PreTrainedConfig, text_config: PreTrainedConfig, embedding: nn.Module) -> None:
    if config.target_hidden_size != text_config.hidden_size:
        raise DrafterCompatibilityError(
            f"The drafter expects context features of `target_hidden_size` = {config.target_hidden_size}, the "
            f"target's `hidden_size` is {text_config.hidden_size}.{_trained_for(config)} Use a drafter trained for "
            "this target."
        )
    width = _size_of(embedding, "embedding_dim", dimension=1)
    if config.hidden_size != width:
        raise DrafterCompatibilityError(
            f"The drafter's `hidden_size` is {config.hidden_size}, the target's token embeddings have {width} "
            "columns; the drafter's input rows are those embeddings. Use a drafter trained for this target."
        )


def _check_vocabulary(config: PreTrainedConfig, embedding: nn.Module, head: nn.Module) -> None:
    embedding_rows = _size_of(embedding, "num_embeddings", dimension=0)
    head_rows = _size_of(head, "out_features", dimension=0)
    for name, rows in (("token embedding", embedding_rows), ("LM head", head_rows)):
        if config.vocab_size is not None and config.vocab_size != rows:
            raise DrafterCompatibilityError(
                f"The drafter's `vocab_size` is {config.vocab_size}, the target's {name} has {rows} rows."
                f"{_trained_for(config)} If the target is the right one and its embeddings were only resized, set "
                f"`drafter.config.vocab_size = {rows}`; otherwise use a drafter trained for this target."
            )
    if not 0 <= config.mask_token_id < embedding_rows:
        raise DrafterCompatibilityError(
            f"The drafter's `mask_token_id` is {config.mask_token_id}, but the target's token embedding has "
            f"{embedding_rows} rows. Correct `mask_token_id` in the drafter's config: it is the id the drafter was "
            "trained with, and a row added now would be random."
        )


def _check_dtype(drafter: Any, target: Any, embedding: nn.Module) -> None:
    drafter_dtype = _compute_dtype(drafter, getattr(drafter, "fc", None))
    target_dtype = _compute_dtype(target, embedding)
    if drafter_dtype != target_dtype:
        raise DrafterCompatibilityError(
            f"The drafter computes in {drafter_dtype}, the target in {target_dtype}; the drafter works on the "
            "target's hidden states as they are. Call `drafter.to(target.dtype)`, or load the drafter with "
            f"`dtype={target_dtype}`."
        )


def _compute_dtype(model: Any, layer: nn.Module | None) -> torch.dtype:
    """
    The dtype a model's hidden states have. `layer` is the one that makes the first of them; where its weight is
    quantised, the weight's dtype says nothing and the model's does.
    """
    weight = getattr(layer, "weight", None)
    # Eight-bit floats are storage formats: every quantiser computes in a wider type.
    if isinstance(weight, torch.Tensor) and weight.dtype.is_floating_point and weight.dtype.itemsize > 1:
        return weight.dtype
    configured = getattr(model.config, "dtype", None)
    return configured if isinstance(configured, torch.dtype) else model.dtype


def _size_of(layer: Any, attribute: str, dimension: int) -> int:
    """Rows or columns of a token layer. The attribute comes first because quantised weights are stored packed."""
    size = getattr(layer, attribute, None)
    return int(size) if isinstance(size, int) else int(layer.weight.shape[dimension])


def _trained_for(config: PreTrainedConfig) -> str:
    name = config.target_model_name_or_path
    return f" It was trained for {name}." if name else ""
