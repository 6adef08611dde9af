"""Where the plugin reaches into SGLang's classes, through the registry that SGLang has for that.

Most of it is about the drafter's weights changing under a running server. SGLang keeps stacked copies of the drafter's
key and value projections and makes them once, so that after an update the context would go through the old ones and
the block through the new: still lossless, with acceptance falling for no visible reason. That holds for its own DFLASH
too, which the hook mends as well.
"""

from __future__ import annotations

import logging
import pkgutil
from collections.abc import Callable
from typing import Any

from ...errors import DrafterCheckpointError, MissingDependencyError


__all__ = ["apply_hooks", "refuse_unfit_weights", "register_hooks", "renew_derived_weights"]

logger = logging.getLogger(__name__)

_END = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.end_weight_update"
_LOAD = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater.update_weights_from_tensor"
_RELAY = "sglang.srt.speculative.spec_utils.spec_need_hidden_states"


_PREPARE = "sglang.srt.speculative.dflash_info.DFlashVerifyInput.prepare_for_verify"

_registered: set[str] = set()


def register_hooks() -> None:
    """Adds the hooks to SGLang's registry, once; it applies them when all plugins are loaded."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, hook, kind in (
        (_END, renew_derived_weights, HookType.AFTER),
        (_LOAD, refuse_unfit_weights, HookType.AROUND),
        (_RELAY, _relay_as_dflash_does, HookType.AFTER),
        (_PREPARE, _pack_inputs, HookType.BEFORE),
    ):
        if target not in _registered:
            _registered.add(target)
            HookRegistry.register(target, hook, kind)


def apply_hooks() -> None:
    """
    Puts the hooks in place if they are not, and makes sure of it: SGLang's registry only logs what it cannot do.

    Raises:
        MissingDependencyError: One of them could not be put in place.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    register_hooks()
    HookRegistry.apply_hooks()
    if missing := [
        target for target in sorted(_registered) if not hasattr(pkgutil.resolve_name(target), "__wrapped__")
    ]:
        raise MissingDependencyError(
            f"The algorithm ADAFLASH could not put its hook on {', '.join(missing)}; SGLang's log says why. Start "
            "without other plugins (SGLANG_PLUGINS=adaflash), or export with --to sglang and use DFLASH."
        )


def renew_derived_weights(result: Any, manager: Any, *args: Any, **kwargs: Any) -> None:
    """After `end_weight_update`: makes anew what was derived from weights that may have changed."""
    worker = manager.draft_worker
    if worker is None or not getattr(result, "success", True):
        return
    renew = getattr(type(worker), "renew_derived_weights", None)
    if renew is not None:
        renew(worker)
    elif getattr(worker, "_fused_kv_helper", None) is not None and hasattr(type(worker), "_init_fused_kv_helper"):
        worker._init_fused_kv_helper()
        logger.info("AdaFlash plugin: the fused K/V helper of DFLASH was rebuilt after an update of the weights.")


def refuse_unfit_weights(load: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around an update: an answer that says what is wrong, where SGLang's process would end with an exception."""
    try:
        return load(*args, **kwargs)
    except DrafterCheckpointError as error:
        logger.error("%s", error)
        return False, str(error)


def _relay_as_dflash_does(result: bool) -> bool:
    # SGLang asks for the algorithm by name; a DFLASH drafter has no hidden states for the next round.
    from sglang.srt.runtime_context import get_spec

    return result and get_spec().speculative_algorithm != "ADAFLASH"


def _pack_inputs(verify_input: Any, batch: Any, target_worker: Any, **kwargs: Any) -> None:
    pack = getattr(type(target_worker), "pack_verify_input", None)
    if pack is not None:
        pack(target_worker, verify_input, batch)
