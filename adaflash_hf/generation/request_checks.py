"""Refuses, before the first token, what speculative decoding cannot do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache
from transformers.generation import GenerationConfig
from transformers.generation.logits_process import LogitsProcessorList, UnbatchedClassifierFreeGuidanceLogitsProcessor
from transformers.modeling_utils import PreTrainedModel

from ..errors import InvalidInputError, UnsupportedGenerationError
from .cache_rollback import has_linear_attention


__all__ = ["check_prompt_is_given", "check_request", "context_limit", "rotary_limit"]

_WITHOUT_DRAFTER = "generate without `assistant_model`"
OTHER_WAYS_OF_DECODING = (
    "prompt_lookup_num_tokens",
    "assistant_early_exit",
    "use_mtp",
    "penalty_alpha",
    "dola_layers",
    "constraints",
    "force_words_ids",
)
# Their recurrent layers go on from a cached state when several tokens come at once, and give back a state that was
# put away. Others (Jamba, Zamba, MiniMax) begin anew with a block, and then answer otherwise.
CONTINUING_HYBRIDS = (
    "bamba",
    "falcon_h1",
    "granitemoehybrid",
    "lfm2",
    "lfm2_moe",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
    "zamba2",
)


def check_request(
    model: PreTrainedModel,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
    input_ids: torch.Tensor,
    cache: Cache,
    logits_processor: LogitsProcessorList,
    synced_gpus: bool,
    is_users_cache: bool = False,
    without_drafter: str = _WITHOUT_DRAFTER,
) -> None:
    """Checks the options of one `generate()` call or request.

    Args:
        model (`PreTrainedModel`): The target.
        config (`GenerationConfig`): As prepared by `generate()`.
        model_kwargs (`dict`): Inputs of the target's forward.
        input_ids (`torch.Tensor` of shape `(batch_size, prompt_length)`): The prompts.
        cache (`Cache`): The target's cache.
        logits_processor (`LogitsProcessorList`): As prepared by `generate()`.
        synced_gpus (`bool`): Whether ranks run in lockstep.
        is_users_cache (`bool`, defaults to `False`): Whether the caller passed the cache.
        without_drafter (`str`, *optional*): How the caller decodes what a drafter cannot, for error messages.

    Raises:
        UnsupportedGenerationError: If an option cannot be honoured.
        InvalidInputError: If the prompt is padded on the right.
    """
    if (config.num_beams or 1) > 1:
        raise UnsupportedGenerationError(
            f"`num_beams` is {config.num_beams}, but a drafter speeds up greedy decoding and sampling only. Set "
            f"`num_beams=1`, or {without_drafter}."
        )
    for name in OTHER_WAYS_OF_DECODING:
        if getattr(config, name, None):
            raise UnsupportedGenerationError(
                f"`{name}` is {getattr(config, name)!r}, which is another way of decoding than with a DFlash drafter. "
                f"Leave it out, or {without_drafter}."
            )
    text_config = model.config.get_text_config(decoder=True)
    if has_linear_attention(cache) and text_config.model_type not in CONTINUING_HYBRIDS:
        raise UnsupportedGenerationError(
            f"{type(model).__name__} (`model_type` {text_config.model_type!r}) has recurrent layers that are not "
            f"known to verify a block of tokens as they verify single ones; {without_drafter}."
        )
    _check_adapters(model, input_ids.shape[0], without_drafter)
    _check_rotary_embedding(text_config, config.max_length, without_drafter)
    _check_mask_length(config, model_kwargs, input_ids, cache)
    _check_padding(model_kwargs.get("attention_mask"))
    if config.output_attentions and config.return_dict_in_generate and input_ids.shape[0] > 1:
        raise UnsupportedGenerationError(
            f"`output_attentions` is on for a batch of {input_ids.shape[0]}: rows that accept different numbers of "
            "tokens have attention weights of different lengths. Generate one prompt at a time."
        )
    if input_ids.shape[0] > 1 and is_users_cache and has_linear_attention(cache):
        raise UnsupportedGenerationError(
            f"`cache` was passed for a batch of {input_ids.shape[0]}, but {type(model).__name__} has recurrent "
            "layers, so each row is decoded with a cache of its own. Leave `cache` out, or generate one prompt at a "
            "time."
        )
    if synced_gpus:
        _check_lockstep(model, cache, logits_processor)


def _check_adapters(model: PreTrainedModel, batch_size: int, without_drafter: str) -> None:
    """Of PEFT's adapters, those that count tokens or rows by themselves."""
    # While it generates, PEFT puts a method of its own here, and hooks that name the adapter of each row.
    wrapper = getattr(vars(model).get("prepare_inputs_for_generation"), "__self__", None)
    peft_config = getattr(wrapper, "active_peft_config", None)
    is_prefix = getattr(peft_config, "peft_type", None) == "PREFIX_TUNING"
    if getattr(peft_config, "is_prompt_learning", False) and not (is_prefix and batch_size == 1):
        raise UnsupportedGenerationError(
            f"The target's PEFT adapter is a {type(peft_config).__name__}, which puts tokens of its own in front of "
            f"{'each sequence of a batch' if is_prefix else 'the prompt'}; {without_drafter}."
        )
    hooks = (hook for module in model.modules() for hook in module._forward_pre_hooks.values())
    if batch_size > 1 and any("adapter_names" in (getattr(hook, "keywords", None) or ()) for hook in hooks):
        raise UnsupportedGenerationError(
            f"`adapter_names` was given for a batch of {batch_size}, but rows do not keep their places in the forward "
            f"passes of a drafter. Generate one prompt at a time, or {without_drafter}."
        )


