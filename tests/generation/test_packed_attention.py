"""The packed attention itself: against one dense attention per request, and switched on for one thread only."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch
from tiny_models import COMMON_FIELDS, tiny_target
from torch import nn
from transformers import AutoModelForCausalLM, DeepseekV3Config

from adaflash_hf.errors import UnsupportedGenerationError
from adaflash_hf.generation.packed_attention import ATTENTION_NAME, AttentionSwitch, packed_attention_forward
from adaflash_hf.generation.packed_cache import PackedCache
from adaflash_hf.generation.packed_target import PackedTarget
from adaflash_hf.generation.visibility import Visibility


HEADS, KEY_HEADS, HEAD_DIM, VALUE_DIM = 6, 2, 8, 4
# Float32 on both sides, summed in another order.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
RULES = {
    "causal": Visibility(),
    "window": Visibility(True, 9),
    "bidirectional": Visibility(False),
    "bidirectional_window": Visibility(False, 9),
}


class Layer(nn.Module):
    """As much of an attention module as the interface looks at."""

    layer_idx = 0
    config = None


def dense(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visibility: Visibility,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """One request at full length: `query` holds the last of the `keys`; heads first."""
    rows, total = query.shape[1], keys.shape[1]
    keys, values = (states.repeat_interleave(HEADS // KEY_HEADS, dim=0) for states in (keys, values))
    scores = query @ keys.transpose(1, 2) * 0.3
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    visible = visibility.mask(torch.arange(total - rows, total)[:, None], torch.arange(total)[None])
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(-1, 1, 1).expand(-1, rows, 1)], dim=-1)
    return (scores.softmax(dim=-1)[..., :total] @ values).transpose(0, 1)  # (rows, heads, value_dim)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ["plain", "softcap", "sinks"])
def test_mixed_steps_equal_dense_attention(rule: str, kind: str) -> None:
    """Requests of different age bring one row, a few or a chunk, in any order, and take some of them back."""
    generator, visibility = random.Random(0), RULES[rule]
    torch.manual_seed(0)
    sinks = torch.randn(HEADS) if kind == "sinks" else None
    softcap = 1.5 if kind == "softcap" else None
    cache, switch = PackedCache([visibility]), AttentionSwitch(nn.Module())
    known: dict[int, list[torch.Tensor]] = {}
    for _ in range(12):
        if len(known) < 6:
            known[cache.allocate()] = [torch.zeros(KEY_HEADS, 0, HEAD_DIM), torch.zeros(KEY_HEADS, 0, VALUE_DIM)]
        slots = generator.sample(list(known), generator.randint(1, len(known)))
        counts = [generator.choice([1, 1, 2, 4, 7, 90]) for _ in slots]
        total = sum(counts)
        query = torch.randn(1, HEADS, total, HEAD_DIM)
        new = [torch.randn(1, KEY_HEADS, total, size) for size in (HEAD_DIM, VALUE_DIM)]
        step = cache.begin(slots, counts)
        with switch.active(step):
            cache.update(*new, 0)
            extras: dict[str, Any] = {"softcap": softcap, "s_aux": sinks}
            output, _ = packed_attention_forward(Layer(), query, *new, None, scaling=0.3, **extras)
        cache.finish()
        begin = 0
        for slot, count in zip(slots, counts, strict=True):
            rows = slice(begin, begin + count)
            pairs = zip(known[slot], new, strict=True)
            known[slot] = [torch.cat([old, states[0, :, rows]], dim=1) for old, states in pairs]
            expected = dense(query[0, :, rows], *known[slot], visibility, softcap, sinks)
            torch.testing.assert_close(output[0, rows], expected, **TOLERANCE)
            kept = cache.length(slot) - generator.randint(0, count - 1)
            cache.truncate(slot, kept)
            known[slot] = [states[:, :kept] for states in known[slot]]
            begin += count


def test_switch_is_reversed_after_errors_too() -> None:
    target = tiny_target("llama")
    cache = PackedCache([Visibility()])
    step = cache.begin([], [])
    switch, other = AttentionSwitch(target), AttentionSwitch(target)
    with pytest.raises(ZeroDivisionError), switch.active(step), other.active(step):
        assert target.config._attn_implementation == ATTENTION_NAME
        raise ZeroDivisionError
    assert target.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(("architecture", "implementation"), [("qwen3", "sdpa"), ("gpt_oss", "eager")])
def test_another_thread_is_not_disturbed(architecture: str, implementation: str) -> None:
    """A plain forward in the middle of a packed one, on the same model object."""
    target = tiny_target(architecture)
    assert target.config._attn_implementation == implementation
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        expected = target(ids).logits
    results: list[torch.Tensor] = []

    def run_plain() -> None:
        assert target.config._attn_implementation == ATTENTION_NAME
        with torch.no_grad():
            results.append(target(ids).logits)

    def meanwhile(*args: Any) -> None:
        thread = threading.Thread(target=run_plain)
        handle.remove()
        thread.start()
        thread.join()

    packed = PackedTarget(target)
    handle = target.model.layers[1].register_forward_hook(meanwhile)
    actual = packed.forward([packed.allocate()], [ids[0].tolist()]).logits
    torch.testing.assert_close(results[0], expected, rtol=0, atol=0)
    torch.testing.assert_close(actual, expected[0], rtol=1e-4, atol=1e-4)
    assert target.config._attn_implementation == implementation


def test_a_mask_of_the_models_own_is_refused() -> None:
    cache = PackedCache([Visibility()])
    slot = cache.allocate()
    states = torch.randn(1, 2, 3, 8)
    with AttentionSwitch(nn.Module()).active(cache.begin([slot], [3])):
        cache.update(states, states, 0)
        with pytest.raises(UnsupportedGenerationError, match="passes a mask"):
            packed_attention_forward(Layer(), states, states, states, torch.zeros(1, 1, 3, 3))


def test_attention_to_other_states_than_those_in_the_cache_is_refused() -> None:
    """DeepSeek-V3 caches latents and makes keys and values of them in every forward pass."""
    fields = {name: size for name, size in COMMON_FIELDS.items() if name != "head_dim"}
    latents = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6}
    config = DeepseekV3Config(**fields, **latents, first_k_dense_replace=fields["num_hidden_layers"])
    packed = PackedTarget(AutoModelForCausalLM.from_config(config).eval())
    with pytest.raises(UnsupportedGenerationError, match=r"sizes \(8, 4\) .* sizes \(12, 6\);.*Use `generate"):
        packed.forward([packed.allocate()], [[5, 6, 7]])
