"""LoRA on drafters through PEFT: put an adapter on, load one, merge it.

An adapter changes every matrix of the drafter (`fc`, attention, feed-forward) by a product of low rank. The length
head is not one of them: it is a small module that must follow the drafter's new hidden states, so it is trained as a
whole and saved as a whole with the adapter (PEFT's `modules_to_save`). Norms stay the base's.

`adapted.save_pretrained(directory)` and `adapted.push_to_hub(name)` are PEFT's own. `from_pretrained` of
`DFlashDrafterModel` and of `AutoModel` take an adapter's directory or repository and load its base along. What any of
them returns, a `PeftModel` included, is a drafter for `target.generate(assistant_model=...)`.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..adapter_loading import base_of_adapter, check_adapter_fits
from ..checkpoint_files import hub_arguments
from ..checkpoint_loading import check_loaded_weights
from ..error_text import install_hint
from ..errors import DrafterCheckpointError, InvalidInputError, MissingDependencyError
from ..modeling_dflash_drafter import DFlashDrafterModel


if TYPE_CHECKING:
    from peft import PeftModel


__all__ = ["LORA_TARGET_MODULES", "add_lora", "is_adapted", "load_lora", "merge_lora"]

LORA_TARGET_MODULES = ("fc", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_LENGTH_HEAD = "length_head"


def add_lora(
    drafter: DFlashDrafterModel,
    rank: int = 16,
    alpha: float | None = None,
    target_modules: Sequence[str] | None = None,
    *,
    base_name_or_path: str | os.PathLike[str] | None = None,
    **fields: Any,
) -> PeftModel:
    """
    Put a new LoRA adapter on a drafter; at first it changes nothing. Only the adapter and a length head are trainable.

    Args:
        drafter (`DFlashDrafterModel`):
            The base, which is changed in place. Load it in float32 to train: `from_pretrained(..., dtype="float32")`.
        rank (`int`, *optional*, defaults to 16):
            Of the products.
        alpha (`float`, *optional*):
            They are scaled by alpha / rank; by default alpha is twice the rank.
        target_modules (`Sequence[str]`, *optional*, defaults to [`LORA_TARGET_MODULES`]):
            Names, or ends of names, of the linear layers to adapt.
        base_name_or_path (`str` or `os.PathLike`, *optional*):
            Written into the adapter, to be loaded again with it; by default where `drafter` was loaded from.
        fields:
            Further fields of [`~peft.LoraConfig`], for example `lora_dropout` or `use_dora`.

    Returns:
        `PeftModel`: for [`DrafterTrainer`] and for `generate(assistant_model=...)`.

    Raises:
        InvalidInputError: an argument is out of range, `drafter` already has an adapter, or its place is unknown.
        MissingDependencyError: PEFT is not installed.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise MissingDependencyError(
            f"A LoRA adapter needs the package peft, which is not installed; run: {install_hint('train')}"
        ) from error

    if rank < 1:
        raise InvalidInputError(f"`rank` is {rank}; it must be at least 1 (16 is usual).")
    if is_adapted(drafter):
        raise InvalidInputError(
            "`drafter` already has an adapter; train that one, or `merge_lora` it and put a new one on the result."
        )
    base = os.fspath(base_name_or_path or drafter.config.name_or_path or "")
    if not base:
        raise InvalidInputError(
            "`drafter` was never loaded from anywhere, so its adapter could not name its base. Save it and load it "
            "again, or pass `base_name_or_path`."
        )
    names = list(LORA_TARGET_MODULES if target_modules is None else target_modules)
    _check_target_modules(drafter, names)
    saved = [_LENGTH_HEAD] if drafter.length_head is not None else None
    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank if alpha is None else alpha,
        target_modules=names,
        **{"modules_to_save": saved, **fields},
    )
    adapted = get_peft_model(drafter, config)
    config.base_model_name_or_path = base
    # The commit that a Hub repository was at; the base may move on, the adapter stays with this one.
    config.revision = drafter.checkpoint_commit if base == drafter.config.name_or_path else None
    return adapted


