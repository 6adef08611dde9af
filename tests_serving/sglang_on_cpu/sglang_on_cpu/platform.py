"""The platform that SGLang finds: a CPU whose attention is torch's own and which may speculate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform


ATTENTION = "torch_native"


class TorchCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Answers that SGLang's own CPU platform would not give."""

    _enum = PlatformEnum.OOT
    device_name = device_type = "cpu"
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        return ATTENTION

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        return ATTENTION

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return True

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        return backend == ATTENTION

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False

    def get_speculative_cache_locs_fn(self) -> Callable[..., torch.Tensor]:
        return block_cache_locations


def block_cache_locations(
    *,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    draft_token_num: int,
    device: Any,
    **others: Any,
) -> torch.Tensor:
    """Cache slots of a block of rows of each request, in the place of a Triton kernel."""
    columns = start_offset.long()[:, None] + torch.arange(draft_token_num, device=device)
    return req_to_token[req_pool_indices.long()[:, None], columns].reshape(-1).long()


def activate() -> str:
    """What the entry point names."""
    return f"{__name__}.{TorchCpuPlatform.__qualname__}"