def _check_lockstep(model: PreTrainedModel, cache: Cache, logits_processor: LogitsProcessorList) -> None:
    """Ranks that wait for each other must run the same number of forward passes per round."""
    if any(isinstance(processor, UnbatchedClassifierFreeGuidanceLogitsProcessor) for processor in logits_processor):
        raise UnsupportedGenerationError(
            "`guidance_scale` runs the target once per accepted token, a number that differs between ranks, but "
            "`synced_gpus` needs the same number. Generate without `assistant_model`."
        )
    if has_linear_attention(cache):
        raise UnsupportedGenerationError(
            f"{type(model).__name__} has recurrent layers, whose replay takes a different number of forward passes on "
            "each rank, but `synced_gpus` needs the same number. Generate without `assistant_model`."
        )


def context_limit(text_config: PreTrainedConfig) -> int | None:
    """The longest sequence that the target is made for, and decodes in the same way however many tokens come at once.

    Args:
        text_config (`PreTrainedConfig`): The target's configuration, of its decoder.

    Returns:
        `int`: In tokens; None if there is no limit.
    """
    limits = (getattr(text_config, "max_position_embeddings", None), rotary_limit(text_config))
    return min((limit for limit in limits if limit is not None), default=None)


def rotary_limit(text_config: PreTrainedConfig) -> int | None:
    """The longest sequence over which every token is rotated in the same way, however many come at once.

    Args:
        text_config (`PreTrainedConfig`): The target's configuration, of its decoder.

    Returns:
        `int`: In tokens; None if the rotation never changes.
    """
    parameters = getattr(text_config, "rope_parameters", None) or {}
    limits = []
    # Some models have parameters per layer type.
    for part in (parameters, *(part for part in parameters.values() if isinstance(part, dict))):
        kind = part.get("rope_type") or ""
        if kind == "longrope":
            original = part.get("original_max_position_embeddings")
            limits.append(original or getattr(text_config, "original_max_position_embeddings", None))
        elif "dynamic" in kind:
            limits.append(text_config.max_position_embeddings)
    return min((limit for limit in limits if limit), default=None)