def load_lora(
    adapter: str | os.PathLike[str],
    base: DFlashDrafterModel | None = None,
    *,
    is_trainable: bool = False,
    **kwargs: Any,
) -> PeftModel:
    """
    Load an adapter on its base.

    Args:
        adapter (`str` or `os.PathLike`):
            Directory or Hub repository that PEFT wrote.
        base (`DFlashDrafterModel`, *optional*):
            What it is put on, changed in place; by default the drafter that the adapter names.
        is_trainable (`bool`, *optional*, defaults to `False`):
            Whether to go on training it.
        kwargs:
            Where the adapter is on the Hub (`revision`, `token`, ...); others, for example `dtype`, load the base.

    Raises:
        DrafterCheckpointError: the adapter does not fit the base, is incomplete, pickled or not finite.
    """
    hub = hub_arguments(kwargs)
    if base is None:
        named = base_of_adapter(adapter, hub)
        if named is None:
            raise DrafterCheckpointError(
                f"{adapter} has no `adapter_config.json`, so it is not a PEFT adapter. A whole drafter is loaded with "
                "`DFlashDrafterModel.from_pretrained`."
            )
        base = DFlashDrafterModel.from_pretrained(named.name_or_path, **named.load_arguments(kwargs))
    elif is_adapted(base):
        raise InvalidInputError("`base` already has an adapter; pass the drafter without one.")
    assert base is not None
    check_adapter_fits(base, adapter, hub)  # says so where PEFT is missing
    from peft import PeftModel

    adapted = PeftModel.from_pretrained(base, os.fspath(adapter), is_trainable=is_trainable, **hub)
    check_loaded_weights(adapted, str(adapter))
    return adapted if is_trainable else adapted.eval()


def merge_lora(adapted: PeftModel) -> DFlashDrafterModel:
    """
    The whole drafter that base and adapter make together, in the base's dtype; `adapted` stays as it is.

    The sum is formed in float32, because the adapter's part is small beside the weight it is added to.

    Args:
        adapted (`PeftModel`):
            From [`add_lora`] or [`load_lora`].

    Raises:
        InvalidInputError: it is no PEFT model.
        DrafterCheckpointError: a merged weight is not finite.
    """
    if not hasattr(adapted, "merge_and_unload"):
        raise InvalidInputError(
            f"`adapted` is a {type(adapted).__name__}, not a PeftModel; load the adapter with `load_lora`."
        )
    dtype = adapted.get_base_model().dtype
    try:
        merged = copy.deepcopy(adapted).float().merge_and_unload(safe_merge=True)
    except ValueError as error:
        raise DrafterCheckpointError(f"The adapter cannot be merged: {error}") from error
    return merged.to(dtype)


def is_adapted(model: torch.nn.Module) -> bool:
    """Whether a model carries a PEFT adapter, around it (`PeftModel`) or inside it (`load_adapter`)."""
    return hasattr(model, "merge_and_unload") or bool(getattr(model, "_hf_peft_config_loaded", False))


def _check_target_modules(drafter: torch.nn.Module, names: Sequence[str]) -> None:
    """PEFT is content if one of them exists."""
    linear = [name for name, module in drafter.named_modules() if isinstance(module, torch.nn.Linear)]
    unknown = [name for name in names if not any(f".{path}".endswith(f".{name}") for path in linear)]
    if unknown or not names:
        raise InvalidInputError(
            f"`target_modules` is {list(names)}, of which {unknown or 'nothing'} names a linear layer of the drafter; "
            f"choose from {', '.join(LORA_TARGET_MODULES)}."
        )
    heads = [name for name in names if any(f".{path}".endswith(f".{name}") for path in linear if _LENGTH_HEAD in path)]
    if heads:
        raise InvalidInputError(
            f"`target_modules` has {heads}, layers of the length head, which is trained as a whole; leave them out."
        )
