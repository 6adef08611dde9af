"""Blocks of many requests in one forward of the drafter equal those drafted for each request alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from plain_comparison import TOLERANCE, shared_target
from tiny_models import BLOCK_SIZE, tiny_drafter
from torch import nn

from adaflash_hf.errors import InvalidInputError
from adaflash_hf.generation import packed_drafter
from adaflash_hf.generation.block_inputs import BlockEmbedder
from adaflash_hf.generation.compatibility import unwrap_model
from adaflash_hf.generation.packed_drafter import PackedDrafter


FEATURE_SIZE = 64
PENDING = 64
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "sliding": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6},
    "sliding_bidirectional": {
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 6,
        "is_causal": False,
    },
    "anchor_first": {"block_layout": "anchor_first"},
    "scaled": {"input_embedding_scale": 3.0},
}


def features(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, FEATURE_SIZE, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def alone(drafter: nn.Module, context: torch.Tensor, anchor: int) -> torch.Tensor:
    """The block that the drafter itself drafts from this context, without any cache."""
    noise = BlockEmbedder(unwrap_model(drafter), shared_target().get_input_embeddings()).blocks(torch.tensor([anchor]))
    return drafter(noise_embeds=noise, context_hidden_states=context[None]).last_hidden_state[0]


def replay(drafter: nn.Module, rounds: int = 8) -> None:
    """Requests with contexts of different lengths join and draft in changing company."""
    generator = random.Random(0)
    packed = PackedDrafter(drafter, shared_target(), most_pending_tokens=PENDING)
    contexts = [features(length + 60, seed) for seed, length in enumerate((60, 2, PENDING + 9, 30))]
    slots, given = [packed.allocate() for _ in contexts], [0] * len(contexts)
    for _ in range(rounds):
        chosen = generator.sample(range(len(contexts)), generator.randint(1, len(contexts)))
        for i in chosen:
            portion = len(contexts[i]) - 60 if given[i] == 0 else generator.randint(1, BLOCK_SIZE)
            packed.extend(slots[i], contexts[i][given[i] : given[i] + portion])
            given[i] += portion
            assert packed.length(slots[i]) == given[i]
        anchors = [generator.randrange(5, 96) for _ in chosen]
        blocks = packed.draft([slots[i] for i in chosen], anchors)
        for i, anchor, block in zip(chosen, anchors, blocks, strict=True):
            torch.testing.assert_close(block, alone(drafter, contexts[i][: given[i]], anchor), **TOLERANCE)
    for slot in slots:
        packed.release(slot)
    assert packed.memory_bytes == 0


@pytest.mark.parametrize("variant", VARIANTS)
def test_same_as_each_request_alone(variant: str) -> None:
    replay(tiny_drafter(shared_target(), **VARIANTS[variant]))


def test_adapted_drafter() -> None:
    torch.manual_seed(0)
    config = LoraConfig(target_modules=["q_proj", "k_proj", "fc"], init_lora_weights=False)
    replay(get_peft_model(tiny_drafter(shared_target()), config, autocast_adapter_dtype=False).eval(), rounds=4)


def test_compiled_drafter() -> None:
    torch._dynamo.reset()
    drafter = tiny_drafter(shared_target(), num_hidden_layers=1)
    packed = PackedDrafter(torch.compile(drafter, backend="eager", dynamic=True), shared_target())
    slots = [packed.allocate(), packed.allocate()]
    for slot, length in zip(slots, (7, 3), strict=True):
        packed.extend(slot, features(length, slot))
    blocks = packed.draft(slots, torch.tensor([8, 9]))
    torch.testing.assert_close(blocks[1], alone(drafter, features(3, slots[1]), 9), **TOLERANCE)


def test_attention_of_the_drafter_is_its_own_again() -> None:
    drafter = tiny_drafter(shared_target())
    before = drafter.config._attn_implementation
    packed = PackedDrafter(drafter, shared_target())
    slot = packed.allocate()
    packed.extend(slot, features(3))
    packed.draft([slot], [7])
    assert drafter.config._attn_implementation == before


def test_a_block_leaves_no_trace() -> None:
    packed = PackedDrafter(tiny_drafter(shared_target()), shared_target())
    slot = packed.allocate()
    packed.extend(slot, features(5))
    first = packed.draft([slot], [7])
    assert packed.length(slot) == 5
    packed.draft([slot], [8])
    torch.testing.assert_close(packed.draft([slot], [7]), first, **TOLERANCE)


@pytest.mark.parametrize("layout", ["anchor_then_masks", "anchor_first"])
@pytest.mark.parametrize("is_causal", [True, None])
def test_a_block_is_cut_where_no_row_sees_a_later_one(is_causal: bool | None, layout: str) -> None:
    drafter = tiny_drafter(shared_target(), is_causal=is_causal, block_layout=layout)
    packed = PackedDrafter(drafter, shared_target())
    slots = [packed.allocate(), packed.allocate()]
    for slot, length in zip(slots, (7, 3), strict=True):
        packed.extend(slot, features(length, slot))
    whole = packed.draft(slots, [8, 9])
    assert packed.longest_in(whole) == packed.longest_verify_length
    for longest in range(2, packed.longest_verify_length + 1):
        block = packed.draft(slots, [8, 9], longest)
        assert packed.longest_in(block) == (longest if is_causal else packed.longest_verify_length)
        torch.testing.assert_close(block, whole[:, : block.shape[1]], **TOLERANCE)
        drafted, expected = (packed.project(states, [longest, 2]) for states in (block, whole))
        assert drafted.token_ids.tolist() == expected.token_ids.tolist()
    if is_causal:
        with pytest.raises(InvalidInputError, match="from 1 to 3"):
            packed.project(packed.draft(slots, [8, 9], 3), [4, 2])


def test_features_are_dropped_once_drafted_from() -> None:
    packed = PackedDrafter(tiny_drafter(shared_target()), shared_target())
    slot = packed.allocate()
    packed.extend(slot, features(5))
    assert packed.memory_bytes == 5 * FEATURE_SIZE * 4
    packed.draft([slot], [7])
    assert packed.memory_bytes == packed.bytes_for(5) == packed.bytes_per_token * 64


def test_long_contexts_do_not_wait_for_a_draft() -> None:
    """Features of a long prompt take more memory than its keys and values."""
    packed = PackedDrafter(tiny_drafter(shared_target()), shared_target(), most_pending_tokens=PENDING)
    slot = packed.allocate()
    for begin in range(0, 5 * PENDING, 20):
        packed.extend(slot, features(20, begin))
        assert packed.memory_bytes - packed.cache.memory_bytes < PENDING * FEATURE_SIZE * 4
    assert packed.length(slot) == 5 * PENDING


@pytest.mark.parametrize("variant", ["full", "sliding"])
def test_features_held_for_long_are_worth_the_same(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether keys and values are made token by token, in portions, or when a draft is wanted at last."""
    drafter = tiny_drafter(shared_target(), **VARIANTS[variant])
    contexts = [features(length, length) for length in (90, 37, 1, 80)]
    blocks = []
    # Of the last, only 100 tokens are taken in at once: the longest contexts go first, alone.
    for most_pending, at_once in ((1, 4096), (16, 4096), (1000, 4096), (1000, 100)):
        monkeypatch.setattr(packed_drafter, "_TOKENS_AT_ONCE", at_once)
        packed = PackedDrafter(drafter, shared_target(), most_pending_tokens=most_pending)
        slots = [packed.allocate() for _ in contexts]
        for slot, context in zip(slots, contexts, strict=True):
            for token in context:
                packed.extend(slot, token[None])
        if most_pending == 1000:
            assert [packed.num_pending(slot) for slot in slots] == [90, 37, 1, 80]
            assert packed.cache.memory_bytes == 0
        blocks.append(packed.draft(slots, [5, 6, 7, 8]))
        assert not any(packed.num_pending(slot) for slot in slots)
    expected = [alone(drafter, context, 5 + index) for index, context in enumerate(contexts)]
    for found in blocks:
        torch.testing.assert_close(found, torch.stack(expected), **TOLERANCE)


