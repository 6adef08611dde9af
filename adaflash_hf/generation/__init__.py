"""Speculative decoding with a DFlash drafter: candidate generator, loop, acceptance, length policies, statistics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy_imports import lazy_names
from .routing import install_routing, is_routing_active, uninstall_routing


if TYPE_CHECKING:
    from .candidate_generator import AdaFlashCandidateGenerator
    from .compatibility import check_drafter_fits_target
    from .confidence_policy import ConfidencePolicy
    from .cost_aware_policy import CostAwarePolicy
    from .drafted_generate import generate_with_drafter
    from .engine import AdaFlashEngine
    from .engine_fronts import AsyncEngine
    from .engine_handles import RequestHandle, RequestResult
    from .engine_statistics import EngineStats
    from .length_policies import FixedLengthPolicy, LengthHeadPolicy, LengthPolicy, RoundContext, RoundOutcome
    from .oracle_policy import OraclePolicy
    from .prepacking import prepack_linear_layers, restore_linear_layers
    from .statistics import GenerationStats
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "candidate_generator": ["AdaFlashCandidateGenerator"],
            "compatibility": ["check_drafter_fits_target"],
            "confidence_policy": ["ConfidencePolicy"],
            "cost_aware_policy": ["CostAwarePolicy"],
            "drafted_generate": ["generate_with_drafter"],
            "engine": ["AdaFlashEngine"],
            "engine_fronts": ["AsyncEngine"],
            "engine_handles": ["RequestHandle", "RequestResult"],
            "engine_statistics": ["EngineStats"],
            "length_policies": [
                "FixedLengthPolicy",
                "LengthHeadPolicy",
                "LengthPolicy",
                "RoundContext",
                "RoundOutcome",
            ],
            "oracle_policy": ["OraclePolicy"],
            "prepacking": ["prepack_linear_layers", "restore_linear_layers"],
            "statistics": ["GenerationStats"],
        },
    )

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
