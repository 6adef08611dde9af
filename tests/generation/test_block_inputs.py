"""Blocks are raw rows of the target's embedding, scaled as the drafter was trained."""

from __future__ import annotations

import torch
from plain_comparison import shared_target
from tiny_models import BLOCK_SIZE, MASK_TOKEN_ID, tiny_drafter

from adaflash_hf.generation.block_inputs import BlockEmbedder


def test_anchor_and_masks() -> None:
    target = shared_target("gemma3_text")  # its embedding module multiplies by a scale of its own
    embedder = BlockEmbedder(tiny_drafter(target, input_embedding_scale=2.0), target.get_input_embeddings())
    blocks = embedder.blocks(torch.tensor([7, 9]))
    weight = target.get_input_embeddings().weight
    expected = torch.stack([weight[[anchor, *[MASK_TOKEN_ID] * (BLOCK_SIZE - 1)]] * 2 for anchor in (7, 9)])
    torch.testing.assert_close(blocks, expected)


def test_dtype_of_the_drafter() -> None:
    target = shared_target()
    embedder = BlockEmbedder(tiny_drafter(target).to(torch.bfloat16), target.get_input_embeddings())
    assert embedder.blocks(torch.tensor([7])).dtype == torch.bfloat16
