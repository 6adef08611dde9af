"""`generate()` with a drafter: arguments are checked, and transformers' own `generate()` runs AdaFlash's loop."""

from __future__ import annotations

from typing import Any

import torch
from transformers.generation import StoppingCriteriaList, StopStringCriteria
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module

from ..errors import InvalidInputError, UnsupportedGenerationError
from .automatic_prepacking import AutomaticPrepacking
from .compatibility import check_drafter_fits_target, unwrap_model
from .generation_options import option_value, take_stop_strings
from .length_policies import LengthPolicy, build_length_policy
from .packed_decoding import PackedDecoding
from .request_checks import check_prompt_is_given
from .routing import is_our_drafter
from .routing import original_generate as transformers_generate


__all__ = ["DRAFT_PROPOSALS", "generate_with_drafter"]

DRAFT_PROPOSALS = ("argmax", "sample")


def _check_arguments(
    model: Any, drafter: Any, generation_config: Any, draft_proposal: str, custom_generate: Any, kwargs: dict[str, Any]
) -> None:
    """Refuses what has no place beside a drafter. What depends on prepared options is checked later."""
    if not is_our_drafter(drafter):
        raise InvalidInputError(
            f"`assistant_model` is a {type(drafter).__name__}, expected a DFlash drafter "
            "(`config.model_type == 'dflash_drafter'`)."
        )
    if draft_proposal not in DRAFT_PROPOSALS:
        raise InvalidInputError(f"`draft_proposal` is {draft_proposal!r}, expected one of {DRAFT_PROPOSALS}.")
    speculation_type = option_value("speculation_type", model, generation_config, kwargs)
    if speculation_type not in (None, "adaflash"):
        raise InvalidInputError(
            f"`speculation_type` is {speculation_type!r}; with this drafter it may be left out (AdaFlash decoding) or "
            "be 'dflash' (transformers' own loop)."
        )
    if custom_generate is not None:
        raise UnsupportedGenerationError(
            "`custom_generate` and a DFlash drafter as `assistant_model` are two ways of decoding: pass one of them."
        )
    if option_value("token_healing", model, generation_config, kwargs):
        raise UnsupportedGenerationError(
            "`token_healing` is on, but it is not available with a drafter. Heal the prompt first: "
            "`input_ids = target.heal_tokens(input_ids, tokenizer)`."
        )


def _stop_at_strings(
    model: Any, generation_config: Any, stopping_criteria: Any, kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    """Turns `stop_strings` into a criterion here: `generate()` drops `tokenizer` when it runs a custom loop.

    Without a tokenizer nothing is changed, and `generate()` says itself that it needs one.

    Returns:
        `tuple`: `generation_config` and `stopping_criteria` to pass on; `kwargs` is changed in place.
    """
    tokenizer = kwargs.pop("tokenizer", None)
    if tokenizer is None:
        return generation_config, stopping_criteria
    stop_strings, generation_config = take_stop_strings(model, generation_config, kwargs)
    if stop_strings is None:
        return generation_config, stopping_criteria
    criterion = StopStringCriteria(stop_strings=stop_strings, tokenizer=tokenizer)
    return generation_config, StoppingCriteriaList([*(stopping_criteria or ()), criterion])


def _synced_gpus_default(model: Any) -> bool:
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    world_size = torch.distributed.get_world_size() if distributed else 1
    return (is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model)) and world_size > 1


def generate_with_drafter(
    model: Any,
    inputs: torch.Tensor | None = None,
    generation_config: Any = None,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    prefix_allowed_tokens_fn: Any = None,
    synced_gpus: bool | None = None,
    assistant_model: Any = None,
    streamer: Any = None,
    *args: Any,
    length_policy: str | LengthPolicy | None = None,
    draft_proposal: str = "argmax",
    original_generate: Any = None,
    **kwargs: Any,
) -> Any:
    """`model.generate(assistant_model=drafter)` without any patch: takes the arguments of `generate()` and two more.

    Args:
        model (`PreTrainedModel`): The target.
        inputs (`torch.Tensor` of shape `(batch_size, prompt_length)`, *optional*): As in `generate()`.
        generation_config (`GenerationConfig`, *optional*): As in `generate()`.
        logits_processor (`LogitsProcessorList`, *optional*): As in `generate()`.
        stopping_criteria (`StoppingCriteriaList`, *optional*): As in `generate()`.
        prefix_allowed_tokens_fn (`Callable`, *optional*): As in `generate()`.
        synced_gpus (`bool`, *optional*): As in `generate()`.
        assistant_model (`PreTrainedModel`): The DFlash drafter.
        streamer (`BaseStreamer`, *optional*): As in `generate()`.
        args (`tuple`): Further positional arguments of `generate()`.
        length_policy (`str` or `LengthPolicy`, *optional*):
            `"fixed"` (default), `"length_head"`, `"confidence"`, `"cost_aware"`, or a policy object.
        draft_proposal (`str`, defaults to `"argmax"`):
            When sampling, `"argmax"` drafts the likeliest tokens and accepts those that the target samples itself;
            `"sample"` samples drafts and corrects by rejection. Both leave the target's distribution as it is.
        original_generate (`Callable`, *optional*): Set by the routing.
        kwargs (`dict`): Further arguments of `generate()`.

    Returns:
        As `generate()`.

    Raises:
        InvalidInputError: If an argument has a value that is not allowed.
        DrafterCompatibilityError: If the drafter does not fit the target.
        UnsupportedGenerationError: If an option cannot be combined with a drafter.
    """
    # After `streamer` come two arguments for guidance, and then `custom_generate`.
    args, custom_generate = args[:2], kwargs.pop("custom_generate", args[2] if len(args) > 2 else None)
    _check_arguments(model, assistant_model, generation_config, draft_proposal, custom_generate, kwargs)
    check_prompt_is_given(inputs, kwargs)
    kwargs.pop("speculation_type", None)
    kwargs.pop("assistant_tokenizer", None)  # drafter and target share one vocabulary
    generation_config, stopping_criteria = _stop_at_strings(model, generation_config, stopping_criteria, kwargs)
    is_users_cache = kwargs.get("cache", kwargs.get("past_key_values")) is not None
    check_drafter_fits_target(assistant_model, model)
    policy = build_length_policy(length_policy, unwrap_model(assistant_model))
    synced = _synced_gpus_default(model) if synced_gpus is None else synced_gpus

    def adaflash_decoding(
        target: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        decoding = PackedDecoding(
            target,
            assistant_model,
            generation_config,
            logits_processor,
            stopping_criteria,
            policy,
            draft_proposal,
            streamer,
            synced,
            is_users_cache,
        )
        return decoding.run(input_ids, model_kwargs)

    generate = original_generate or transformers_generate()
    with AutomaticPrepacking(model, assistant_model):
        return generate(
            model,
            inputs,
            generation_config,
            logits_processor,
            stopping_criteria,
            prefix_allowed_tokens_fn,
            synced,
            None,
            streamer,
            *args,
            custom_generate=adaflash_decoding,
            **kwargs,
        )
