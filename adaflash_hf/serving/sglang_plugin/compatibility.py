"""Whether the installed SGLang is the one this plugin was written against, hook by hook.

The plugin derives from classes that SGLang does not promise to keep. So it asks for one release, and for every name
and parameter that it relies on, and says what is missing rather than fail in the middle of a batch.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ...errors import MissingDependencyError


__all__ = ["HOOKS", "SUPPORTED_VERSION", "Hook", "check_sglang", "missing_hooks"]

SUPPORTED_VERSION = "0.5.23"


@dataclass(frozen=True)
class Hook:
    """
    Args:
        path (`str`): Dotted name in SGLang.
        names (`tuple[str, ...]`): Parameters of the function, or fields or attributes of the class, that are needed.
    """

    path: str
    names: tuple[str, ...] = ()


_SPECULATIVE = "sglang.srt.speculative"
_WORKER = f"{_SPECULATIVE}.dflash_worker_v2"
_UPDATERS = "sglang.srt.managers.scheduler_components.weight_updater"

HOOKS = (
    # Registration
    Hook(
        f"{_SPECULATIVE}.spec_info.SpeculativeAlgorithm.register", ("name", "supports_overlap", "validate_server_args")
    ),
    Hook(
        f"{_SPECULATIVE}.spec_info.SpeculativeAlgorithm",
        ("DFLASH", "carries_draft_hidden_states", "create_future_map", "need_topk"),
    ),
    Hook(f"{_SPECULATIVE}.spec_registry.CustomSpecAlgo", ("handle_server_args", "supports_ragged_verify")),
    Hook("sglang.srt.arg_groups.speculative_hook._handle_dflash", ("server_args",)),
    Hook("sglang.srt.models.registry.ModelRegistry", ("register",)),
    Hook(f"{_SPECULATIVE}.spec_utils.spec_need_hidden_states"),
    # The drafter
    Hook("sglang.srt.models.dflash.DFlashDraftModel.load_weights", ("weights",)),
    Hook("sglang.srt.model_executor.model_runner.ModelRunner.forward", ("forward_batch",)),
    # The round
    Hook(f"{_WORKER}.DFlashWorkerV2.__init__", ("server_args", "target_worker")),
    Hook(f"{_WORKER}.DFlashWorkerV2.forward_batch_generation", ("batch",)),
    Hook(
        f"{_WORKER}.DFlashWorkerV2._accept_block",
        ("candidates", "next_token_logits", "sampling_info", "prefix_lens", "bs", "target_predict"),
    ),
    Hook(f"{_WORKER}.DFlashWorkerV2._greedy_sample_from_vocab_parallel_head", ("hidden_states", "lm_head")),
    Hook(f"{_WORKER}.DFlashWorkerV2._maybe_build_draft_sampler"),
    Hook(f"{_WORKER}.DFlashWorkerV2.init_attention_backends"),
    Hook(f"{_WORKER}._commit_accept", ("candidates", "accept_len", "bonus_tokens")),
    Hook("sglang.srt.managers.scheduler.GenerationBatchResult", ("cap_lens", "block_accept_lens")),
    # Verification of packed rows
    Hook(f"{_SPECULATIVE}.ragged_verify.read_ragged_verify_mode"),
    Hook(f"{_SPECULATIVE}.ragged_verify.RaggedVerifyLayout.from_verify_lens", ("verify_lens_cpu", "device", "grid")),
    Hook(f"{_SPECULATIVE}.dflash_info.DFlashVerifyInput", ("ragged_verify_layout", "kv_loc_cols", "positions")),
    Hook(f"{_SPECULATIVE}.dflash_info.DFlashVerifyInput.prepare_for_verify", ("batch", "target_worker")),
    Hook(
        f"{_SPECULATIVE}.dspark_components.dspark_planner.verify_layout_grid",
        ("verify_lens_cpu", "ragged_verify_mode", "model_runner"),
    ),
    Hook(
        f"{_SPECULATIVE}.dspark_components.dspark_planner.ragged_layout_exceeds_captured_grid",
        ("num_reqs", "verify_num_draft_tokens", "model_runner", "tier_tokens_hint"),
    ),
    Hook("sglang.srt.layers.attention.base_attn_backend.AttentionBackend", ("supports_ragged_verify_graph",)),
    # After an update of the weights
    Hook(f"{_WORKER}.DFlashWorkerV2._init_fused_kv_helper"),
    Hook(f"{_UPDATERS}.SchedulerWeightUpdaterManager.end_weight_update", ("recv_req",)),
    Hook(
        "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater.update_weights_from_tensor",
        ("named_tensors",),
    ),
)


def check_sglang(
    hooks: Sequence[Hook] = HOOKS, installed: str | None = None, resolve: Callable[[str], Any] = pkgutil.resolve_name
) -> None:
    """
    Raises unless the plugin can work with the installed SGLang.

    Args:
        hooks (`Sequence[Hook]`): What is needed.
        installed (`str`, *optional*): The version of SGLang; found out when not given.
        resolve (`Callable`): Finds what a dotted name stands for.

    Raises:
        MissingDependencyError: Another version, or something that is needed is missing.
    """
    if installed is None:
        try:
            installed = version("sglang")
        except PackageNotFoundError as error:
            raise MissingDependencyError(
                f"The algorithm ADAFLASH needs SGLang, which is not installed. Run: pip install "
                f"sglang=={SUPPORTED_VERSION}"
            ) from error
    if installed != SUPPORTED_VERSION:
        raise MissingDependencyError(
            f"The algorithm ADAFLASH works with SGLang {SUPPORTED_VERSION}, and {installed} is installed. Run: pip "
            f"install sglang=={SUPPORTED_VERSION}. To serve with this version, export with --to sglang and use DFLASH."
        )
    if missing := missing_hooks(hooks, resolve):
        raise MissingDependencyError(
            f"The algorithm ADAFLASH cannot work with this SGLang {installed}, which was changed: "
            f"{'; '.join(missing)}. "
            f"Reinstall it (pip install --force-reinstall --no-deps sglang=={SUPPORTED_VERSION}), or export with --to "
            "sglang and use DFLASH."
        )


def missing_hooks(hooks: Sequence[Hook], resolve: Callable[[str], Any] = pkgutil.resolve_name) -> list[str]:
    """
    What is not there, in words.

    Args:
        hooks (`Sequence[Hook]`): What is needed.
        resolve (`Callable`): Finds what a dotted name stands for.
    """
    missing = []
    for hook in hooks:
        try:
            found = resolve(hook.path)
        except (AttributeError, ImportError) as error:
            missing.append(f"{hook.path} is missing ({error})")
            continue
        if lacks := [name for name in hook.names if not _has(found, name)]:
            missing.append(f"{hook.path} has no {', '.join(lacks)}")
    return missing


def _has(found: Any, name: str) -> bool:
    """Whether a function has a parameter, or anything else an attribute or a field."""
    if inspect.isroutine(found):
        return name in inspect.signature(found).parameters
    # Fields without a default are no attributes of their class. Methods of an enumeration are not in its `dir()`.
    is_field = is_dataclass(found) and any(field.name == name for field in fields(found))
    return is_field or hasattr(found, name)
