"""What the hooks do when SGLang's drafter is given other weights, on stand-ins for SGLang's objects."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from adaflash_hf import DrafterCheckpointError
from adaflash_hf.serving.sglang_plugin.hooks import refuse_unfit_weights, renew_derived_weights


class PluginWorker:
    """Knows itself what is derived from its weights."""

    def __init__(self) -> None:
        self.renewed = 0

    def renew_derived_weights(self) -> None:
        self.renewed += 1


class DFlashWorker:
    """As SGLang's: stacked copies, made once."""

    def __init__(self, helper: object | None) -> None:
        self._fused_kv_helper = helper

    def _init_fused_kv_helper(self) -> None:
        self._fused_kv_helper = "new"


def test_the_plugins_worker_renews_what_it_has() -> None:
    worker = PluginWorker()
    renew_derived_weights(SimpleNamespace(success=True), SimpleNamespace(draft_worker=worker), "request")
    assert worker.renewed == 1


def test_nothing_is_renewed_after_an_update_that_failed() -> None:
    worker = PluginWorker()
    renew_derived_weights(SimpleNamespace(success=False), SimpleNamespace(draft_worker=worker))
    assert worker.renewed == 0


def test_the_stale_copies_of_dflash_are_renewed_too() -> None:
    worker = DFlashWorker("old")
    renew_derived_weights(SimpleNamespace(success=True), SimpleNamespace(draft_worker=worker))
    assert worker._fused_kv_helper == "new"


@pytest.mark.parametrize("worker", [None, DFlashWorker(None), SimpleNamespace()])
def test_workers_without_copies_are_left_alone(worker: object) -> None:
    """No speculation; a device for which no copies are made; another algorithm."""
    renew_derived_weights(SimpleNamespace(success=True), SimpleNamespace(draft_worker=worker))
    assert getattr(worker, "_fused_kv_helper", None) is None


def test_unfit_weights_become_an_answer() -> None:
    def load(*args: object, named_tensors: list[object]) -> tuple[bool, str]:
        if named_tensors:
            raise DrafterCheckpointError("`fc.bias` is no tensor of this drafter.")
        return True, "Success"

    assert refuse_unfit_weights(load, "updater", named_tensors=[]) == (True, "Success")
    assert refuse_unfit_weights(load, "updater", named_tensors=[1]) == (
        False,
        "`fc.bias` is no tensor of this drafter.",
    )


def test_other_errors_are_not_hidden() -> None:
    def load() -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        refuse_unfit_weights(load)
