"""Layers are prepacked while tokens are generated, whoever else generates, and plain before and after."""

from __future__ import annotations

import copy
import logging
import pickle
import threading

import pytest
import torch
from oracle_drafter import OracleDrafter
from tiny_models import tiny_drafter, tiny_target
from torch import nn

from adaflash_hf.generation import automatic_prepacking, prepacking
from adaflash_hf.generation.automatic_prepacking import AutomaticPrepacking
from adaflash_hf.generation.engine import AdaFlashEngine
from adaflash_hf.generation.prepacking import (
    PrepackedLinear,
    is_rearranged,
    prepack_linear_layers,
    restore_linear_layers,
)


PROMPT = torch.tensor([[5, 9, 11, 20, 31]])
GREEDY = {"max_new_tokens": 9, "do_sample": False}

pytestmark = pytest.mark.skipif(
    not (prepacking.can_prepack_half() and prepacking.can_prepack_full()), reason="this build of PyTorch has neither"
)


@pytest.fixture
def target():
    return tiny_target("llama")


def kinds(model: nn.Module) -> set[type]:
    return {type(module) for module in model.modules() if isinstance(module, nn.Linear)}


def seen_while_generating(target, drafter, **kwargs) -> set[type]:
    """Kinds of linear layers at every new token."""
    seen: set[type] = set()

    def look(input_ids, scores):
        seen.update(kinds(target) | kinds(drafter))
        return scores

    target.generate(PROMPT, assistant_model=drafter, logits_processor=[look], **GREEDY, **kwargs)
    return seen


def test_prepacked_while_generating_and_plain_before_and_after(target):
    drafter = tiny_drafter(target)
    plain = target.generate(PROMPT, **GREEDY)
    assert seen_while_generating(target, drafter) == {PrepackedLinear}
    assert kinds(target) == kinds(drafter) == {nn.Linear}
    # The next call finds the copies; neither they nor anything else goes along with the model.
    assert is_rearranged(target.lm_head)
    assert type(pickle.loads(pickle.dumps(target.lm_head))) is nn.Linear
    twin = copy.deepcopy(target)
    assert kinds(twin) == {nn.Linear} and not is_rearranged(twin.lm_head)
    assert torch.equal(twin.generate(PROMPT, **GREEDY), plain)
    assert torch.equal(target.generate(PROMPT, assistant_model=drafter, **GREEDY), plain)


def test_weights_changed_in_between_count(target):
    drafter = OracleDrafter(tiny_drafter(target).config).eval()
    for _ in range(3):
        plain = target.generate(PROMPT, **GREEDY)
        drafter.memorise(target, [plain[0].tolist()], wrong_every=3)
        assert torch.equal(target.generate(PROMPT, assistant_model=drafter, **GREEDY), plain)
        with torch.no_grad():
            for parameter in target.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))


def test_a_call_that_fails_leaves_no_trace(target):
    def fail(input_ids, scores):
        raise RuntimeError("the user's own")

    drafter = tiny_drafter(target)
    with pytest.raises(RuntimeError, match="the user's own"):
        target.generate(PROMPT, assistant_model=drafter, logits_processor=[fail], **GREEDY)
    assert kinds(target) == kinds(drafter) == {nn.Linear}


def test_what_the_user_said_of_a_model_counts(target):
    drafter = tiny_drafter(target)
    prepack_linear_layers(target)
    seen_while_generating(target, drafter)
    assert kinds(target) == {PrepackedLinear} and kinds(drafter) == {nn.Linear}
    restore_linear_layers(target)
    restore_linear_layers(drafter)
    assert seen_while_generating(target, drafter) == {nn.Linear}
    assert not is_rearranged(target.lm_head)
    prepack_linear_layers(target)
    assert kinds(target) == {PrepackedLinear}


def test_whoever_ends_first_leaves_the_layers_to_the_others(target):
    drafter = tiny_drafter(target)
    first, second = AutomaticPrepacking(target, drafter), AutomaticPrepacking(target)
    with second:
        with first, first:
            assert kinds(target) == kinds(drafter) == {PrepackedLinear}
        assert kinds(target) == {PrepackedLinear} and kinds(drafter) == {nn.Linear}
    assert kinds(target) == {nn.Linear}


def test_many_threads(target):
    prepackings = [AutomaticPrepacking(target) for _ in range(4)]

    def enter_often(prepacking):
        for _ in range(200):
            with prepacking:
                assert kinds(target) == {PrepackedLinear}

    failures: list[BaseException] = []

    def run(prepacking):
        try:
            enter_often(prepacking)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(one,)) for one in prepackings]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert kinds(target) == {nn.Linear}


def test_an_engine_prepacks_its_rounds(target):
    drafter = tiny_drafter(target)
    engine = AdaFlashEngine(target, drafter)
    seen: set[type] = set()

    def look(input_ids, scores):
        seen.update(kinds(target) | kinds(drafter))
        return scores

    plain = target.generate(PROMPT, **GREEDY)
    result = engine.submit(PROMPT, logits_processor=[look], **GREEDY).result()
    assert result.token_ids == plain[0, PROMPT.shape[1] :].tolist()
    assert seen == {PrepackedLinear}
    assert kinds(target) == {nn.Linear}


@pytest.mark.parametrize(("available", "told"), [(1000, "0.0 GB are free"), (None, "not known how much")])
def test_without_memory_for_copies_none_are_made(target, available, told, monkeypatch, caplog):
    monkeypatch.setattr(automatic_prepacking, "_NOT_WORTH_ASKING", 0)
    monkeypatch.setattr(automatic_prepacking, "available_memory_bytes", lambda: available)
    drafter = tiny_drafter(target)
    with caplog.at_level(logging.WARNING):
        assert seen_while_generating(target, drafter) == {nn.Linear}
        assert seen_while_generating(target, drafter) == {nn.Linear}
    assert sum(told in record.message for record in caplog.records) == 1
    restore_linear_layers(target)
    # Copies that exist already are not counted again.
    monkeypatch.setattr(automatic_prepacking, "available_memory_bytes", lambda: 1 << 40)
    other = tiny_target("llama", seed=3)
    assert seen_while_generating(other, tiny_drafter(other)) == {PrepackedLinear}
    monkeypatch.setattr(automatic_prepacking, "available_memory_bytes", lambda: 0)
    with AutomaticPrepacking(other):
        assert kinds(other) == {PrepackedLinear}


def test_compiled_models_are_left_alone(target):
    target._compiled_call_impl = lambda *args, **kwargs: None
    with AutomaticPrepacking(target):
        assert kinds(target) == {nn.Linear}