def test_many_short_contexts_are_taken_in_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_drafter, "_TOKENS_AT_ONCE", 20)
    drafter = tiny_drafter(shared_target())
    packed = PackedDrafter(drafter, shared_target())
    contexts = [features(10, number) for number in range(6)]
    slots = [packed.allocate() for _ in contexts]
    for slot, context in zip(slots, contexts, strict=True):
        packed.extend(slot, context)
    taken: list[int] = []
    drafter.register_forward_pre_hook(
        lambda module, args, kwargs: taken.append(kwargs["context_hidden_states"].shape[1]), with_kwargs=True
    )
    blocks = packed.draft(slots, list(range(5, 11)))
    assert taken == [20, 20, 20]
    expected = [alone(drafter, context, 5 + index) for index, context in enumerate(contexts)]
    torch.testing.assert_close(blocks, torch.stack(expected), **TOLERANCE)


def test_features_of_others_are_not_held() -> None:
    """Pieces at the end are views of what a round gave to all requests."""
    packed = PackedDrafter(tiny_drafter(shared_target()), shared_target())
    slot = packed.allocate()
    for number in range(100):
        packed.extend(slot, features(4, number), number % 4, number % 4 + 1)
    pieces = packed._pending[slot].pieces()
    assert torch.equal(torch.cat(pieces), torch.stack([features(4, number)[number % 4] for number in range(100)]))
    assert packed.num_pending(slot) == 100
    assert sum(piece.untyped_storage().nbytes() > piece.nbytes for piece in pieces) == 100 % 32
    packed.extend(slot, features(5, 0), 3, 4)  # most of the round's rows are nobody's
    assert packed._pending[slot].pieces()[-1].untyped_storage().nbytes() == packed.feature_bytes


