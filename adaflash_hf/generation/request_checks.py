"""Refuses, before the first token, what speculative decoding cannot do."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache
from transformers.generation import GenerationConfig
from transformers.modeling_utils import PreTrainedModel

from ..errors import InvalidInputError, UnsupportedGenerationError
from .cache_rollback import has_linear_attention


__all__ = ["check_request"]


def check_request(
    model: PreTrainedModel,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
    input_ids: torch.Tensor,
    cache: Cache,
    synced_gpus: bool,
) -> None:
    """Checks the options of one `generate()` call.

    Args:
        model (`PreTrainedModel`): The target.
        config (`GenerationConfig`): As prepared by `generate()`.
        model_kwargs (`dict`): Inputs of the target's forward.
        input_ids (`torch.Tensor` of shape `(batch_size, prompt_length)`): The prompts.
        cache (`Cache`): The target's cache.
        synced_gpus (`bool`): Whether ranks run in lockstep.

    Raises:
        UnsupportedGenerationError: If an option cannot be honoured.
        InvalidInputError: If the prompt is empty or padded on the right.
    """
    if (config.num_beams or 1) > 1:
        raise UnsupportedGenerationError(
            f"`num_beams` is {config.num_beams}, but a drafter speeds up greedy decoding and sampling only. Set "
            "`num_beams=1`, or leave `assistant_model` out."
        )
    for name in ("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp", "penalty_alpha", "dola_layers"):
        if getattr(config, name, None):
            raise UnsupportedGenerationError(
                f"`{name}` is {getattr(config, name)!r} and `assistant_model` is a DFlash drafter: choose one way of "
                "decoding."
            )
    _check_prompt(model_kwargs, input_ids)
    if config.output_attentions and config.return_dict_in_generate and input_ids.shape[0] > 1:
        raise UnsupportedGenerationError(
            f"`output_attentions` is on for a batch of {input_ids.shape[0]}: rows that accept different numbers of "
            "tokens have attention weights of different lengths. Generate one prompt at a time."
        )
    if synced_gpus and has_linear_attention(cache):
        raise UnsupportedGenerationError(
            f"{type(model).__name__} has recurrent layers, whose replay takes a different number of forward passes on "
            "each rank, but `synced_gpus` needs the same number. Generate without `assistant_model`."
        )


def _check_prompt(model_kwargs: dict[str, Any], input_ids: torch.Tensor) -> None:
    if input_ids.shape[1] == 0 and model_kwargs.get("inputs_embeds") is None:
        raise InvalidInputError("The prompt is empty. Pass at least one token, for example the BOS token.")
    mask = model_kwargs.get("attention_mask")
    if mask is None:
        return
    if mask.ndim != 2:
        raise InvalidInputError(f"`attention_mask` has shape {tuple(mask.shape)}, expected (batch_size, length).")
    if bool((mask[:, -1] == 0).any()):
        row = int((mask[:, -1] == 0).nonzero()[0])
        raise InvalidInputError(
            f"Row {row} of `attention_mask` ends in padding, but generation continues from the last token. Pad on the "
            "left: `tokenizer.padding_side = 'left'`."
        )
