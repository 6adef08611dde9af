"""After each round the target's cache holds exactly what a fresh prefill of the committed tokens would."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plain_comparison import CACHE_NAME, prompt, ragged_batch, shared_target
from transformers import DynamicCache, PreTrainedModel

from adaflash_hf import InvalidInputError
from adaflash_hf.generation.statistics import StatisticsRecorder
from adaflash_hf.generation.target_runner import TargetRunner, cache_argument_name


def new_runner(target: PreTrainedModel, inputs: dict[str, torch.Tensor], **kwargs: Any) -> TargetRunner:
    """A runner with its prompt in the cache, as `generate()` would prepare it."""
    mask = inputs.get("attention_mask")
    model_kwargs: dict[str, Any] = {"logits_to_keep": 1, **kwargs}
    if mask is not None:
        model_kwargs |= {"attention_mask": mask, "position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0)}
    else:
        model_kwargs["position_ids"] = torch.arange(inputs["input_ids"].shape[1])[None]
    runner = TargetRunner(
        target, model_kwargs, DynamicCache(config=target.config), [1], StatisticsRecorder(target.device)
    )
    for _ in runner.prefill(inputs["input_ids"], inputs["input_ids"].shape[1], None):
        pass
    return runner


@torch.no_grad()
def assert_cache_is_exact(runner: TargetRunner, target: PreTrainedModel, rows: list[list[int]]) -> None:
    """Compares the last slots of each row with the keys of the row's tokens, computed alone and at once."""
    for index, tokens in enumerate(rows):
        fresh = DynamicCache(config=target.config)
        target(torch.tensor([tokens]), use_cache=True, **{CACHE_NAME: fresh})
        for layer, expected in zip(runner.cache.layers, fresh.layers, strict=True):
            slots = min(expected.keys.shape[-2], layer.keys.shape[-2])
            torch.testing.assert_close(
                layer.keys[index, :, -slots:], expected.keys[0, :, -slots:], rtol=1e-4, atol=1e-5
            )


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3_text"])
@torch.no_grad()
def test_ragged_rounds(architecture: str) -> None:
    target, inputs = shared_target(architecture), ragged_batch((7, 3, 11))
    runner = new_runner(target, inputs)
    rows = [ids[mask.bool()].tolist() for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)]
    for step, kept in enumerate([[1, 4, 2], [4, 1, 1], [2, 2, 2], [1, 3, 4], [4, 4, 4], [0, 3, 1]]):
        block = prompt(12, seed=step).reshape(3, 4)
        runner.verify(block)
        runner.commit(kept)
        rows = [row + block[index, :count].tolist() for index, (row, count) in enumerate(zip(rows, kept, strict=True))]
        assert_cache_is_exact(runner, target, rows)
        # No slot more than the row with most tokens and padding needs.
        assert runner.num_slots == max(11 + len(row) - start for row, start in zip(rows, (7, 3, 11), strict=True))
    runner.close()


@torch.no_grad()
def test_rows_leave_the_batch() -> None:
    target, inputs = shared_target("gemma3_text"), ragged_batch((7, 3, 11))
    runner = new_runner(target, inputs)
    rows = [ids[mask.bool()].tolist() for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)]
    block = prompt(12).reshape(3, 4)
    runner.verify(block)
    runner.commit([4, 1, 2])
    assert runner.select_rows([1, 2])
    rows = [rows[1] + block[1, :1].tolist(), rows[2] + block[2, :2].tolist()]
    block = prompt(6).reshape(2, 3)
    runner.verify(block)
    runner.commit([1, 3])
    assert_cache_is_exact(runner, target, [rows[0] + block[0, :1].tolist(), rows[1] + block[1].tolist()])


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3_text", "lfm2", "qwen3_next"])
@torch.no_grad()
def test_verified_logits_and_replay(architecture: str) -> None:
    """Whatever was taken back, the next block is judged as if the rejected rows had never been there."""
    target = shared_target(architecture)
    runner = new_runner(target, {"input_ids": prompt(9)})
    ids = prompt(9)
    for kept in (1, 3, 4, 2):
        block = prompt(4, seed=kept)
        logits = runner.verify(block).logits
        runner.commit([kept])
        expected = target(torch.cat([ids, block], dim=1)).logits[:, -4:]
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=2e-4)
        ids = torch.cat([ids, block[:, :kept]], dim=1)
        assert runner.num_slots == ids.shape[1]


@torch.no_grad()
def test_catch_up_needs_no_logits() -> None:
    target = shared_target()
    runner = new_runner(target, ragged_batch((4, 4)))
    runner.verify(prompt(6).reshape(2, 3))
    runner.commit([3, 1])
    outputs = runner.catch_up(torch.tensor([[0, 0], [5, 6]]))
    assert outputs.logits.shape[1] == 1
    runner.commit([0, 2])
    first = ragged_batch((4, 4))["input_ids"].tolist()
    block = prompt(6).reshape(2, 3).tolist()
    assert_cache_is_exact(runner, target, [first[0] + block[0], first[1] + block[1][:1] + [5, 6]])


def test_prompt_that_is_cached_already() -> None:
    target = shared_target()
    runner = new_runner(target, {"input_ids": prompt(9)})
    with pytest.raises(InvalidInputError, match="`cache` already holds 9 tokens but the prompt has 8"):
        next(runner.prefill(prompt(8), 8, None))


def test_commit_before_verify() -> None:
    with pytest.raises(RuntimeError, match="before `verify`"):
        new_runner(shared_target(), {"input_ids": prompt(9)}).commit([1])


@torch.no_grad()
def test_tensors_of_the_batch_are_selected_with_it() -> None:
    """Other model arguments follow their rows; a tensor that only happens to be longer is left alone."""
    runner = new_runner(shared_target(), ragged_batch((4, 4, 4)))
    runner._step_kwargs = {"per_row": torch.arange(3), "table": torch.arange(7), "flag": True}
    runner.select_rows([0, 2])
    assert runner._step_kwargs["per_row"].tolist() == [0, 2]
    assert runner._step_kwargs["table"].tolist() == list(range(7))


def test_cache_argument_name() -> None:
    assert cache_argument_name(shared_target()) == CACHE_NAME
