from __future__ import annotations

import pytest
import torch
from oracle_drafter import give_head_unit_rows
from tiny_models import tiny_drafter, tiny_target

from adaflash_hf.errors import InvalidInputError
from adaflash_hf.generation.engine_requests import RequestResult
from adaflash_hf.online.probe import AcceptanceProbe


@pytest.fixture(scope="module")
def target():
    return give_head_unit_rows(tiny_target("llama"))


def answer(target, prompt, new_tokens=12):
    ids = torch.tensor([prompt])
    whole = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False)
    return RequestResult(0, prompt, whole[0, len(prompt) :].tolist(), "length")


def make_probe(target, **fields):
    return AcceptanceProbe(target, [0, 2], draft_length=3, **fields)


def test_it_counts_what_greedy_decoding_would_accept(target):
    """By hand: draft each block with the target's features before the anchor, compare with what followed."""
    drafter = tiny_drafter(target)
    result = answer(target, [5, 9, 11, 40], new_tokens=16)
    probe = make_probe(target, blocks_per_request=100, depth=2)
    probe.offer(result)
    probe.refresh()
    (batch,) = probe.kept()
    ids = torch.tensor([result.sequence_ids])
    states = target(input_ids=ids, output_hidden_states=True).hidden_states
    features = torch.cat([states[1], states[3]], dim=-1)
    expected = 0
    for anchor in batch["anchors"][0].tolist():
        block = torch.tensor([[ids[0, anchor], *[drafter.config.mask_token_id] * 3]])
        with torch.no_grad():
            hidden = drafter(target.get_input_embeddings()(block), features[:, :anchor]).last_hidden_state[:, 1:3]
            drafts = target.get_output_embeddings()(hidden)[0].argmax(-1).tolist()
        followed = ids[0, anchor + 1 : anchor + 3].tolist()
        expected += drafts[:1] == followed[:1]
        expected += drafts == followed
    assert probe.measure(drafter, batch).accepted == expected


def test_requests_that_say_nothing_are_not_kept(target):
    probe = make_probe(target)
    for result in (
        RequestResult(0, [5, 6], [7, 8], "length"),
        RequestResult(0, [5, 6], list(range(7, 20)), "error"),
    ):
        probe.offer(result)
    assert not probe.refresh()
    assert probe.num_blocks == 0


def test_long_requests_keep_their_end(target):
    probe = make_probe(target, max_tokens=20)
    probe.offer(RequestResult(0, list(range(4, 84)), list(range(10, 40)), "stop"))
    assert probe.refresh()
    (batch,) = probe.kept()
    assert batch["input_ids"].tolist() == [list(range(20, 40))]
    assert int(batch["anchors"].min()) >= 1


def test_the_target_runs_rarely_once_the_probe_is_full(target):
    probe = make_probe(target, max_requests=2, refresh_interval_s=1000.0)
    for i in range(5):
        probe.offer(answer(target, [5 + i, 9]))
    assert [probe.refresh() for _ in range(4)] == [True, True, False, False]


def test_settings_are_checked(target):
    with pytest.raises(InvalidInputError, match="max_requests"):
        make_probe(target, max_requests=0)
