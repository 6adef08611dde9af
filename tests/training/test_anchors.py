from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_drafter, tiny_drafter_config
from torch.nn.attention.flex_attention import BlockMask, create_mask

from adaflash_hf.errors import InvalidInputError
from adaflash_hf.training import anchors as anchors_module
from adaflash_hf.training.anchors import (
    block_positions,
    block_visibility,
    choose_attention,
    drafter_masks,
    label_positions,
    sample_anchors,
)


def table(rows):
    """`"1100 10"`: one character per key, blanks for reading only."""
    return torch.tensor([[character == "1" for character in row.replace(" ", "")] for row in rows])


def test_anchors_are_distinct_sorted_in_range_and_all_when_asked_for_more():
    for seed in range(20):
        anchors = sample_anchors(3, 12, 5, (0, seed))
        assert anchors.tolist() == sorted(set(anchors.tolist())) and len(anchors) == 5
        assert anchors.min() >= 3 and anchors.max() < 12
    assert sample_anchors(3, 12, 50, (0,)).tolist() == sample_anchors(3, 12, None, (0,)).tolist() == list(range(3, 12))
    assert sample_anchors(3, 3, 4, (0,)).tolist() == []


def test_anchors_are_fresh_in_each_epoch_and_repeatable():
    draws = [sample_anchors(0, 1000, 8, (7, epoch, 3)).tolist() for epoch in (0, 1, 0)]
    assert draws[0] == draws[2] != draws[1]


def test_anchors_are_uniform():
    counts = torch.zeros(10)
    for seed in range(2000):
        counts[sample_anchors(0, 10, 3, (seed,))] += 1
    # 2000 * 3 / 10 expected; the standard deviation is 20.5.
    assert (counts - 600).abs().max() < 82


def test_rows_of_a_block_follow_its_anchor():
    anchors = torch.tensor([[2, 5]])
    assert block_positions(anchors, 3).tolist() == [[2, 3, 4, 5, 6, 7]]
    assert label_positions(anchors, 2).tolist() == [[[3, 4], [6, 7]]]


def test_truth_table_of_overlapping_blocks():
    # Anchors 2 and 3 are closer than the block: the second block sees position 2, the first never does.
    visible = block_visibility(torch.tensor([[2, 3]]), context_length=5, block_size=3)
    first, second = "11000 111 000", "11100 000 111"
    assert visible.shape == (1, 1, 6, 11)
    assert torch.equal(visible[0, 0], table([first] * 3 + [second] * 3))


def test_truth_table_of_a_first_anchor_without_context():
    visible = block_visibility(torch.tensor([[0]]), context_length=2, block_size=2)
    assert torch.equal(visible[0, 0], table(["00 11"] * 2))


def test_truth_table_of_a_causal_sliding_layer():
    # Window 3: the row at position q sees positions q-2, q-1 and, in its own block, itself.
    visible = block_visibility(torch.tensor([[4]]), context_length=6, block_size=3, sliding_window=3, is_causal=True)
    assert torch.equal(visible[0, 0], table(["001100 100", "000100 110", "000000 111"]))


def test_truth_table_of_a_bidirectional_sliding_layer():
    visible = block_visibility(torch.tensor([[4]]), context_length=6, block_size=3, sliding_window=2)
    assert torch.equal(visible[0, 0], table(["000100 111", "000000 111", "000000 011"]))


