from __future__ import annotations

import subprocess
import sys

import pytest
from transformers import AutoConfig, AutoModel

from adaflash_hf import (
    ConfidenceHeadConfig,
    ConfidenceHeadModel,
    DFlashDrafterConfig,
    DFlashDrafterModel,
    LengthHeadConfig,
    LengthHeadModel,
)
from adaflash_hf.auto_registration import register_auto_classes
from adaflash_hf.lazy_imports import LazyClass


CLASSES = [
    (ConfidenceHeadConfig, ConfidenceHeadModel),
    (DFlashDrafterConfig, DFlashDrafterModel),
    (LengthHeadConfig, LengthHeadModel),
]


@pytest.mark.parametrize(("config_class", "model_class"), CLASSES)
def test_registered(config_class: type, model_class: type) -> None:
    assert type(AutoConfig.for_model(config_class.model_type)) is config_class
    assert AutoModel._model_mapping[config_class] is model_class


@pytest.mark.parametrize("first", ["configuration_dflash_drafter", "configuration_length_head"])
def test_whatever_is_imported_first(first: str) -> None:
    # Each of these has transformers' `Auto` classes imported while it is itself still being imported.
    code = (
        f"import adaflash_hf.{first}; from adaflash_hf import DFlashDrafterConfig\n"
        "from transformers.models.auto.modeling_auto import MODEL_MAPPING; assert DFlashDrafterConfig in MODEL_MAPPING"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=1200)


def test_again_changes_nothing() -> None:
    register_auto_classes()
    assert AutoModel._model_mapping[LengthHeadConfig] is LengthHeadModel


def test_a_stand_in_is_loaded_through(monkeypatch: pytest.MonkeyPatch) -> None:
    # As in a process where the module of the model has not been imported.
    module = sys.modules["adaflash_hf.modeling_length_head"]
    monkeypatch.delitem(sys.modules, "adaflash_hf.modeling_length_head")
    register_auto_classes()
    try:
        registered = AutoModel._model_mapping[LengthHeadConfig]
        assert isinstance(registered, LazyClass)
        monkeypatch.setitem(sys.modules, "adaflash_hf.modeling_length_head", module)
        head = AutoModel.from_config(LengthHeadConfig(hidden_size=8, block_size=4, bottleneck_size=2))
        assert type(head) is LengthHeadModel
    finally:
        monkeypatch.undo()
        register_auto_classes()
    assert AutoModel._model_mapping[LengthHeadConfig] is LengthHeadModel
