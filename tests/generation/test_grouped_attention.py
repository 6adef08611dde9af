"""Query heads that share a key head attend as rows of one head, with the same results and no copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plain_comparison import generate, prompt
from tiny_models import tiny_drafter, tiny_target
from torch import nn
from transformers.cache_utils import DynamicCache
from transformers.integrations import sdpa_attention

from adaflash_hf.generation import grouped_attention, packed_attention
from adaflash_hf.generation.grouped_attention import (
    ATTENTION_NAME,
    GroupedAttention,
    _grouped_bias,
    grouped_attention_forward,
)
from adaflash_hf.generation.packed_attention import AttentionSwitch
from adaflash_hf.generation.packed_cache import PackedCache
from adaflash_hf.generation.visibility import Visibility


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("is_boolean", [True, False])
def test_same_as_sdpa(batch_size: int, is_boolean: bool) -> None:
    torch.manual_seed(0)
    module = nn.Module()
    module.num_key_value_groups = 3  # type: ignore[assignment]
    query = torch.randn(batch_size, 6, 5, 16)
    key, value = torch.randn(2, batch_size, 2, 11, 16)
    mask = torch.rand(batch_size, 1, 5, 11) < 0.6
    mask[..., 0] = True
    if not is_boolean:
        mask = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))
    arguments: Any = (module, query, key, value, mask)
    expected, _ = sdpa_attention.sdpa_attention_forward(*arguments, scaling=0.3)
    actual, weights = grouped_attention_forward(*arguments, scaling=0.3)
    torch.testing.assert_close(actual, expected)
    assert weights is None and actual.is_contiguous()


def test_a_mask_is_prepared_once_for_all_layers_and_anew_when_it_changes() -> None:
    mask = torch.tensor([[True, False], [True, True]])[None, None]
    bias = _grouped_bias(mask, 2, torch.float32)
    inf = float("inf")
    assert bias[0, 0].tolist() == [[0, -inf], [0, 0]] * 2
    assert _grouped_bias(mask, 2, torch.float32) is bias
    assert _grouped_bias(mask, 2, torch.bfloat16).dtype == torch.bfloat16
    assert _grouped_bias(mask, 3, torch.float32).shape == (1, 1, 6, 2)
    assert _grouped_bias(mask.clone(), 2, torch.float32) is not bias
    _grouped_bias(mask, 2, torch.float32)
    mask[0, 0, 0, 1] = True
    assert not _grouped_bias(mask, 2, torch.float32).any()
    with torch.inference_mode():
        assert _grouped_bias(torch.zeros(1, 1, 1, 3), 2, torch.float32).shape == (1, 1, 2, 3)


def test_a_block_of_a_target_repeats_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    repeats: list[int] = []
    repeat = sdpa_attention.repeat_kv
    monkeypatch.setattr(sdpa_attention, "repeat_kv", lambda states, n: repeats.append(n) or repeat(states, n))
    target = tiny_target("llama", num_attention_heads=4, num_key_value_heads=2)
    ids = torch.arange(1, 20)[None]
    logits = []
    for is_grouped in (False, True):
        cache: Any = DynamicCache()
        name = "cache" if "cache" in target.forward.__code__.co_varnames else "past_key_values"
        with torch.no_grad():
            target(ids[:, :12], **{name: cache})
            repeats.clear()
            if is_grouped:
                with GroupedAttention(target).active():
                    logits.append(target(ids[:, 12:], **{name: cache}).logits)
            else:
                logits.append(target(ids[:, 12:], **{name: cache}).logits)
        assert bool(repeats) is not is_grouped
    torch.testing.assert_close(*logits)
    assert target.config._attn_implementation == "sdpa"


def test_restored_after_an_error() -> None:
    target = tiny_target("llama", num_attention_heads=4, num_key_value_heads=2)
    with pytest.raises(RuntimeError), GroupedAttention(target).active():
        assert target.config._attn_implementation == ATTENTION_NAME
        raise RuntimeError
    assert target.config._attn_implementation == "sdpa"


def test_nothing_is_left_behind_beside_packed_passes() -> None:
    """An engine's round may begin while `generate()` is in a forward pass, and end after it."""
    target = tiny_target("llama", num_attention_heads=4, num_key_value_heads=2)
    step = PackedCache([Visibility()]).begin([], [])
    grouped, packed = GroupedAttention(target).active(), AttentionSwitch(target).active(step)
    grouped.__enter__()
    packed.__enter__()
    grouped.__exit__(None, None, None)
    packed.__exit__(None, None, None)
    assert target.config._attn_implementation == "sdpa"
    packed, grouped = AttentionSwitch(target).active(step), GroupedAttention(target).active()
    packed.__enter__()
    with grouped:
        assert target.config._attn_implementation == packed_attention.ATTENTION_NAME
        packed.__exit__(None, None, None)
        assert target.config._attn_implementation == ATTENTION_NAME
    assert target.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("reason", ["eager", "replaced", "compiled", "one head each"])
def test_other_attention_is_left_alone(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = 4 if reason == "one head each" else 2
    target = tiny_target("llama", num_attention_heads=4, num_key_value_heads=heads)
    if reason == "eager":
        target.set_attn_implementation("eager")
    if reason == "replaced":
        monkeypatch.setitem(grouped_attention.ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", lambda *a, **k: None)
    if reason == "compiled":
        target.model.layers[0].compile()
    before = target.config._attn_implementation
    with GroupedAttention(target).active():
        assert target.config._attn_implementation == before


def test_generate_attends_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("qwen3", num_attention_heads=4, num_key_value_heads=2)
    inputs = prompt()
    plain = generate(target, inputs, max_new_tokens=10)
    names: set[str] = set()
    target.model.layers[0].register_forward_pre_hook(lambda *_: names.add(target.config._attn_implementation))
    actual = generate(target, inputs, assistant_model=tiny_drafter(target), max_new_tokens=10)
    assert torch.equal(actual, plain)
    assert names == {ATTENTION_NAME}
