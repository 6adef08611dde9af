"""AdaFlash for transformers: lossless faster generation by block-diffusion drafting with an adaptive verify length."""

from __future__ import annotations

from transformers import AutoConfig, AutoModel

from .configuration_confidence_head import ConfidenceHeadConfig
from .configuration_dflash_drafter import DFlashDrafterConfig, build_target_layer_ids
from .configuration_length_head import LengthHeadConfig
from .errors import (
    AdaFlashError,
    DrafterCheckpointError,
    DrafterCompatibilityError,
    EngineQueueFullError,
    EngineStoppedError,
    InvalidInputError,
    MissingDependencyError,
    UnsupportedGenerationError,
)
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
    install_routing,
    is_routing_active,
    prepack_linear_layers,
    restore_linear_layers,
    uninstall_routing,
)
from .modeling_confidence_head import ConfidenceHeadModel, ConfidenceHeadOutput
from .modeling_dflash_drafter import DFlashDrafterModel, DFlashDrafterPreTrainedModel
from .modeling_length_head import LengthHeadModel, LengthHeadOutput


AutoConfig.register(DFlashDrafterConfig.model_type, DFlashDrafterConfig, exist_ok=True)
AutoConfig.register(ConfidenceHeadConfig.model_type, ConfidenceHeadConfig, exist_ok=True)
AutoConfig.register(LengthHeadConfig.model_type, LengthHeadConfig, exist_ok=True)
AutoModel.register(DFlashDrafterConfig, DFlashDrafterModel, exist_ok=True)
AutoModel.register(ConfidenceHeadConfig, ConfidenceHeadModel, exist_ok=True)
AutoModel.register(LengthHeadConfig, LengthHeadModel, exist_ok=True)
install_routing()

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
    "RequestHandle",
    "RequestResult",
    "RoundContext",
    "RoundOutcome",
    "UnsupportedGenerationError",
    "build_target_layer_ids",
    "generate_with_drafter",
    "install_routing",
    "is_routing_active",
    "prepack_linear_layers",
    "restore_linear_layers",
    "uninstall_routing",
]
