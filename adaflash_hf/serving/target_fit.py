"""Whether a drafter fits a target, from their configurations alone."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

from ..configuration_dflash_drafter import DFlashDrafterConfig
from ..errors import InvalidInputError
from ..generation.compatibility import check_drafter_fits_target
from ..modeling_dflash_drafter import DFlashDrafterModel
from .formats.target_files import TargetFiles


__all__ = ["check_fit"]


def check_fit(config: DFlashDrafterConfig, target: TargetFiles) -> None:
    """
    Makes the checks of `generate()` on two models without weights. Dtypes are not compared: each engine casts.

    Args:
        config (`DFlashDrafterConfig`): The drafter.
        target (`TargetFiles`): The target.

    Raises:
        DrafterCompatibilityError: They do not fit.
        InvalidInputError: The target's config.json is not a language model's.
    """
    try:
        with torch.device("meta"):
            target_model = AutoModelForCausalLM.from_config(target.full_config, dtype=torch.bfloat16)
            drafter = DFlashDrafterModel(type(config).from_dict(config.to_dict())).to(torch.bfloat16)
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise InvalidInputError(f"`target` is {target.name!r}, which makes no language model: {reason}") from error
    check_drafter_fits_target(drafter, target_model)
