"""The drafter against a plain restatement of its mathematics, with and without a cache, in every attention mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import ARCHITECTURES, RECURRENT_ARCHITECTURES, random_block, tiny_drafter, tiny_target
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import DFlashCache, DynamicCache, StaticCache
from transformers.masking_utils import flash_attention_mask

from adaflash_hf import DFlashDrafterModel, InvalidInputError


WINDOW = 6
MIXED_LAYERS: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "sliding": MIXED_LAYERS,
    "sliding_bidirectional": {**MIXED_LAYERS, "is_causal": False},
    "sliding_causal_everywhere": {**MIXED_LAYERS, "is_causal": True},
}
# Both sides are float32; they differ in the order of sums only.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
LORA_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "fc"]


def norm(x: torch.Tensor, module: nn.Module) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + module.variance_epsilon) * module.weight


def rotate(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """RoPE as complex rotation of the pairs (i, i + D/2) of `[heads, n, D]`."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * theta ** (-torch.arange(half) / half)  # [n, D/2]
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], dim=-1)


def visible_keys(drafter: DFlashDrafterModel, layer_idx: int, num_context: int) -> torch.Tensor:
    """`[block, context + block]`, written out pair by pair from the rules."""
    config, block = drafter.config, drafter.config.block_size
    is_sliding = config.layer_types[layer_idx] == "sliding_attention"
    is_causal = is_sliding if config.is_causal is None else config.is_causal
    mask = torch.zeros(block, num_context + block, dtype=torch.bool)
    for row in range(block):
        query = num_context + row
        for key in range(num_context + block):
            is_future = key > query
            is_too_old = is_sliding and query - key >= config.sliding_window
            mask[row, key] = not is_too_old and not (is_future and is_causal)
    return mask