def _check_rotary_embedding(text_config: PreTrainedConfig, max_length: int | None, without_drafter: str) -> None:
    limit = rotary_limit(text_config)
    if limit is not None and max_length is not None and max_length > limit:
        raise UnsupportedGenerationError(
            f"Prompt and new tokens may reach {max_length} tokens, but beyond {limit} the target's rotary embedding "
            "(`rope_parameters`) changes with the length of the sequence, so that a block of tokens is computed "
            f"otherwise than one token at a time. Keep both within {limit} tokens by `max_new_tokens`, or "
            f"{without_drafter}."
        )


def check_prompt_is_given(inputs: Any, model_kwargs: dict[str, Any]) -> None:
    """Refuses prompts over which `generate()` itself stumbles with an error of torch or Python.

    Args:
        inputs (`torch.Tensor`, *optional*): Argument of `generate()`.
        model_kwargs (`dict`): Its further arguments.

    Raises:
        InvalidInputError: If ids are no tensor of two dimensions, or there are no columns of ids or embeddings.
    """
    ids, embeds = inputs if inputs is not None else model_kwargs.get("input_ids"), model_kwargs.get("inputs_embeds")
    if ids is not None:
        _check_ids(ids)
    columns, name = (ids, "input_ids") if embeds is None else (embeds[..., 0], "inputs_embeds")
    if columns is not None and columns.shape[-1] == 0:
        raise InvalidInputError(
            f"The prompt is empty: `{name}` has no columns, its batch has shape {tuple(columns.shape)}. Pass at least "
            "one token, for example the BOS token."
        )


def _check_ids(ids: Any) -> None:
    if isinstance(ids, Mapping):
        raise InvalidInputError(
            f"The prompt is a {type(ids).__name__} with {', '.join(map(repr, ids))}, expected a tensor of ids. Pass "
            "what is in it: `target.generate(**inputs, assistant_model=drafter)`."
        )
    if not isinstance(ids, torch.Tensor):
        raise InvalidInputError(
            f"`input_ids` is a {type(ids).__name__}, expected a tensor of shape (batch_size, length). Tokenize with "
            "`return_tensors='pt'`."
        )
    if ids.ndim != 2:
        raise InvalidInputError(
            f"`input_ids` has shape {tuple(ids.shape)}, expected (batch_size, length). Pass one prompt as "
            "`input_ids[None]`, and several padded on the left."
        )


def _check_mask_length(
    config: GenerationConfig, model_kwargs: dict[str, Any], input_ids: torch.Tensor, cache: Cache
) -> None:
    mask, embeds = model_kwargs.get("attention_mask"), model_kwargs.get("inputs_embeds")
    # `generate()` drops a mask of ones, and notes how long it was.
    columns = getattr(config, "_mask_length", None) if mask is None else mask.shape[1]
    given = input_ids.shape[1] if embeds is None else embeds.shape[1]
    # Of ids, only those that the cache does not hold may have been passed.
    cached = int(cache.get_seq_length()) if embeds is None else 0
    if columns is not None and not given <= columns <= given + cached:
        raise InvalidInputError(
            f"`attention_mask` has {columns} columns, but the prompt has {given} and the cache {cached} tokens. Pass "
            "a mask over all of them, cached ones included."
        )


def _check_padding(mask: torch.Tensor | None) -> None:
    if mask is None:
        return
    if mask.ndim != 2:
        raise InvalidInputError(f"`attention_mask` has shape {tuple(mask.shape)}, expected (batch_size, length).")
    if bool((mask[:, -1] == 0).any()):
        row = int((mask[:, -1] == 0).nonzero()[0])
        if not bool(mask[row].any()):
            raise InvalidInputError(f"Row {row} of `attention_mask` has no tokens. Leave the row out of the batch.")
        raise InvalidInputError(
            f"Row {row} of `attention_mask` ends in padding, but generation continues from the last token. Pad on the "
            "left: `tokenizer.padding_side = 'left'`."
        )