class TestProject:
    def packed(self, **overrides: Any) -> PackedDrafter:
        return PackedDrafter(tiny_drafter(shared_target(), **overrides), shared_target())

    def blocks(self) -> torch.Tensor:
        return torch.randn(3, BLOCK_SIZE, 32, generator=torch.Generator().manual_seed(0))

    @pytest.mark.parametrize(("layout", "first", "longest"), [("anchor_then_masks", 1, 4), ("anchor_first", 0, 5)])
    def test_kept_rows_only(self, layout: str, first: int, longest: int) -> None:
        packed, blocks = self.packed(block_layout=layout), self.blocks()
        assert packed.longest_verify_length == longest
        drafts = packed.project(blocks, [3, 1, longest], keep_logits=True)
        assert drafts.counts == [2, 0, longest - 1]
        rows = torch.cat([blocks[0, first : first + 2], blocks[2, first : first + longest - 1]])
        logits = shared_target().get_output_embeddings()(rows)
        torch.testing.assert_close(drafts.logits, logits, **TOLERANCE)
        assert torch.equal(drafts.token_ids, logits.argmax(dim=-1))
        assert packed.project(blocks, [3, 1, longest]).logits is None

    def test_no_drafts(self) -> None:
        drafts = self.packed().project(self.blocks(), [1, 1, 1])
        assert drafts.token_ids.shape == (0,)
        assert drafts.counts == [0, 0, 0]

    @pytest.mark.parametrize("lengths", [[1, 2], [0, 1, 1], [1, 1, 5]])
    def test_refused(self, lengths: list[int]) -> None:
        with pytest.raises(InvalidInputError, match="`verify_lengths` is"):
            self.packed().project(self.blocks(), lengths)


def test_refused() -> None:
    packed = PackedDrafter(tiny_drafter(shared_target()), shared_target())
    slot = packed.allocate()
    with pytest.raises(InvalidInputError, match="`anchor_ids` has shape"):
        packed.draft([slot], [5, 6])
    packed.release(slot)
    with pytest.raises(InvalidInputError, match="which is not open"):
        packed.extend(slot, features(2))