LAYERS = [
    {},
    {"is_causal": True},
    {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4},
    {"layer_types": ["sliding_attention"] * 2, "sliding_window": 3, "is_causal": False},
]


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "drafter_blocks"])
@pytest.mark.parametrize("fields", LAYERS)
def test_one_forward_over_many_anchors_equals_one_draft_after_another(implementation, fields):
    drafter = tiny_drafter(**fields)
    drafter.set_attn_implementation(implementation)
    config, length = drafter.config, 11
    torch.manual_seed(0)
    context = torch.randn(1, length, config.context_feature_size)
    anchors = torch.tensor([[1, 4, 5, 10]])
    blocks = torch.randn(1, 4 * config.block_size, config.hidden_size)
    together = drafter(
        noise_embeds=blocks,
        context_hidden_states=context,
        attention_mask=drafter_masks(config, anchors, length, torch.float32),
        position_ids=torch.cat([torch.arange(length)[None], block_positions(anchors, config.block_size)], dim=1),
    ).last_hidden_state
    drafter.set_attn_implementation("sdpa")
    for i, anchor in enumerate(anchors[0].tolist()):
        rows = slice(i * config.block_size, (i + 1) * config.block_size)
        alone = drafter(noise_embeds=blocks[:, rows], context_hidden_states=context[:, :anchor]).last_hidden_state
        # Sums over keys in another order: a few units in the last place of float32.
        torch.testing.assert_close(together[:, rows], alone, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("window", [None, 1, 3, 9])
@pytest.mark.parametrize("is_causal", [False, True])
def test_flex_attention_has_the_same_visibility_pair_by_pair(window, is_causal):
    # Two trajectories, the second one shorter: its rows of padding are anchors at 0. Blocks overlap.
    anchors, context, block = torch.tensor([[1, 4, 5, 10], [2, 3, 0, 0]]), 11, 3
    dense = block_visibility(anchors, context, block, sliding_window=window, is_causal=is_causal)
    rule = anchors_module.Visibility(is_causal, window)
    sees = anchors_module._mask_mod(rule, anchors, context, block)
    one_by_one = create_mask(sees, 2, 1, 4 * block, context + 4 * block, device="cpu")
    assert torch.equal(one_by_one, dense)


def forward_over_anchors(drafter, anchors, context, blocks):
    length, block_size = context.shape[1], drafter.config.block_size
    positions = torch.arange(length, device=anchors.device).expand(len(anchors), -1)
    return drafter(
        noise_embeds=blocks,
        context_hidden_states=context,
        attention_mask=drafter_masks(drafter.config, anchors, length, blocks.dtype),
        position_ids=torch.cat([positions, block_positions(anchors, block_size)], dim=1),
    ).last_hidden_state


@pytest.mark.parametrize("fields", LAYERS)
@torch.no_grad()
def test_flex_attention_gives_the_numbers_of_a_dense_mask(fields):
    drafter = tiny_drafter(**fields)
    # More than one of FlexAttention's blocks of 128 both ways, and no multiple of them.
    length, count = 150, 50
    torch.manual_seed(0)
    anchors = torch.stack([torch.randperm(length)[:count].sort().values, torch.arange(count)])
    anchors[1, 30:] = 0
    context = torch.randn(2, length, drafter.config.context_feature_size)
    blocks = torch.randn(2, count * drafter.config.block_size, drafter.config.hidden_size)
    dense = forward_over_anchors(drafter, anchors, context, blocks)
    drafter.set_attn_implementation("flex_attention")
    masks = drafter_masks(drafter.config, anchors, length, torch.float32)
    assert all(isinstance(mask, BlockMask) for mask in masks.values())
    # transformers compiles the kernel, which on a CPU takes half a minute; uncompiled it is the same sum.
    with torch.compiler.set_stance("force_eager"):
        flex = forward_over_anchors(drafter, anchors, context, blocks)
    torch.testing.assert_close(flex, dense, atol=2e-5, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="FlexAttention has a backward pass on CUDA only")
@pytest.mark.parametrize("fields", LAYERS)
def test_flex_attention_gives_the_gradients_of_a_dense_mask(fields):
    gradients = []
    for implementation in ("sdpa", "flex_attention"):
        drafter = tiny_drafter(**fields, head_dim=16).cuda().train()
        drafter.set_attn_implementation(implementation)
        for length in (150, 170):  # twice, because shapes differ from one batch to the next
            torch.manual_seed(0)
            anchors = torch.randperm(length)[:50].sort().values[None].cuda()
            context = torch.randn(1, length, drafter.config.context_feature_size).cuda()
            blocks = torch.randn(1, 50 * drafter.config.block_size, drafter.config.hidden_size).cuda()
            forward_over_anchors(drafter, anchors, context, blocks).square().mean().backward()
        gradients.append({name: parameter.grad for name, parameter in drafter.named_parameters()})
    for name, gradient in gradients[0].items():
        # The kernel multiplies in TF32 unless told otherwise.
        torch.testing.assert_close(gradients[1][name], gradient, atol=1e-3, rtol=2e-2)


def test_the_attention_to_train_with():
    config = tiny_drafter_config(head_dim=16)
    config._attn_implementation = "sdpa"
    assert choose_attention(config, "cpu", 8192)[0] == "drafter_blocks"
    assert choose_attention(config, "cuda", 8192)[0] == "flex_attention"
    assert choose_attention(config, "cuda:1", 64)[0] == "drafter_blocks"
    assert choose_attention(config, "cpu", 64, "blocks") == ("drafter_blocks", "given")
    assert choose_attention(config, "cuda", 8192, "eager") == ("eager", "given")
    config._attn_implementation = "eager"
    assert choose_attention(config, "cpu", 8192)[0] == "eager"
    with pytest.raises(InvalidInputError, match="no backward pass on cpu"):
        choose_attention(config, "cpu", 8192, "flex_attention")
    for fields, words in (({"attention_dropout": 0.1}, "dropout"), ({"head_dim": 8}, "head_dim")):
        other = tiny_drafter_config(**{"head_dim": 16, **fields})
        assert choose_attention(other, "cuda", 8192)[0] == "drafter_blocks"
        with pytest.raises(InvalidInputError, match=words):
            choose_attention(other, "cuda", 8192, "flex_attention")


def test_attention_without_dense_masks_is_refused():
    config = tiny_drafter().config
    config._attn_implementation = "flash_attention_2"
    with pytest.raises(InvalidInputError, match="sdpa"):
        drafter_masks(config, torch.tensor([[1]]), 2, torch.float32)
