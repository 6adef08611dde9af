"""ADAFLASH as SGLang sees it: a member of the DFLASH family whose worker is ours."""

from __future__ import annotations

import os
from typing import Any

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from .compatibility import check_sglang
from .hooks import apply_hooks
from .settings import PluginSettings


__all__ = ["ALGORITHM", "AdaFlashAlgorithm", "register_algorithm"]

ALGORITHM = "ADAFLASH"
_MODELS = "adaflash_hf.serving.sglang_plugin.models"


class AdaFlashAlgorithm(CustomSpecAlgo):
    """Answers SGLang's questions the way DFLASH does, except that verify batches may be ragged."""

    def is_dflash(self) -> bool:
        return True

    def is_dflash_family(self) -> bool:
        return True

    def supports_mixed_chunk(self) -> bool:
        return True

    def supports_target_verify_for_draft(self) -> bool:
        return True

    def supports_prefill_shared_read_done(self) -> bool:
        return True

    def supports_grammar_overlap(self) -> bool:
        return True

    def supports_ragged_verify(self) -> bool:
        return True

    # SGLang 0.5.23 calls these three on every algorithm, and its base class for plugins lacks them.

    def need_topk(self) -> bool:
        return False

    def carries_draft_hidden_states(self) -> bool:
        return False

    def create_future_map(self, *args: Any, **kwargs: Any) -> Any:
        from sglang.srt.managers.overlap_utils import FutureMap

        device, *others = args
        return FutureMap(device, self, *others, **kwargs)

    def build_disagg_draft_input(self, batch: Any, last_tokens_tensor: Any, future_map: Any) -> Any:
        return SpeculativeAlgorithm.DFLASH.build_disagg_draft_input(batch, last_tokens_tensor, future_map)

    def handle_server_args(self, server_args: Any) -> None:
        """Checks and completes the arguments as SGLang does for DFLASH."""
        from sglang.srt.arg_groups.speculative_hook import _handle_dflash
        from sglang.srt.speculative.ragged_verify import read_ragged_verify_mode

        read_ragged_verify_mode()  # refuses misspelt modes
        _handle_dflash(server_args)
        # Plugins are handed a stand-in that takes note of assignments, while SGLang's own code leaves declarations.
        for source, declared in server_args._resolved_overrides or ():
            if "dflash" in source:
                for name, value in declared.items():
                    setattr(server_args, name, value)


def register_algorithm() -> None:
    """Adds ADAFLASH to SGLang's algorithms."""

    @SpeculativeAlgorithm.register(
        ALGORITHM, supports_overlap=True, validate_server_args=_check_start, spec_class=AdaFlashAlgorithm
    )
    def _worker_class(server_args: Any) -> type:
        # Here too: this is the process that will use the hooks.
        check_sglang()
        _register_model()
        apply_hooks()
        from .worker import AdaFlashWorker

        return AdaFlashWorker


def _check_start(server_args: Any) -> None:
    """Before anything is loaded: SGLang itself, and the settings."""
    check_sglang()
    PluginSettings.from_environment(os.environ)
    if server_args.disaggregation_mode != "null":
        raise ValueError(
            f"--disaggregation-mode is {server_args.disaggregation_mode!r}, and ADAFLASH runs prefill and decode in "
            "one server. Remove it, or export with --to sglang and use DFLASH."
        )
    _register_model()


def _register_model() -> None:
    from sglang.srt.models.registry import ModelRegistry

    ModelRegistry.register(_MODELS, overwrite=True, strict=True)