def reference_forward(drafter: DFlashDrafterModel, noise: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
    """One sequence, no cache: `noise` `[block, H]`, `context` `[n, K*H]`, result `[block, H]`."""
    config = drafter.config
    heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    theta = config.rope_parameters["rope_theta"]
    features = norm(context @ drafter.fc.weight.T, drafter.hidden_norm)
    positions = torch.arange(len(context) + len(noise)).float()
    x = noise
    for layer_idx, layer in enumerate(drafter.layers):
        attention, mlp = layer.self_attn, layer.mlp
        h = norm(x, layer.input_layernorm)
        source = torch.cat([features, h])
        q = norm((h @ attention.q_proj.weight.T).view(-1, heads, size), attention.q_norm).transpose(0, 1)
        k = norm((source @ attention.k_proj.weight.T).view(-1, kv_heads, size), attention.k_norm).transpose(0, 1)
        v = (source @ attention.v_proj.weight.T).view(-1, kv_heads, size).transpose(0, 1)
        q, k = rotate(q, positions[len(context) :], theta), rotate(k, positions, theta)
        k, v = (t.repeat_interleave(heads // kv_heads, dim=0) for t in (k, v))
        scores = (q @ k.transpose(1, 2)) / size**0.5
        scores = scores.masked_fill(~visible_keys(drafter, layer_idx, len(context)), float("-inf"))
        x = x + (scores.softmax(-1) @ v).transpose(0, 1).flatten(1) @ attention.o_proj.weight.T
        h = norm(x, layer.post_attention_layernorm)
        x = x + (nn.functional.silu(h @ mlp.gate_proj.weight.T) * (h @ mlp.up_proj.weight.T)) @ mlp.down_proj.weight.T
    return norm(x, drafter.norm)


def test_tensors_are_those_of_the_published_layout() -> None:
    drafter = tiny_drafter(num_hidden_layers=3)
    expected = {"fc.weight": [32, 64], "hidden_norm.weight": [32], "norm.weight": [32]}
    for i in range(3):
        expected |= {
            f"layers.{i}.input_layernorm.weight": [32],
            f"layers.{i}.post_attention_layernorm.weight": [32],
            f"layers.{i}.self_attn.q_proj.weight": [32, 32],
            f"layers.{i}.self_attn.k_proj.weight": [16, 32],
            f"layers.{i}.self_attn.v_proj.weight": [16, 32],
            f"layers.{i}.self_attn.o_proj.weight": [32, 32],
            f"layers.{i}.self_attn.q_norm.weight": [8],
            f"layers.{i}.self_attn.k_norm.weight": [8],
            f"layers.{i}.mlp.gate_proj.weight": [48, 32],
            f"layers.{i}.mlp.up_proj.weight": [48, 32],
            f"layers.{i}.mlp.down_proj.weight": [32, 48],
        }
    assert {name: list(t.shape) for name, t in drafter.state_dict().items()} == expected
    assert len(expected) == 3 + 11 * 3
    assert drafter.length_head is None


def test_attention_bias_adds_biases_to_the_attention_projections_only() -> None:
    biases = {name for name in tiny_drafter(attention_bias=True).state_dict() if name.endswith("bias")}
    assert biases == {f"layers.{i}.self_attn.{p}_proj.bias" for i in range(2) for p in "qkvo"}


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_forward_is_the_reference(variant: str, implementation: str) -> None:
    drafter = tiny_drafter(**VARIANTS[variant])
    drafter.set_attn_implementation(implementation)
    noise, context = random_block(drafter.config, new_context=11)
    output = drafter(noise, context).last_hidden_state
    for row in range(len(noise)):
        torch.testing.assert_close(output[row], reference_forward(drafter, noise[row], context[row]), **TOLERANCE)


@pytest.mark.slow
@torch.no_grad()
def test_flex_attention_is_sdpa() -> None:
    drafter = tiny_drafter(**MIXED_LAYERS)
    noise, context = random_block(drafter.config, new_context=11)
    padding = torch.ones(2, 15, dtype=torch.long)
    padding[0, :3] = 0
    expected = drafter(noise, context, attention_mask=padding).last_hidden_state
    drafter.set_attn_implementation("flex_attention")
    output = drafter(noise, context, attention_mask=padding).last_hidden_state
    torch.testing.assert_close(output, expected, **TOLERANCE)


def make_cache(kind: str, drafter: DFlashDrafterModel) -> DynamicCache:
    if kind == "dynamic_without_config":
        return DynamicCache()
    cache = {"dflash": DFlashCache, "dynamic": DynamicCache}[kind](config=drafter.config)
    # Recording keeps what a sliding layer would evict before the block is cropped away.
    cache.activate_past_recording()
    return cache


@pytest.mark.parametrize("kind", ["dflash", "dynamic", "dynamic_without_config"])
@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_cached_rounds_are_the_uncached_forward(variant: str, kind: str) -> None:
    drafter = tiny_drafter(**VARIANTS[variant])
    block = drafter.config.block_size
    cache, seen = make_cache(kind, drafter), []
    for round_idx, new_context in enumerate([5, 1, 4, 2, 7, 1, 1]):
        noise, context = random_block(drafter.config, new_context=new_context, seed=round_idx)
        seen.append(context)
        if kind == "dflash":
            # What transformers' own generator does; the drafter must neither need it nor be misled by it.
            cache.set_previous_accepted_tokens(new_context)
        cached = drafter(noise, context, cache=cache).last_hidden_state
        cache.crop(-block)
        assert cache.get_seq_length() == sum(c.shape[1] for c in seen)
        torch.testing.assert_close(cached, drafter(noise, torch.cat(seen, 1)).last_hidden_state, **TOLERANCE)


@torch.no_grad()
def test_a_round_without_new_context() -> None:
    drafter = tiny_drafter()
    noise, context = random_block(drafter.config)
    cache = make_cache("dflash", drafter)
    drafter(noise, context, cache=cache)
    cache.crop(-drafter.config.block_size)
    expected = drafter(noise, context).last_hidden_state
    for nothing in (None, context[:, :0]):
        torch.testing.assert_close(drafter(noise, nothing, cache=cache).last_hidden_state, expected, **TOLERANCE)
        cache.crop(-drafter.config.block_size)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_left_padding_changes_nothing(variant: str, implementation: str) -> None:
    drafter = tiny_drafter(**VARIANTS[variant])
    drafter.set_attn_implementation(implementation)
    noise, context = random_block(drafter.config, new_context=9)
    block, pad = drafter.config.block_size, 3
    mask = torch.ones(2, 9 + block, dtype=torch.long)
    mask[0, :pad] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    padded = drafter(noise, context, attention_mask=mask, position_ids=positions).last_hidden_state
    alone = drafter(noise[:1], context[:1, pad:]).last_hidden_state
    torch.testing.assert_close(padded[:1], alone, **TOLERANCE)
    torch.testing.assert_close(padded[1:], drafter(noise[1:], context[1:]).last_hidden_state, **TOLERANCE)


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_padding_with_a_cache_spans_what_the_window_has_evicted(variant: str) -> None:
    drafter = tiny_drafter(**VARIANTS[variant])
    block, pad = drafter.config.block_size, 2
    cache, seen = make_cache("dflash", drafter), []
    for round_idx, new_context in enumerate([6, 3, 5]):
        noise, context = random_block(drafter.config, new_context=new_context, seed=round_idx)
        seen.append(context)
        total = sum(c.shape[1] for c in seen)
        mask = torch.ones(2, total + block, dtype=torch.long)
        mask[0, :pad] = 0
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -new_context - block :]
        cached = drafter(noise, context, attention_mask=mask, position_ids=positions, cache=cache).last_hidden_state
        cache.crop(-block)
        alone = drafter(noise[:1], torch.cat(seen, 1)[:1, pad:]).last_hidden_state
        torch.testing.assert_close(cached[:1], alone, **TOLERANCE)


@torch.no_grad()
def test_masks_given_in_full_are_used_as_they_are() -> None:
    drafter = tiny_drafter(**MIXED_LAYERS)
    noise, context = random_block(drafter.config, new_context=9)
    expected = drafter(noise, context).last_hidden_state
    masks = {name: visible_keys(drafter, i, 9)[None, None] for i, name in enumerate(drafter.config.layer_types)}
    output = drafter(noise, context, attention_mask=masks).last_hidden_state
    torch.testing.assert_close(output, expected, **TOLERANCE)
    # None in a dictionary stands for the layer type's own rule.
    output = drafter(noise, context, attention_mask=dict.fromkeys(masks)).last_hidden_state
    torch.testing.assert_close(output, expected, **TOLERANCE)
    # One four-dimensional mask is for every layer, so the sliding layer loses its window.
    everything = torch.ones(1, 1, 4, 13, dtype=torch.bool)
    output = drafter(noise, context, attention_mask=everything).last_hidden_state
    unrestricted = tiny_drafter()
    unrestricted.load_state_dict(drafter.state_dict())
    torch.testing.assert_close(output, unrestricted(noise, context).last_hidden_state, **TOLERANCE)


@torch.no_grad()
def test_position_ids() -> None:
    drafter = tiny_drafter()
    noise, context = random_block(drafter.config, new_context=5)
    default = drafter(noise, context).last_hidden_state
    positions = torch.arange(9)[None]
    torch.testing.assert_close(drafter(noise, context, position_ids=positions).last_hidden_state, default)
    # RoPE is relative: a common shift changes nothing, a gap between context and block does.
    torch.testing.assert_close(
        drafter(noise, context, position_ids=positions + 100).last_hidden_state, default, rtol=1e-3, atol=1e-4
    )
    gap = positions + 50 * (positions >= 5)
    assert (drafter(noise, context, position_ids=gap).last_hidden_state - default).abs().max() > 0.01


@torch.no_grad()
def test_cache_is_made_on_request_and_taken_under_its_old_name() -> None:
    drafter = tiny_drafter(**MIXED_LAYERS)
    noise, context = random_block(drafter.config, new_context=12)
    output = drafter(noise, context, use_cache=True)
    cache = output.get("cache", output.get("past_key_values"))
    assert cache.get_seq_length() == 16
    cache.crop(-4)
    more = random_block(drafter.config, new_context=2, seed=5)[1]
    continued = drafter(noise, more, past_key_values=cache).last_hidden_state
    whole = drafter(noise, torch.cat([context, more], 1)).last_hidden_state
    torch.testing.assert_close(continued, whole, **TOLERANCE)
    plain = drafter(noise, context)
    assert plain.get("cache", plain.get("past_key_values")) is None


def test_gradient_checkpointing_gives_the_same_gradients() -> None:
    drafter = tiny_drafter(**MIXED_LAYERS).train()
    noise, context = random_block(drafter.config)
    gradients = []
    for is_checkpointing in (False, True):
        if is_checkpointing:
            drafter.gradient_checkpointing_enable()
        drafter.zero_grad()
        drafter(noise, context).last_hidden_state.square().sum().backward()
        gradients.append({name: p.grad.clone() for name, p in drafter.named_parameters()})
    assert gradients[0].keys() == dict(drafter.named_parameters()).keys()
    for name, gradient in gradients[0].items():
        assert gradient.abs().sum() > 0, name
        torch.testing.assert_close(gradients[1][name], gradient)


def test_a_cache_with_gradient_checkpointing_is_refused() -> None:
    drafter = tiny_drafter().train()
    drafter.gradient_checkpointing_enable()
    noise, context = random_block(drafter.config)
    with pytest.raises(InvalidInputError, match="`gradient_checkpointing_disable"):
        drafter(noise, context, cache=DynamicCache())
    with torch.no_grad():
        drafter(noise, context, cache=DynamicCache())


@torch.no_grad()
def test_a_preallocated_cache() -> None:
    drafter = tiny_drafter()
    cache = StaticCache(config=drafter.config, max_cache_len=20)
    noise, context = random_block(drafter.config, new_context=9)
    output = drafter(noise, context, cache=cache).last_hidden_state
    torch.testing.assert_close(output, drafter(noise, context).last_hidden_state, **TOLERANCE)
    sliding = tiny_drafter(**MIXED_LAYERS)
    with pytest.raises(InvalidInputError, match="`cache` is a StaticCache"):
        sliding(noise, context, cache=StaticCache(config=sliding.config, max_cache_len=20))


@torch.no_grad()
def test_a_mask_that_leaves_out_the_block_is_refused() -> None:
    drafter = tiny_drafter()
    noise, context = random_block(drafter.config, new_context=9)
    with pytest.raises(InvalidInputError, match=r"covers 9 keys; expected 13 = 0 in the cache \+ 9 new \+ 4 of the"):
        drafter(noise, context, attention_mask=torch.ones(2, 9))


@torch.no_grad()
def test_flash_attention_is_asked_for_the_same_rules() -> None:
    """Flash attention takes flags and a two-dimensional mask in place of a full one; it needs CUDA, its asker not."""
    asked = []

    def record(module: nn.Module, query: torch.Tensor, key: Any, value: Any, mask: Any, **kwargs: Any) -> tuple:
        asked.append((module.is_causal, kwargs.get("is_causal"), kwargs["sliding_window"], mask))
        return query.transpose(1, 2), None

    AttentionInterface.register("recorded_flash", record)
    AttentionMaskInterface.register("recorded_flash", flash_attention_mask)
    drafter = tiny_drafter(**MIXED_LAYERS)
    drafter.config._attn_implementation = "recorded_flash"
    noise, context = random_block(drafter.config, new_context=9)
    drafter(noise, context)
    assert asked == [(True, None, WINDOW, None), (False, None, None, None)]
    mask = torch.ones(2, 13, dtype=torch.long)
    mask[0, :3] = 0
    drafter(noise, context, attention_mask=mask)
    assert all(torch.equal(given, mask.bool()) for *_, given in asked[2:])


def test_features_of_the_wrong_width_are_refused() -> None:
    drafter = tiny_drafter()
    noise, context = random_block(drafter.config)
    with pytest.raises(InvalidInputError, match=r"width 63; expected 64 = 2 layers x 32.*\[0, 2\]"):
        drafter(noise, context[..., :63])


@pytest.mark.parametrize(("multiplier", "cap"), [(1.0, None), (0.25, None), (1.0, 2.0), (0.25, 2.0)])
@torch.no_grad()
def test_logits(multiplier: float, cap: float | None) -> None:
    drafter = tiny_drafter(output_multiplier=multiplier, final_logit_softcapping=cap)
    head, hidden = nn.Linear(32, 10, bias=False), torch.randn(3, 4, 32)
    expected = multiplier * (hidden @ head.weight.T)
    if cap is not None:
        expected = cap * torch.tanh(expected / cap)
    torch.testing.assert_close(drafter.compute_logits(hidden[:, 1:], head), expected[:, 1:])
    torch.testing.assert_close(drafter.compute_logits(hidden[0, 0], head), expected[0, 0])


@torch.no_grad()
def test_logits_see_a_flat_matrix() -> None:
    shapes = []

    class Recorder(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            shapes.append(tuple(input.shape))
            return super().forward(input)

    tiny_drafter().compute_logits(torch.randn(3, 4, 32)[:, 1:], Recorder(32, 10))
    assert shapes == [(9, 32)]


@torch.no_grad()
def test_hidden_states_and_attentions_can_be_recorded() -> None:
    drafter = tiny_drafter()
    drafter.set_attn_implementation("eager")
    noise, context = random_block(drafter.config, new_context=5)
    output = drafter(noise, context, output_hidden_states=True, output_attentions=True)
    assert len(output.hidden_states) == 3
    torch.testing.assert_close(output.hidden_states[0], noise)
    torch.testing.assert_close(output.hidden_states[-1], output.last_hidden_state)
    assert [a.shape for a in output.attentions] == [(2, 4, 4, 9)] * 2
    assert len(drafter(noise, context, return_dict=False)) == 1


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name not in RECURRENT_ARCHITECTURES])
@pytest.mark.parametrize("layers", ["full", "sliding"])
def test_transformers_own_dflash_decoding_accepts_the_drafter(architecture: str, layers: str) -> None:
    target = tiny_target(architecture)
    drafter = tiny_drafter(target, **VARIANTS[layers])
    prompt = torch.tensor([[5, 17, 8, 30, 11, 60, 7]])
    plain = target.generate(prompt, do_sample=False, max_new_tokens=24)
    drafted = target.generate(
        prompt, do_sample=False, max_new_tokens=24, assistant_model=drafter, speculation_type="dflash"
    )
    assert drafted.tolist() == plain.tolist()


def test_transformers_own_dflash_decoding_with_a_padded_prompt() -> None:
    target = tiny_target()
    prompt = torch.tensor([[0, 0, 5, 17, 8, 30, 11]])
    kwargs = {"attention_mask": (prompt != 0).long(), "do_sample": False, "max_new_tokens": 16}
    drafted = target.generate(
        prompt, assistant_model=tiny_drafter(target, **MIXED_LAYERS), speculation_type="dflash", **kwargs
    )
    assert drafted.tolist() == target.generate(prompt, **kwargs).tolist()


def test_lora_trains_merges_and_drafts() -> None:
    drafter = tiny_drafter(length_head_config={"bottleneck_size": 4})
    noise, context = random_block(drafter.config)
    config = LoraConfig(r=2, target_modules=LORA_MODULES, modules_to_save=["length_head"], init_lora_weights=False)
    wrapped = get_peft_model(drafter, config)
    hidden = wrapped(noise_embeds=noise, context_hidden_states=context).last_hidden_state
    wrapped.base_model.model.length_head(hidden).ratio.sum().backward()
    trainable = {name: p for name, p in wrapped.named_parameters() if p.requires_grad}
    assert len(trainable) == 2 * (7 * 2 + 1) + 4
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in trainable.values())
    target = tiny_target()
    prompt = torch.tensor([[5, 17, 8]])
    plain = target.generate(prompt, do_sample=False, max_new_tokens=10)
    drafted = target.generate(
        prompt, do_sample=False, max_new_tokens=10, assistant_model=wrapped, speculation_type="dflash"
    )
    assert drafted.tolist() == plain.tolist()
    merged = wrapped.merge_and_unload()
    torch.testing.assert_close(merged(noise, context).last_hidden_state, hidden, **TOLERANCE)


