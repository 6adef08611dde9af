"""Speculative decoding with a DFlash drafter: candidate generator, loop, acceptance, length policies, statistics."""

from .candidate_generator import AdaFlashCandidateGenerator
from .compatibility import check_drafter_fits_target
from .confidence_policy import ConfidencePolicy
from .cost_aware_policy import CostAwarePolicy
from .engine import AdaFlashEngine
from .engine_fronts import AsyncEngine
from .engine_handles import RequestHandle, RequestResult
from .engine_statistics import EngineStats
from .length_policies import FixedLengthPolicy, LengthHeadPolicy, LengthPolicy, RoundContext, RoundOutcome
from .oracle_policy import OraclePolicy
from .prepacking import prepack_linear_layers, restore_linear_layers
from .routing import generate_with_drafter, install_routing, is_routing_active, uninstall_routing
from .statistics import GenerationStats


__all__ = [
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
    "check_drafter_fits_target",
    "generate_with_drafter",
    "install_routing",
    "is_routing_active",
    "prepack_linear_layers",
    "restore_linear_layers",
    "uninstall_routing",
]
