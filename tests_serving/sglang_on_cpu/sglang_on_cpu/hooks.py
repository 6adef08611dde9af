"""What else stands between SGLang's DFLASH and a CPU: Triton kernels, CUDA streams, and verification."""

from __future__ import annotations

import os
from typing import Any

import torch


# Set in a server's environment, the attention takes verify lengths per request, as fa3 does on a GPU.
RAGGED = "TEST_RAGGED_CPU_ATTENTION"


def register() -> None:
    """The plugin's entry point."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from .platform import ATTENTION

    if ATTENTION not in choices.DRAFT_ATTENTION_BACKEND_CHOICES:
        choices.add_draft_attention_backend_choices([ATTENTION])
    kernels = "sglang.kernels.ops.kvcache.cache_move.copy_all_layer_kv_cache_func"
    HookRegistry.register(kernels, lambda *args, **kwargs: None, HookType.REPLACE)
    slots = "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func"
    HookRegistry.register(slots, assign_slots, HookType.REPLACE)
    HookRegistry.register("sglang.srt.models.dflash.DFlashAttention.__init__", without_fused_rope, HookType.AFTER)
    let_streams_be()
    teach_verification()


def assign_slots(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    """Notes the cache slots that requests were given, in the place of a Triton kernel."""
    begin = 0
    for request, first, last in zip(
        req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True
    ):
        req_to_token[request, first:last] = out_cache_loc[begin : begin + last - first].to(req_to_token.dtype)
        begin += last - first


def without_fused_rope(result: None, attention: Any, *args: Any, **kwargs: Any) -> None:
    """The fused norm and rotation are a Triton kernel; the module can do without."""
    attention.use_table_qk_norm_rope = False


def let_streams_be() -> None:
    """A CPU has no streams for tensors to be noted on."""
    record_stream = torch.Tensor.record_stream

    def on_accelerators(self: torch.Tensor, stream: Any) -> None:
        if self.device.type != "cpu":
            record_stream(self, stream)

    torch.Tensor.record_stream = on_accelerators  # type: ignore[method-assign]


def teach_verification() -> None:
    """Torch's attention knows prefill and decode; a verification is a prefill of a few rows after the prefix."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    prepare, extend = TorchNativeAttnBackend.init_forward_metadata, TorchNativeAttnBackend.forward_extend

    def prepare_too(self: Any, forward_batch: Any) -> None:
        prepare(self, forward_batch)
        if not forward_batch.forward_mode.is_target_verify():
            return
        layout = getattr(forward_batch.spec_info, "ragged_verify_layout", None)
        new_rows = torch.full_like(forward_batch.seq_lens, forward_batch.spec_info.draft_token_num)
        if layout is not None and os.environ.get(RAGGED):
            new_rows = layout.verify_lens.to(new_rows.dtype)
        self.verify_rows = (forward_batch.seq_lens.clone(), new_rows)

    def extend_too(
        self: Any, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> Any:
        if not forward_batch.forward_mode.is_target_verify():
            return extend(self, q, k, v, layer, forward_batch, save_kv_cache)
        names = ("seq_lens", "extend_prefix_lens", "extend_seq_lens")
        kept = [getattr(forward_batch, name) for name in names]
        prefixes, new_rows = self.verify_rows
        for name, value in zip(names, (prefixes + new_rows, prefixes, new_rows), strict=True):
            setattr(forward_batch, name, value)
        try:
            return extend(self, q, k, v, layer, forward_batch, save_kv_cache)
        finally:
            for name, value in zip(names, kept, strict=True):
                setattr(forward_batch, name, value)

    TorchNativeAttnBackend.init_forward_metadata = prepare_too
    TorchNativeAttnBackend.forward_extend = extend_too
    # Asked of an object, after the server's environment is set.
    TorchNativeAttnBackend.supports_ragged_verify_graph = property(lambda self: bool(os.environ.get(RAGGED)))
