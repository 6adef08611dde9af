"""Single steps of any size on scratch requests."""

from __future__ import annotations

import pytest
import torch
from engine_traffic import engine_target
from plain_comparison import rows_per_forward
from tiny_models import tiny_drafter, tiny_target

from adaflash_hf.generation.engine_bench import NEW_TOKENS, EngineRoundBench, cost_fingerprint


def test_steps_of_any_size_leave_nothing_behind() -> None:
    target = tiny_target("llama", num_hidden_layers=1)
    drafter = tiny_drafter(target, num_hidden_layers=1, target_layer_ids=[0], block_size=5)
    bench = EngineRoundBench(target, drafter, max_requests=4, memory_limit_bytes=300_000)
    assert (bench.is_packed, bench.max_requests, bench.longest_verify_length) == (True, 4, 5)
    bench.run_draft(1)
    rows = rows_per_forward(target)
    for lengths in ([1], [5, 2, 1], [3], [4, 4, 4, 4]):
        rows.clear()
        bench.run_target(lengths)
        assert rows[-1] == sum(lengths)
    bench.run_target([1])
    assert rows[-1] == 1, "the rows of earlier steps were rolled back"
    assert 0 < bench._target.memory_bytes + bench._drafter.memory_bytes <= 300_000
    bench.close()
    assert bench._target.memory_bytes == bench._drafter.memory_bytes == 0
    bench.run_draft(2)  # it may be used again
    bench.close()


def test_fingerprint() -> None:
    target = engine_target()
    drafter = tiny_drafter(target, target_layer_ids=[0, 1])
    first = cost_fingerprint(target, drafter, False)
    assert first == cost_fingerprint(target, drafter, False) != cost_fingerprint(target, drafter, True)
    assert first["torch"] == torch.__version__ and first["threads"] == str(torch.get_num_threads())
    others = [(tiny_target("llama"), drafter), (target, tiny_drafter(target, target_layer_ids=[0, 1], block_size=9))]
    assert all(cost_fingerprint(*models, False) != first for models in others)


@pytest.mark.parametrize("max_requests", [1, 64])
def test_context_shrinks_to_fit_a_limit(max_requests: int) -> None:
    target = engine_target()
    drafter = tiny_drafter(target, target_layer_ids=[0, 1])
    bench = EngineRoundBench(target, drafter, max_requests, memory_limit_bytes=2_000_000)
    assert bench._context_tokens(128) == (128 if max_requests == 1 else 16)


def test_drafts_bring_new_tokens_which_are_taken_back() -> None:
    target = engine_target()
    bench = EngineRoundBench(target, tiny_drafter(target, target_layer_ids=[0, 1]), max_requests=3)
    bench.run_draft(3)
    rows: list[int] = []
    bench._drafter.model.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(kwargs["context_hidden_states"].shape[1]), with_kwargs=True
    )
    for _ in range(3):
        bench.run_draft(3)
    assert rows == [3 * NEW_TOKENS] * 3
    assert [bench._drafter.length(slot) for _, slot in bench._slots] == [128, 96, 192]
    bench.close()


@pytest.mark.parametrize("reads_likeliest", [False, True])
def test_drafts_are_projected_where_the_policy_reads_them(reads_likeliest: bool) -> None:
    target = engine_target()
    drafter = tiny_drafter(target, target_layer_ids=[0, 1], is_causal=True, block_size=6)
    bench = EngineRoundBench(target, drafter, max_requests=2)
    bench.reads_likeliest = reads_likeliest
    projected: list[int] = []
    compute_logits = drafter.compute_logits

    def spy(hidden_states: torch.Tensor, head: torch.nn.Module) -> torch.Tensor:
        projected.append(hidden_states.shape[:-1].numel())
        return compute_logits(hidden_states, head)

    drafter.compute_logits = spy  # type: ignore[method-assign]
    bench.run_draft(2)
    bench.run_target([3, 2])
    bench.run_draft(2, 3)
    bench.run_draft(2, 1)
    assert projected == ([2 * 5, 2 * 2] if reads_likeliest else [2 + 1])
    bench.close()
