"""Runs in SGLang's own environment: the plugin's functions beside SGLang's of the same purpose, in one process."""

from __future__ import annotations

from typing import Any

import torch


BLOCK_SIZE = 16


def run_checks() -> dict[str, Any]:
    """What the test asserts on."""
    from adaflash_hf.serving.sglang_plugin.compatibility import HOOKS, missing_hooks

    return {"missing_hooks": missing_hooks(HOOKS), "packing_differences": packing_differences()}


def packing_differences() -> list[str]:
    """Where packing and laying back are not what DSPARK's functions make of the same layouts."""
    from sglang.kernels.ops.speculative.dspark import dspark_verify_window as theirs
    from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout

    from adaflash_hf.serving.sglang_plugin.packing import pack_rows, packed_places, unpack_rows

    generator = torch.Generator().manual_seed(0)
    device = torch.device("cpu")
    differences = []
    for num_requests, padding in ((1, 0), (5, 0), (5, 7), (30, 11)):
        lengths = torch.randint(1, BLOCK_SIZE + 1, (num_requests,), generator=generator).tolist()
        total, name = sum(lengths), f"{num_requests} requests, {padding} rows of padding"
        layout = RaggedVerifyLayout.from_verify_lens(verify_lens_cpu=lengths, device=device, grid=[total + padding])
        places = packed_places(layout.verify_lens, BLOCK_SIZE, layout.graph_num_tokens)
        ids = torch.randint(1, 99, (num_requests, BLOCK_SIZE), generator=generator)
        packed = theirs.compact_verify_ids(
            draft_block_ids=ids, draft_tokens=ids[:, 1:].contiguous(), layout=layout, device="cpu"
        )
        if not torch.equal(packed[:total], pack_rows(ids.flatten(), places)[:total]):
            differences.append(f"ids, {name}")
        results = torch.randn(layout.graph_num_tokens, 3, generator=generator)
        strided = theirs.scatter_compact_to_strided(
            compact=results, layout=layout, fill_value=0.0, verify_num_draft_tokens=BLOCK_SIZE
        )
        if not torch.equal(strided, unpack_rows(results, places, num_requests * BLOCK_SIZE)):
            differences.append(f"results, {name}")
    return differences
