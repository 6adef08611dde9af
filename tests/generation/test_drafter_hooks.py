from __future__ import annotations

import copy
import gc
from dataclasses import dataclass

import pytest
import torch
from oracle_drafter import give_head_unit_rows, oracle_drafter
from tiny_models import tiny_drafter, tiny_target

from adaflash_hf.generation import cost_aware_policy
from adaflash_hf.generation.drafter_hooks import hooks_of, traffic_domain
from adaflash_hf.generation.length_policies import FixedLengthPolicy


PROMPT = torch.tensor([[5, 9, 11, 20, 31]])


def plain(target, prompt, **kwargs):
    return target.generate(prompt, do_sample=False, attention_mask=torch.ones_like(prompt), **kwargs)


@pytest.fixture(scope="module")
def target():
    return give_head_unit_rows(tiny_target("llama"))


def test_rounds_and_tokens_of_a_request(target):
    reference = plain(target, PROMPT, max_new_tokens=12)[0].tolist()
    # Positions 6, 7, 8 are drafted from the anchor at 5, where the prompt's own prediction stands; 8 is wrong.
    drafter = oracle_drafter(target, [reference], mistakes=[8])
    results, calls = [], []
    hooks_of(drafter).on_finished(results.append)
    hooks_of(drafter).between_rounds(lambda: calls.append(len(results)))
    hooks_of(drafter).drafter_version = 3
    with traffic_domain("math"):
        target.generate(PROMPT, assistant_model=drafter, max_new_tokens=12, do_sample=False)
    (result,) = results
    assert result.sequence_ids == reference
    assert result.rounds == [(4, 2), (4, 3), (4, 3)]
    assert (result.domain, result.drafter_version, result.finish_reason) == ("math", 3, "length")
    assert result.stats.accepted_tokens == 8
    assert calls == [0, 0, 0]


def test_a_batch_without_its_padding(target):
    rows = [[5, 9, 11], [7, 7, 8, 21, 30]]
    references = [plain(target, torch.tensor([row]), max_new_tokens=8)[0].tolist() for row in rows]
    prompts = torch.tensor([[0, 0, *rows[0]], rows[1]])
    mask = (torch.tensor([[0, 0, 1, 1, 1], [1] * 5])).long()
    drafter = oracle_drafter(target, references)
    results = []
    hooks_of(drafter).on_finished(results.append)
    target.generate(prompts, attention_mask=mask, assistant_model=drafter, max_new_tokens=8, do_sample=False)
    assert [result.prompt_ids for result in results] == rows
    assert [result.sequence_ids for result in results] == references
    assert all(sum(accepted + 1 for _, accepted in result.rounds) >= 7 for result in results)


def test_an_end_of_sequence_is_told_from_a_limit(target):
    reference = plain(target, PROMPT, max_new_tokens=12)[0].tolist()
    drafter = oracle_drafter(target, [reference])
    results = []
    hooks_of(drafter).on_finished(results.append)
    target.generate(
        PROMPT, assistant_model=drafter, max_new_tokens=12, do_sample=False, eos_token_id=reference[7], pad_token_id=0
    )
    assert results[0].finish_reason == "stop"
    assert results[0].token_ids == reference[5 : 6 + reference[5:].index(reference[7])]


def test_a_failing_callback_changes_nothing(target):
    drafter = tiny_drafter(target)
    results = []

    def fail(*args):
        raise ZeroDivisionError

    hooks_of(drafter).between_rounds(fail)
    hooks_of(drafter).on_finished(fail)
    stop = hooks_of(drafter).on_finished(results.append)
    ids = target.generate(PROMPT, assistant_model=drafter, max_new_tokens=8, do_sample=False)
    assert torch.equal(ids, plain(target, PROMPT, max_new_tokens=8))
    stop()
    target.generate(PROMPT, assistant_model=drafter, max_new_tokens=8, do_sample=False)
    assert len(results) == 1


@dataclass
class Told(FixedLengthPolicy):
    """Equal to others of its kind, and not hashable."""

    changes: int = 0
    verify_length: int | None = None

    def drafter_changed(self) -> None:
        self.changes += 1


def test_the_policies_of_calls_are_told_of_another_drafter(target, monkeypatch):
    drafter, policies, shared = tiny_drafter(target), [Told(), Told()], Told()
    hooks = hooks_of(drafter)
    monkeypatch.setitem(cost_aware_policy._SHARED, drafter, shared)

    def generate(policy):
        options = {"length_policy": policy, "max_new_tokens": 4, "do_sample": False}
        target.generate(PROMPT, assistant_model=drafter, **options)
        target.generate(
            PROMPT.repeat(2, 1), attention_mask=torch.ones(2, 5).long(), assistant_model=drafter, **options
        )

    for policy in (*policies, "cost_aware", "fixed"):
        generate(policy)
    for version in (0, 3, 3, 4):
        hooks.drafter_version = version
    assert [policy.changes for policy in (*policies, shared)] == [2, 2, 2]
    gc.collect()
    generate(policies[0])
    assert len(hooks._policies) == 3
    # Between two rounds of a call that uses it for the first time, too.
    hooks.between_rounds(lambda: setattr(hooks, "drafter_version", 5))
    late = Told()
    target.generate(PROMPT, assistant_model=drafter, length_policy=late, max_new_tokens=4, do_sample=False)
    assert late.changes == 1 and policies[0].changes == 3


def test_prompts_that_are_not_known_are_not_reported(target):
    drafter = tiny_drafter(target)
    results = []
    hooks_of(drafter).on_finished(results.append)
    embeds = target.get_input_embeddings()(PROMPT)
    target.generate(inputs_embeds=embeds, assistant_model=drafter, max_new_tokens=4, do_sample=False)
    assert results == []


def test_a_copy_of_a_drafter_has_no_hooks_and_nothing_is_saved_of_them(target, tmp_path):
    drafter = tiny_drafter(target)
    hooks_of(drafter).on_finished(print)
    assert not hooks_of(copy.deepcopy(drafter)).is_used
    drafter.save_pretrained(tmp_path)
    assert "hooks" not in (tmp_path / "config.json").read_text()
