"""AdaFlash for transformers: lossless faster generation by block-diffusion drafting with an adaptive verify length."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .auto_registration import register_auto_classes
from .errors import (
    AdaFlashError,
    DrafterCheckpointError,
    DrafterCompatibilityError,
    DrafterExportError,
    EngineQueueFullError,
    EngineStoppedError,
    InvalidInputError,
    MissingDependencyError,
    OutputError,
    PublishedVersionError,
    ReplayBufferError,
    ServerError,
    TrainingDivergedError,
    UnsupportedGenerationError,
)
from .generation.routing import install_routing, is_routing_active, uninstall_routing
from .lazy_imports import lazy_names, when_imported


if TYPE_CHECKING:
    from .configuration_confidence_head import ConfidenceHeadConfig
    from .configuration_dflash_drafter import DFlashDrafterConfig, build_target_layer_ids
    from .configuration_length_head import LengthHeadConfig
    from .generation import (
        AdaFlashCandidateGenerator,
        AdaFlashEngine,
        AsyncEngine,
        ConfidencePolicy,
        CostAwarePolicy,
        EngineStats,
        FixedLengthPolicy,
        GenerationStats,
        LengthHeadPolicy,
        LengthPolicy,
        OraclePolicy,
        RequestHandle,
        RequestResult,
        RoundContext,
        RoundOutcome,
        generate_with_drafter,
        prepack_linear_layers,
        restore_linear_layers,
    )
    from .modeling_confidence_head import ConfidenceHeadModel, ConfidenceHeadOutput
    from .modeling_dflash_drafter import DFlashDrafterModel, DFlashDrafterPreTrainedModel
    from .modeling_length_head import LengthHeadModel, LengthHeadOutput
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "configuration_confidence_head": ["ConfidenceHeadConfig"],
            "configuration_dflash_drafter": ["DFlashDrafterConfig", "build_target_layer_ids"],
            "configuration_length_head": ["LengthHeadConfig"],
            "generation": [
                "AdaFlashCandidateGenerator",
                "AdaFlashEngine",
                "AsyncEngine",
                "ConfidencePolicy",
                "CostAwarePolicy",
                "EngineStats",
                "FixedLengthPolicy",
                "GenerationStats",
                "LengthHeadPolicy",
                "LengthPolicy",
                "OraclePolicy",
                "RequestHandle",
                "RequestResult",
                "RoundContext",
                "RoundOutcome",
                "generate_with_drafter",
                "prepack_linear_layers",
                "restore_linear_layers",
            ],
            "modeling_confidence_head": ["ConfidenceHeadModel", "ConfidenceHeadOutput"],
            "modeling_dflash_drafter": ["DFlashDrafterModel", "DFlashDrafterPreTrainedModel"],
            "modeling_length_head": ["LengthHeadModel", "LengthHeadOutput"],
        },
    )

register_auto_classes()
when_imported("transformers.generation.utils", lambda _: install_routing())

__all__ = [
    "AdaFlashCandidateGenerator",
    "AdaFlashEngine",
    "AdaFlashError",
    "AsyncEngine",
    "ConfidenceHeadConfig",
    "ConfidenceHeadModel",
    "ConfidenceHeadOutput",
    "ConfidencePolicy",
    "CostAwarePolicy",
    "DFlashDrafterConfig",
    "DFlashDrafterModel",
    "DFlashDrafterPreTrainedModel",
    "DrafterCheckpointError",
    "DrafterCompatibilityError",
    "DrafterExportError",
    "EngineQueueFullError",
    "EngineStats",
    "EngineStoppedError",
    "FixedLengthPolicy",
    "GenerationStats",
    "InvalidInputError",
    "LengthHeadConfig",
    "LengthHeadModel",
    "LengthHeadOutput",
    "LengthHeadPolicy",
    "LengthPolicy",
    "MissingDependencyError",
    "OraclePolicy",
    "OutputError",
    "PublishedVersionError",
    "ReplayBufferError",
    "RequestHandle",
    "RequestResult",
    "RoundContext",
    "RoundOutcome",
    "ServerError",
    "TrainingDivergedError",
    "UnsupportedGenerationError",
    "build_target_layer_ids",
    "generate_with_drafter",
    "install_routing",
    "is_routing_active",
    "prepack_linear_layers",
    "restore_linear_layers",
    "uninstall_routing",
]
