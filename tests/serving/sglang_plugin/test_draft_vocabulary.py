"""Drafts among a draft vocabulary, against the package's own draft head."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tiny_models import BLOCK_SIZE, HIDDEN_SIZE, VOCAB_SIZE, tiny_drafter
from torch import nn

from adaflash_hf.generation.draft_head import DraftHead
from adaflash_hf.serving.sglang_plugin.draft_vocabulary import VocabularyDraftSampler, why_whole_vocabulary


TOKEN_IDS = torch.tensor([2, 7, 40, 41, 90])


@pytest.fixture
def lm_head() -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(HIDDEN_SIZE, VOCAB_SIZE, bias=False)


def test_drafts_are_those_of_the_engine(lm_head: nn.Linear) -> None:
    drafter = tiny_drafter()
    drafter.set_draft_vocabulary(TOKEN_IDS)
    rows = torch.randn(50, HIDDEN_SIZE)
    sampler = VocabularyDraftSampler(TOKEN_IDS, lm_head.weight, BLOCK_SIZE)
    drafts = sampler.argmax(rows)
    assert torch.equal(drafts, DraftHead(drafter, lm_head).argmax(rows))
    assert set(drafts.tolist()) == set(TOKEN_IDS.tolist()), "each of them is the likeliest of some row"


def test_in_a_graph_it_leaves_the_drafts_of_all_blocks(lm_head: nn.Linear) -> None:
    """The anchors' rows draft nothing, and a batch smaller than the graph fills the first places."""
    sampler = VocabularyDraftSampler(TOKEN_IDS, lm_head.weight, BLOCK_SIZE)
    sampler.reserve(max_requests=5)
    hidden_states = torch.randn(3 * BLOCK_SIZE, HIDDEN_SIZE)
    place = sampler.out.data_ptr()
    sampler(hidden_states, torch.zeros(3 * BLOCK_SIZE))
    drafted = hidden_states.view(3, BLOCK_SIZE, -1)[:, 1:].flatten(0, 1)
    assert torch.equal(sampler.out[: 3 * (BLOCK_SIZE - 1)], sampler.argmax(drafted))
    assert sampler.out.data_ptr() == place and len(sampler.out) == 5 * (BLOCK_SIZE - 1)


def test_other_weights_are_taken_in_place(lm_head: nn.Linear) -> None:
    token_ids = TOKEN_IDS.clone()
    sampler = VocabularyDraftSampler(token_ids, lm_head.weight, BLOCK_SIZE)
    rows = torch.randn(20, HIDDEN_SIZE)
    place = sampler._rows.data_ptr()
    with torch.no_grad():
        lm_head.weight.neg_()
        token_ids.copy_(torch.tensor([1, 2, 3, 4, 5]))
    sampler.renew(lm_head.weight)
    assert sampler._rows.data_ptr() == place
    assert torch.equal(
        sampler.argmax(rows), VocabularyDraftSampler(token_ids, lm_head.weight, BLOCK_SIZE).argmax(rows)
    )


@pytest.mark.parametrize(
    ("token_ids", "dtype", "num_ranks", "reason"),
    [
        (TOKEN_IDS, torch.float32, 1, None),
        (None, torch.float32, 1, "the drafter has no draft vocabulary"),
        (TOKEN_IDS, torch.float32, 2, "the rows of the target's LM head are split among 2 ranks"),
        (TOKEN_IDS, torch.float8_e4m3fn, 1, "the target's LM head is quantised"),
        (torch.tensor([5, VOCAB_SIZE]), torch.float32, 1, "it has tokens beyond the 96 rows of the target's LM head"),
    ],
)
def test_when_all_tokens_are_drafted(
    token_ids: torch.Tensor | None, dtype: torch.dtype, num_ranks: int, reason: str | None
) -> None:
    head = SimpleNamespace(weight=torch.zeros(VOCAB_SIZE, HIDDEN_SIZE).to(dtype))
    assert why_whole_vocabulary(token_ids, head, num_ranks) == reason