@pytest.mark.parametrize("variant", ["full", "sliding"])
@torch.no_grad()
def test_compiles_as_one_graph(variant: str) -> None:
    drafter = tiny_drafter(**VARIANTS[variant])
    noise, context = random_block(drafter.config)
    # The backend only traces: this is about graph breaks, not about the code that inductor makes.
    compiled = torch.compile(drafter, backend="eager", fullgraph=True)
    torch.testing.assert_close(
        compiled(noise, context).last_hidden_state, drafter(noise, context).last_hidden_state, **TOLERANCE
    )


@torch.no_grad()
def test_bfloat16_follows_float32() -> None:
    drafter = tiny_drafter(**MIXED_LAYERS)
    noise, context = random_block(drafter.config)
    expected = drafter(noise, context).last_hidden_state
    output = drafter.to(torch.bfloat16)(noise.bfloat16(), context.bfloat16()).last_hidden_state
    assert output.dtype == torch.bfloat16
    # bfloat16 keeps 8 bits; a few layers of it stay within a few per cent of values of size one.
    assert (output.float() - expected).norm() / expected.norm() < 0.05


@pytest.mark.parametrize("token_ids", [[], [3, 2], [2, 2], [-1, 4], [[1, 2]], [1.5, 2.5]])
def test_a_draft_vocabulary_that_is_no_list_of_ids_is_refused(token_ids: list) -> None:
    drafter = tiny_drafter()
    with pytest.raises(InvalidInputError, match="`token_ids` is .*ascending"):
        drafter.set_draft_vocabulary(torch.tensor(token_ids))
    assert drafter.draft_token_ids is None
