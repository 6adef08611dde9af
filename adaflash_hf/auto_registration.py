"""Makes `AutoConfig` and `AutoModel` know the package's classes, without importing them before they are used.

The files of the classes cannot do it themselves: on the Hub they lie beside the weights and run without the package.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from .lazy_imports import LazyClass, when_imported


__all__ = ["register_auto_classes"]

_CONFIGURATIONS = "transformers.models.auto.configuration_auto"
_MODELS = "transformers.models.auto.modeling_auto"
_CONFIGURATION_OF_MODEL = {
    ("modeling_confidence_head", "ConfidenceHeadModel"): ("configuration_confidence_head", "ConfidenceHeadConfig"),
    ("modeling_dflash_drafter", "DFlashDrafterModel"): ("configuration_dflash_drafter", "DFlashDrafterConfig"),
    ("modeling_length_head", "LengthHeadModel"): ("configuration_length_head", "LengthHeadConfig"),
}


def register_auto_classes() -> None:
    """Registers configurations and models: now where transformers' `Auto` classes are imported, else once they are."""
    when_imported(_CONFIGURATIONS, _register_configurations)
    when_imported(_MODELS, _register_models)
    for model, configuration in _CONFIGURATION_OF_MODEL.items():
        when_imported(f"{__package__}.{configuration[0]}", _register_late_configuration)
        when_imported(f"{__package__}.{model[0]}", _replace_lazy_classes)
    when_imported(f"{__package__}.modeling_dflash_drafter", _add_card_to_pushes)


def _register_configurations(auto: ModuleType) -> None:
    for module_name, name in _CONFIGURATION_OF_MODEL.values():
        config_class = _config_class(module_name, name)
        if config_class is None:
            continue
        auto.AutoConfig.register(config_class.model_type, config_class, exist_ok=True)


def _register_models(auto: ModuleType) -> None:
    """
    Registers every model: its class where its module is imported, else what stands for it.

    The modules need `PreTrainedModel`, which takes seconds, and which can be half imported while this runs.
    """
    for (module_name, name), configuration in _CONFIGURATION_OF_MODEL.items():
        config_class = _config_class(*configuration)
        if config_class is None:
            continue
        path = f"{__package__}.{module_name}"
        model_class = getattr(sys.modules.get(path), name, None) or LazyClass(path, name, config_class)
        auto.AutoModel.register(config_class, model_class, exist_ok=True)


def _register_late_configuration(module: ModuleType) -> None:
    """Where a configuration's own import was what had transformers' `Auto` classes imported: only now is it whole."""
    auto = sys.modules.get(_CONFIGURATIONS)
    if auto is not None and hasattr(auto, "AutoConfig"):
        _register_configurations(auto)
    _replace_lazy_classes(module)


def _replace_lazy_classes(_: ModuleType) -> None:
    auto = sys.modules.get(_MODELS)
    # Without it, that module comes later, or is being imported and will have `_register_models` called.
    if auto is not None and hasattr(auto, "AutoModel"):
        _register_models(auto)


def _add_card_to_pushes(modeling: ModuleType) -> None:
    from .hub_upload import add_card_to_pushes

    add_card_to_pushes(modeling.DFlashDrafterPreTrainedModel)


def _config_class(module_name: str, name: str) -> Any:
    """None while its module is being imported, which has this done again."""
    return getattr(import_module(f"{__package__}.{module_name}"), name, None)
