"""New drafters: sizes from a target, weights from its last layers, a mask token that means nothing yet.

A drafter that starts as the end of its target is far ahead of a random one at first: on SmolLM2-135M the loss after 25
steps was 11.6 instead of 29.4. One layer did not stay ahead in what is accepted, four were not behind after 1,500
steps (`adaflash evaluate scratch`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..configuration_confidence_head import ConfidenceHeadConfig
from ..configuration_dflash_drafter import DFlashDrafterConfig, build_target_layer_ids
from ..configuration_length_head import LengthHeadConfig
from ..errors import InvalidInputError
from ..modeling_confidence_head import ConfidenceHeadModel
from ..modeling_dflash_drafter import DFlashDrafterModel
from ..modeling_length_head import LengthHeadModel


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


__all__ = [
    "attach_length_head",
    "choose_mask_token_id",
    "default_target_layer_ids",
    "drafter_config_for_target",
    "initialize_from_target",
    "new_confidence_head",
]

_DEFAULT_LAYERS = 5
_DEFAULT_FEATURES = 5
# What RoPE dictionaries of targets may hold that a drafter's plain rotary embedding has no use for.
_FOREIGN_ROPE_KEYS = ("partial_rotary_factor", "mrope_section", "mrope_interleaved")
_UNUSED_TOKEN = re.compile(r"reserved|unused|placeholder", re.IGNORECASE)
# How much of the random context projection stays beside the last captured layer, which starts as the whole of it.
_CONTEXT_NOISE = 0.1


def drafter_config_for_target(
    target_model: PreTrainedModel,
    *,
    mask_token_id: int,
    num_hidden_layers: int | None = None,
    block_size: int = 16,
    target_layer_ids: list[int] | None = None,
    length_head: str | None = "mean_linear",
    **fields: Any,
) -> DFlashDrafterConfig:
    """
    A drafter's configuration with the sizes of its target.

    Args:
        target_model (`PreTrainedModel`):
            The target.
        mask_token_id (`int`):
            See [`choose_mask_token_id`].
        num_hidden_layers (`int`, *optional*):
            Layers of the drafter; by default 5, or as many as the target has if those are fewer.
        block_size (`int`, *optional*, defaults to 16):
            Rows of a block, the anchor included.
        target_layer_ids (`list[int]`, *optional*):
            Layers to read, see [`default_target_layer_ids`].
        length_head (`str`, *optional*, defaults to `"mean_linear"`):
            `head_type` of the length head; None for a drafter without one.
        fields:
            Any other field of [`DFlashDrafterConfig`].
    """
    config = target_model.config.get_text_config()
    depth, vocab_size = config.num_hidden_layers, target_model.get_input_embeddings().weight.shape[0]
    if target_layer_ids is None:
        target_layer_ids = default_target_layer_ids(target_model)
    heads = config.num_attention_heads
    derived = {
        "vocab_size": vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": num_hidden_layers or min(_DEFAULT_LAYERS, depth),
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "hidden_act": getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", "silu"),
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": getattr(config, "rms_norm_eps", 1e-6),
        "rope_parameters": _rope_parameters(config),
        "block_size": block_size,
        "mask_token_id": mask_token_id,
        "num_target_layers": depth,
        "target_layer_ids": target_layer_ids,
        "target_hidden_size": config.hidden_size,
        "input_embedding_scale": _embedding_scale(target_model),
        "output_multiplier": 1.0 / (getattr(config, "logits_scaling", None) or 1.0),
        "final_logit_softcapping": getattr(config, "final_logit_softcapping", None),
        "target_model_name_or_path": target_model.name_or_path or None,
        "length_head_config": None if length_head is None else {"head_type": length_head},
    }
    return DFlashDrafterConfig(**{**derived, **fields})


def default_target_layer_ids(target_model: PreTrainedModel) -> list[int]:
    """Layers a new drafter reads: five, evenly spread, or as many as a shallow target has apart from its ends."""
    depth = target_model.config.get_text_config().num_hidden_layers
    # The family reads between the second and the third-last layer.
    return build_target_layer_ids(depth, min(_DEFAULT_FEATURES, max(depth - 3, 1)))


def choose_mask_token_id(target_model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """
    A token whose embedding can stand for "not drafted yet": one the target never says and no prompt holds.

    In this order: the tokenizer's mask token, the first embedding row that no token uses, a token named reserved or
    unused, the last special token that is not an end, a beginning or padding and is not in the chat template. The row
    must exist, because the embedding is the target's and is never trained.

    Args:
        target_model (`PreTrainedModel`):
            The target.
        tokenizer (`PreTrainedTokenizerBase`):
            Its tokenizer.
    """
    rows = target_model.get_input_embeddings().weight.shape[0]
    if tokenizer.mask_token_id is not None:
        return int(tokenizer.mask_token_id)
    if len(tokenizer) < rows:
        return len(tokenizer)
    generation = target_model.generation_config
    ends = generation.eos_token_id if isinstance(generation.eos_token_id, list) else [generation.eos_token_id]
    taken = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id, *ends}
    template = str(tokenizer.chat_template or "")
    candidates = {
        token_id: token.content
        for token_id, token in sorted(tokenizer.added_tokens_decoder.items())
        if token.special and token_id < rows and token_id not in taken and token.content not in template
    }
    named_unused = [token_id for token_id, content in candidates.items() if _UNUSED_TOKEN.search(content)]
    if named_unused:
        return named_unused[0]
    if candidates:
        return max(candidates)
    raise InvalidInputError(
        "`mask_token_id` was not given and the tokenizer has no token to spare: no mask token, no unused embedding "
        "row, no special token without a use. Pass the id of a token that never occurs in your text."
    )


@torch.no_grad()
def initialize_from_target(drafter: DFlashDrafterModel, target_model: PreTrainedModel) -> list[str]:
    """
    Copy the target's final norm and its last layers into a drafter, as far as the shapes agree.

    The context projection starts with the last captured layer, and `hidden_norm` as the input norm of the first layer
    copied: keys and values of the context are then what that layer would have made of the captured states.

    Args:
        drafter (`DFlashDrafterModel`):
            A new drafter; changed in place.
        target_model (`PreTrainedModel`):
            The target.

    Returns:
        `list[str]`: names of the drafter's parameters that were set.
    """
    decoder = target_model.get_decoder()
    copied: list[str] = []
    parameters = dict(drafter.named_parameters())

    def copy(name: str, source: torch.Tensor | None) -> None:
        if source is not None and name in parameters and parameters[name].shape == source.shape:
            parameters[name].copy_(source)
            copied.append(name)

    copy("norm.weight", _norm_weight(getattr(decoder, "norm", None)))
    offset = len(decoder.layers) - len(drafter.layers)
    for index in range(len(drafter.layers)):
        if index + offset >= 0:
            for name, source in _layer_tensors(decoder.layers[index + offset]):
                copy(f"layers.{index}.{name}", source)
    first = decoder.layers[max(offset, 0)]
    copy("hidden_norm.weight", _norm_weight(getattr(first, "input_layernorm", None)))
    width = drafter.config.target_hidden_size
    if width == drafter.config.hidden_size:
        drafter.fc.weight.mul_(_CONTEXT_NOISE)
        drafter.fc.weight[:, -width:] += torch.eye(width, dtype=drafter.fc.weight.dtype)
        copied.append("fc.weight")
    return copied


def attach_length_head(drafter: DFlashDrafterModel, head_type: str = "mean_linear") -> LengthHeadModel:
    """
    Give a drafter a new length head, in place of any it has.

    Args:
        drafter (`DFlashDrafterModel`):
            Changed in place.
        head_type (`str`, *optional*, defaults to `"mean_linear"`):
            See [`LengthHeadConfig`].
    """
    head_config = LengthHeadConfig(hidden_size=drafter.config.hidden_size, head_type=head_type)
    drafter.config.length_head_config = head_config
    drafter.length_head = LengthHeadModel(head_config).to(drafter.device, drafter.dtype)
    # What transformers collects from submodules when the drafter is built; FSDP asks for it.
    names: Any = drafter._no_split_modules
    drafter._no_split_modules = type(names)([*names, *(drafter.length_head._no_split_modules or ())])
    return drafter.length_head


def new_confidence_head(drafter: DFlashDrafterModel) -> ConfidenceHeadModel:
    """
    A new confidence head for the blocks of a drafter, which stays as it is.

    Args:
        drafter (`DFlashDrafterModel`):
            Gives sizes, device and dtype.
    """
    config = ConfidenceHeadConfig(hidden_size=drafter.config.hidden_size, draft_length=drafter.config.draft_length)
    return ConfidenceHeadModel(config).to(drafter.device, drafter.dtype)


def _layer_tensors(layer: nn.Module) -> Iterator[tuple[str, torch.Tensor | None]]:
    """A target layer's tensors under a drafter layer's names; parts that are built otherwise are simply not there."""
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        projection = getattr(attention, name, None)
        yield f"self_attn.{name}.weight", _linear_tensor(projection, "weight")
        yield f"self_attn.{name}.bias", _linear_tensor(projection, "bias")
    for name in ("q_norm", "k_norm"):
        yield f"self_attn.{name}.weight", _norm_weight(getattr(attention, name, None))
    for name in ("gate_proj", "up_proj", "down_proj"):
        yield f"mlp.{name}.weight", _linear_tensor(getattr(mlp, name, None), "weight")
    yield "input_layernorm.weight", _norm_weight(getattr(layer, "input_layernorm", None))
    # Gemma norms before and after both halves; its counterpart of everyone's second norm has a name of its own.
    before_mlp = getattr(layer, "pre_feedforward_layernorm", None)
    if before_mlp is None:
        before_mlp = getattr(layer, "post_attention_layernorm", None)
    yield "post_attention_layernorm.weight", _norm_weight(before_mlp)


def _linear_tensor(module: nn.Module | None, name: str) -> torch.Tensor | None:
    # Quantised layers keep packed integers under the same name.
    return getattr(module, name, None) if isinstance(module, nn.Linear) else None


def _norm_weight(norm: nn.Module | None) -> torch.Tensor | None:
    """
    What an RMS norm multiplies by.

    Found by asking it, since some families store the weight minus one: a vector of ones is already normed, so what
    comes out is the multiplier.
    """
    weight = getattr(norm, "weight", None)
    if norm is None or weight is None or weight.dim() != 1:
        return None
    epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", 0.0))
    return norm(torch.ones_like(weight)) * (1 + epsilon) ** 0.5


def _embedding_scale(target_model: PreTrainedModel) -> float:
    """The factor the target's embedding layer applies to its rows, which the drafter sees raw."""
    embedding = target_model.get_input_embeddings()
    scale = getattr(embedding, "scalar_embed_scale", None) or getattr(embedding, "embed_scale", None)
    if scale is None:
        scale = getattr(target_model.config.get_text_config(), "embedding_multiplier", None) or 1.0
    return float(scale)


def _rope_parameters(config: Any) -> dict[str, Any]:
    parameters = dict(config.rope_parameters)
    if "rope_type" not in parameters:
        # One dictionary per layer type; the drafter's layers see the whole context, as the full ones do.
        parameters = dict(parameters["full_attention"])
    return {key: value for key, value in parameters.items() if key not in _FOREIGN_ROPE_KEYS}
