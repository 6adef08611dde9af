"""Makes the ways of decoding that a benchmark compares from their names."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import InvalidInputError
from ..generation.confidence_policy import ConfidencePolicy
from ..generation.cost_aware_policy import CostAwarePolicy
from ..generation.length_policies import (
    ENGINE_ACTIVATION_CONCURRENCY,
    FixedLengthPolicy,
    LengthHeadPolicy,
    LengthPolicy,
)
from ..generation.oracle_policy import OraclePolicy
from .bench_method_names import (
    DRAFTING_METHODS,
    OSD,
    REFERENCE_METHODS,
    TRANSFORMERS_MTP,
    check_models_of_method,
    parameter_of_method,
    split_method_name,
)
from .bench_methods import BenchMethod, BenchModels, ContinuousBatchingMethod, EngineMethod, GenerateMethod
from .bench_results import PLAIN
from .mtp import MtpMethod


if TYPE_CHECKING:
    from ..modeling_confidence_head import ConfidenceHeadModel


__all__ = ["build_method", "check_method"]

_PROMPT_LOOKUP_TOKENS = 10


def build_method(name: str, models: BenchModels, via_generate: bool = False) -> BenchMethod:
    """
    Make a method.

    Args:
        name (`str`):
            One of `METHODS`. Some take a parameter after a colon: `dflash:4` verifies four rows, `adaflash:1.5` is a
            length scale, `confidence:0.8` a threshold, `prompt_lookup:5` a number of tokens.
        models (`BenchModels`):
            What to decode with.
        via_generate (`bool`, *optional*, defaults to `False`):
            Decode in `generate()`, on padded batches, in place of the engine. Needed for targets it cannot serve.
    """
    base, parameter = split_method_name(name)
    check_models_of_method(
        name,
        has_drafter=models.drafter is not None,
        has_length_head=models.drafter is not None and models.drafter.length_head is not None,
        has_osd_drafter=models.osd_drafter is not None,
        has_assistant=models.assistant is not None,
    )
    if base in REFERENCE_METHODS:
        return _build_reference(base, name, parameter, models)
    if base == OSD:
        base, models = "dflash", replace(models, drafter=models.osd_drafter)
    policy = None if base == PLAIN else _build_policy(base, parameter, models.confidence_head, via_generate)
    if not via_generate:
        return EngineMethod(name, models, policy)
    return GenerateMethod(name, models, {} if policy is None else {"assistant_model": models.drafter}, policy=policy)


def check_method(name: str) -> None:
    """
    Refuse a name, or a parameter in it, that no models make good.

    Args:
        name (`str`):
            With or without its parameter.
    """
    base, parameter = split_method_name(name)
    base = "dflash" if base == OSD else base
    if base in DRAFTING_METHODS:
        _build_policy(base, parameter, None, False)
    if base == "prompt_lookup" and parameter_of_method(base, parameter, 1) < 1:
        raise InvalidInputError(f"`method` is {name!r}; prompt lookup proposes 1 token or more.")


def _build_policy(
    base: str, parameter: str | None, confidence_head: ConfidenceHeadModel | None, via_generate: bool
) -> LengthPolicy:
    if base == "dflash":
        return FixedLengthPolicy(parameter_of_method(base, parameter, None))
    if base == "adaflash":
        concurrency = 1 if via_generate else ENGINE_ACTIVATION_CONCURRENCY
        return LengthHeadPolicy(parameter_of_method(base, parameter, 1.3), activation_concurrency=concurrency)
    if base == "confidence":
        threshold = parameter_of_method(base, parameter, 0.94)
        return ConfidencePolicy(threshold, confidence_head=confidence_head)
    return CostAwarePolicy(confidence_head=confidence_head) if base == "cost_aware" else OraclePolicy()


def _build_reference(base: str, name: str, parameter: str | None, models: BenchModels) -> BenchMethod:
    if base == "transformers_cb":
        return ContinuousBatchingMethod(name, models)
    if base == TRANSFORMERS_MTP:
        return MtpMethod(name, models)
    kwargs: dict[str, dict[str, Any]] = {
        "transformers": {},
        "prompt_lookup": {"prompt_lookup_num_tokens": parameter_of_method(base, parameter, _PROMPT_LOOKUP_TOKENS)},
        "transformers_dflash": {"assistant_model": models.drafter, "speculation_type": "dflash"},
        "assistant": {"assistant_model": models.assistant},
    }
    return GenerateMethod(name, models, kwargs[base], single=base != "transformers")
