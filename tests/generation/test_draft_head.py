"""The draft vocabulary: what is drafted, that nothing else changes, and when the LM head is cut anew."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from plain_comparison import generate, ragged_batch
from tiny_models import VOCAB_SIZE, tiny_drafter, tiny_target
from torch import nn
from transformers import AutoModel

from adaflash_hf import DrafterCompatibilityError, prepack_linear_layers
from adaflash_hf.generation import draft_head
from adaflash_hf.generation.draft_head import DraftHead


DRAFTED = torch.arange(1, VOCAB_SIZE, 3)


def states(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, 32, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("fields", [{}, {"output_multiplier": 0.5, "final_logit_softcapping": 5.0}])
def test_drafts_are_the_best_of_the_vocabulary(fields: dict[str, float]) -> None:
    target, drafter = tiny_target(), tiny_drafter(**fields)
    head = target.get_output_embeddings()
    everything = DraftHead(drafter, head)
    full = drafter.compute_logits(states(2, 3), head)
    torch.testing.assert_close(everything.logits(states(2, 3)), full)
    assert torch.equal(everything.argmax(states(2, 3)), full.argmax(dim=-1))
    drafter.set_draft_vocabulary(DRAFTED)
    outside = torch.ones(VOCAB_SIZE, dtype=torch.bool)
    outside[DRAFTED] = False
    expected = full.masked_fill(outside, float("-inf"))
    limited = DraftHead(drafter, head)
    torch.testing.assert_close(limited.logits(states(2, 3)), expected)
    assert torch.equal(limited.argmax(states(2, 3)), expected.argmax(dim=-1))


@pytest.mark.parametrize("fields", [{}, {"output_multiplier": 0.5, "final_logit_softcapping": 5.0}])
@pytest.mark.parametrize("is_limited", [False, True])
def test_how_sure_the_drafter_is(fields: dict[str, float], is_limited: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_head, "_ROWS_AT_ONCE", 4)  # of six rows
    target, drafter = tiny_target(), tiny_drafter(**fields)
    drafter.set_draft_vocabulary(DRAFTED if is_limited else None)
    head = DraftHead(drafter, target.get_output_embeddings())
    likeliest = head.likeliest(states(2, 3))
    expected = head.logits(states(2, 3)).softmax(dim=-1).max(dim=-1)
    assert torch.equal(likeliest.token_ids, expected.indices)
    assert torch.equal(likeliest.token_ids, head.argmax(states(2, 3)))
    torch.testing.assert_close(likeliest.probabilities, expected.values)
    assert head.likeliest(states(2, 0)).probabilities.shape == (2, 0)
    assert head.likeliest(states(2, 3) * float("nan")).probabilities.tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize("draft_proposal", ["argmax", "sample"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_generation_is_lossless(draft_proposal: str, do_sample: bool) -> None:
    target, drafter = tiny_target(), tiny_drafter()
    drafter.set_draft_vocabulary(DRAFTED)
    inputs = ragged_batch()
    options = {"do_sample": do_sample, "top_k": 5, "suppress_tokens": [4], "max_new_tokens": 12}
    if not do_sample:
        options.pop("top_k")
    drafted = generate(target, inputs, assistant_model=drafter, draft_proposal=draft_proposal, **options)
    assert drafter.last_generation_stats.drafted_tokens > 0
    if do_sample:
        assert drafted.shape[1] == inputs["input_ids"].shape[1] + 12
        assert not (drafted[:, -12:] == 4).any()
    else:
        assert torch.equal(drafted, generate(target, inputs, **options))


def test_models_made_in_inference_mode() -> None:
    """Their weights keep no count of changes."""
    with torch.inference_mode():
        target, drafter = tiny_target(), tiny_drafter()
        drafter.set_draft_vocabulary(DRAFTED)
        expected = generate(target, ragged_batch(), max_new_tokens=6)
        assert torch.equal(generate(target, ragged_batch(), max_new_tokens=6, assistant_model=drafter), expected)
    assert drafter.last_generation_stats.drafted_tokens > 0


def test_only_listed_tokens_are_accepted() -> None:
    target, drafter = tiny_target(), tiny_drafter()
    inputs = ragged_batch()
    plain = generate(target, inputs, max_new_tokens=12)
    absent = torch.tensor(sorted(set(range(VOCAB_SIZE)) - set(plain.flatten().tolist())))
    drafter.set_draft_vocabulary(absent)
    assert torch.equal(generate(target, inputs, assistant_model=drafter, max_new_tokens=12), plain)
    assert drafter.last_generation_stats.accepted_tokens == 0


def test_the_cut_is_kept_until_something_changes() -> None:
    target, drafter = tiny_target(), tiny_drafter()
    drafter.set_draft_vocabulary(DRAFTED)
    head = target.get_output_embeddings()
    first = DraftHead(drafter, head)
    assert DraftHead(drafter, head)._head is first._head
    with torch.no_grad():
        head.weight.mul_(2)
    changed = DraftHead(drafter, head)
    torch.testing.assert_close(changed.logits(states(1)), 2 * first.logits(states(1)))
    drafter.draft_token_ids.add_(1)
    assert torch.equal(DraftHead(drafter, head).argmax(states(4)) % 3, torch.full((4,), 2))
    prepack_linear_layers(target)
    with torch.no_grad():
        prepacked = DraftHead(drafter, head).logits(states(4))
    # it may be rounded to float16, as drafts need not be exact
    torch.testing.assert_close(prepacked[:, 2::3], head(states(4))[:, 2::3].detach(), rtol=1e-2, atol=1e-2)


def test_heads_without_rows_are_used_whole() -> None:
    target, drafter = tiny_target(), tiny_drafter()
    full = drafter.compute_logits(states(3), target.get_output_embeddings())
    drafter.set_draft_vocabulary(DRAFTED)
    wrapped = nn.Sequential(target.get_output_embeddings())
    torch.testing.assert_close(DraftHead(drafter, wrapped).logits(states(3)), full)


@pytest.mark.parametrize("token_ids", [[3, 2, 5], [2, 2], [-1, 4], [0, VOCAB_SIZE]])
def test_a_wrong_list_is_refused(token_ids: list[int]) -> None:
    target, drafter = tiny_target(), tiny_drafter()
    drafter.draft_token_ids = torch.tensor(token_ids)  # as a checkpoint may hold them
    with pytest.raises(DrafterCompatibilityError, match=r"`draft_token_ids`.*set_draft_vocabulary\(None\)"):
        generate(target, ragged_batch(), assistant_model=drafter, max_new_tokens=4)


def test_it_is_saved_with_the_drafter(tmp_path: Path) -> None:
    drafter = tiny_drafter()
    drafter.set_draft_vocabulary(DRAFTED)
    drafter.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert loaded.config.draft_vocab_size == len(DRAFTED)
    assert torch.equal(loaded.draft_token_ids, DRAFTED)
    loaded.set_draft_vocabulary(None)
    loaded.save_pretrained(tmp_path / "all")
    assert AutoModel.from_pretrained(tmp_path / "all").draft_token_ids is None
