"""Speculative decoding with a DFlash drafter: candidate generator, loop, acceptance, length policies, statistics."""

from .candidate_generator import AdaFlashCandidateGenerator
from .compatibility import check_drafter_fits_target
from .engine import AdaFlashEngine
from .engine_fronts import AsyncEngine
from .engine_handles import RequestHandle, RequestResult
from .engine_statistics import EngineStats
from .length_policies import FixedLengthPolicy, LengthHeadPolicy, LengthPolicy
from .prepacking import prepack_linear_layers, restore_linear_layers
from .routing import generate_with_drafter, install_routing, is_routing_active, uninstall_routing
from .statistics import GenerationStats


__all__ = [
    "AdaFlashCandidateGenerator",
    "AdaFlashEngine",
    "AsyncEngine",
    "EngineStats",
    "FixedLengthPolicy",
    "GenerationStats",
    "LengthHeadPolicy",
    "LengthPolicy",
    "RequestHandle",
    "RequestResult",
    "check_drafter_fits_target",
    "generate_with_drafter",
    "install_routing",
    "is_routing_active",
    "prepack_linear_layers",
    "restore_linear_layers",
    "uninstall_routing",
]
