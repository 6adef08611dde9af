"""Sends only the rows that the length head asks for through the target.

SGLang's DFLASH worker builds a rectangle of rows, runs it and judges a rectangle of results. Between the two stands
[`CompactTarget`], in the place of the worker's target: it packs what goes in by a ragged layout, which SGLang's
attention backends and CUDA graphs know from DSPARK, and lays what comes out back into the rectangle, zeros where
nothing was computed. The verdict is capped afterwards (`planning.cap_verdicts`), so those zeros are never seen.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.speculative.dspark_components.dspark_planner import (
    ragged_layout_exceeds_captured_grid,
    verify_layout_grid,
)
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout, RaggedVerifyMode

from ...errors import InvalidInputError
from .packing import pack_rows, packed_places, unpack_rows
from .settings import MODE_VARIABLE, VerifyMode


__all__ = ["CompactTarget", "check_backend"]

# fa3 and fa4 are one class. With MHA models these can be chosen; the others are MLA and linear attention.
_BACKENDS = "fa3, fa4, trtllm_mha, trtllm_mla, flashinfer_mla, dsv4, kda"


class CompactTarget:
    """
    The target's worker as ours sees it.

    Args:
        target_worker (`TpModelWorker`): SGLang's worker of the target.
        block_size (`int`): Rows of a block, the anchor included.
    """

    def __init__(self, target_worker: Any, block_size: int):
        self._target_worker = target_worker
        self._block_size = block_size
        self._verify_lengths: list[int] | None = None
        self._places: torch.Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "_target_worker":
            raise AttributeError(name)  # not there yet
        return getattr(self._target_worker, name)

    def plan(self, verify_lengths: list[int]) -> None:
        """
        Sets the rows of the next verification.

        Args:
            verify_lengths (`list[int]`): Per request of the batch, the anchor included.
        """
        self._verify_lengths = verify_lengths

    def pack_verify_input(self, verify_input: Any, batch: Any) -> None:
        """
        Rewrites, in place, what the worker is about to prepare.

        Args:
            verify_input (`DFlashVerifyInput`): Ids and positions of a rectangle.
            batch (`ScheduleBatch`): Cache locations of a rectangle, and the lengths after it on the host.
        """
        lengths, self._verify_lengths = self._verify_lengths, None
        if lengths is None:  # an idle rank takes part with nothing
            return
        layout = self._layout(lengths, batch.device)
        places = packed_places(layout.verify_lens, self._block_size, layout.graph_num_tokens)
        verify_input.draft_token = pack_rows(verify_input.draft_token, places)
        verify_input.positions = pack_rows(verify_input.positions, places)
        batch.out_cache_loc = pack_rows(batch.out_cache_loc, places)
        verify_input.ragged_verify_layout = layout
        verify_input.kv_loc_cols = places
        if batch.seq_lens_cpu is not None:
            unused = self._block_size - torch.tensor(lengths, dtype=batch.seq_lens_cpu.dtype)
            batch.seq_lens_cpu = batch.seq_lens_cpu - unused
            batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
        self._places = places

    def forward_batch_generation(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the target; lays the results of packed rows back into a rectangle."""
        result = self._target_worker.forward_batch_generation(*args, **kwargs)
        places, self._places = self._places, None
        forward_batch = kwargs.get("forward_batch")
        layout = getattr(getattr(forward_batch, "spec_info", None), "ragged_verify_layout", None)
        if places is None or layout is None:
            return result
        outputs = result.logits_output
        num_rows = layout.bs * self._block_size
        outputs.next_token_logits = unpack_rows(outputs.next_token_logits, places, num_rows)
        outputs.hidden_states = unpack_rows(outputs.hidden_states, places, num_rows)
        # These are per packed row, and only a rectangle of them could be told apart afterwards.
        result.routed_experts_output = result.indexer_topk_output = None
        return result

    def _layout(self, lengths: list[int], device: torch.device) -> RaggedVerifyLayout:
        runner, total = self._target_worker.model_runner, sum(lengths)
        # Batches larger than any captured graph run without one, and then no rounding up is needed.
        exceeds = ragged_layout_exceeds_captured_grid(
            num_reqs=len(lengths),
            verify_num_draft_tokens=self._block_size,
            model_runner=runner,
            tier_tokens_hint=total,
        )
        grid = [total]
        if not exceeds:
            grid = verify_layout_grid(
                verify_lens_cpu=lengths, ragged_verify_mode=RaggedVerifyMode.COMPACT, model_runner=runner
            )
        return RaggedVerifyLayout.from_verify_lens(verify_lens_cpu=lengths, device=device, grid=grid)


def check_backend(attention_backend: Any, is_recurrent: bool, has_dp_attention: bool) -> None:
    """
    Refuses what would ignore the layout and compute something else.

    Args:
        attention_backend (`AttentionBackend`): The target's.
        is_recurrent (`bool`): Whether the target has recurrent layers.
        has_dp_attention (`bool`): Whether attention is split by requests among ranks.
    """
    problem = None
    if not getattr(attention_backend, "supports_ragged_verify_graph", False):
        problem = (
            f"the attention backend {type(attention_backend).__name__} does not know verify lengths per request; "
            f"those that do are {_BACKENDS}. Pass --attention-backend fa3 on Hopper, fa4 or trtllm_mha on Blackwell"
        )
    elif is_recurrent:
        problem = "the target has recurrent layers, whose states are kept per row of whole blocks"
    elif has_dp_attention:
        problem = "--enable-dp-attention needs the same number of rows on every rank"
    if problem is not None:
        raise InvalidInputError(
            f"{MODE_VARIABLE} is {VerifyMode.COMPACT!r}: {problem}. Or set it to {VerifyMode.STATIC!r} and verify "
            "whole blocks."
        )
