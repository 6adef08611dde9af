"""Attention to the context and a row's own block, against a dense mask over everything."""

import pytest
import torch

from adaflash_hf.generation.visibility import Visibility
from adaflash_hf.modeling_dflash_drafter import eager_attention_forward
from adaflash_hf.training import block_attention
from adaflash_hf.training.anchors import block_visibility, own_block_visibility
from adaflash_hf.training.block_attention import block_attention_forward


BATCH, HEADS, KV_HEADS, HEAD_DIM, CONTEXT, BLOCK = 2, 6, 2, 8, 13, 4
ANCHORS = torch.tensor([[0, 2, 3, 9, 12], [5, 6, 11, 0, 0]])  # overlapping, without context, and padding
ROWS = ANCHORS.shape[1] * BLOCK


def random_states():
    generator = torch.Generator().manual_seed(0)
    shapes = ((HEADS, ROWS), (KV_HEADS, CONTEXT + ROWS), (KV_HEADS, CONTEXT + ROWS))
    return [torch.randn(BATCH, *shape, HEAD_DIM, generator=generator, requires_grad=True) for shape in shapes]


def outputs_and_gradients(attend, mask, *, dropout=0.0, module=None):
    states = random_states()
    output, _ = attend(module or torch.nn.Identity(), *states, mask, scaling=0.35, dropout=dropout)
    output.sin().sum().backward()
    return [output.detach(), *(state.grad for state in states)]


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("score_bytes", [None, 1, 4 * BATCH * HEADS * BLOCK * (CONTEXT + BLOCK) * 2])
def test_outputs_and_gradients_equal_those_of_a_dense_mask(monkeypatch, window, is_causal, score_bytes):
    # One block at a time, two (with one left over), and all at once.
    if score_bytes is not None:
        monkeypatch.setattr(block_attention, "_SCORE_BYTES", score_bytes)
    dense = block_visibility(ANCHORS, CONTEXT, BLOCK, sliding_window=window, is_causal=is_causal)
    additive = torch.zeros(dense.shape).masked_fill(~dense, torch.finfo(torch.float32).min)
    own = own_block_visibility(ANCHORS, CONTEXT, BLOCK, Visibility(is_causal, window))
    assert own.shape == (BATCH, 1, ROWS, CONTEXT + BLOCK)
    expected = outputs_and_gradients(eager_attention_forward, additive)
    for ours, theirs in zip(outputs_and_gradients(block_attention_forward, own), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_dropout_is_for_training_alone():
    own = own_block_visibility(ANCHORS, CONTEXT, BLOCK, Visibility(is_causal=False))
    module = torch.nn.Identity().eval()
    plain = outputs_and_gradients(block_attention_forward, own, module=module)[0]
    assert torch.equal(outputs_and_gradients(block_attention_forward, own, dropout=0.5, module=module)[0], plain)
    dropped = outputs_and_gradients(block_attention_forward, own, dropout=0.5, module=module.train())[0]
    assert not torch.allclose(dropped, plain)


def test_memory_grows_with_the_context_not_with_all_rows():
    # 4,096 rows against 4,096 + 64 keys would be 68 MB of scores; with own blocks they are 1.2 MB.
    anchors = torch.arange(1024)[None] % 64
    own = own_block_visibility(anchors, 64, BLOCK, Visibility(is_causal=False))
    assert own.numel() == 4096 * 68
