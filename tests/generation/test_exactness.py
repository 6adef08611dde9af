"""Greedy float32 decoding gives the same tokens with and without a drafter, whatever the target and the drafter."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle_drafter import oracle_drafter
from peft import LoraConfig, get_peft_model
from plain_comparison import (
    BATCHES,
    assert_same_as_plain,
    exact_target,
    generate,
    oracle_for,
    prompt,
    ragged_batch,
    shared_target,
)
from tiny_models import MAMBA2_ARCHITECTURES, tiny_drafter
from transformers import AutoModelForCausalLM

from adaflash_hf import AdaFlashEngine


ARCHITECTURES = (
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "gemma3_text",
    "gpt_oss",
    "lfm2",
    "qwen3_next",
    "qwen3_5_text",
    *MAMBA2_ARCHITECTURES,
)
NEW_TOKENS = 20
LONG = 32
DRAFTER_VARIANTS: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "sliding": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6},
    "sliding_bidirectional": {
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 6,
        "is_causal": False,
    },
}


@cache
def answer_of(architecture: str, batch: str) -> torch.Tensor:
    return generate(shared_target(architecture), BATCHES[batch](), max_new_tokens=LONG)


def short_answer_of(architecture: str, batch: str, new_tokens: int = NEW_TOKENS) -> torch.Tensor:
    answer = answer_of(architecture, batch)
    return answer[:, : answer.shape[1] - LONG + new_tokens]


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture(architecture: str, batch: str) -> None:
    target, inputs, answer = shared_target(architecture), BATCHES[batch](), answer_of(architecture, batch)
    oracle = oracle_for(target, inputs, answer, block_size=6)
    actual = generate(target, inputs, max_new_tokens=LONG, assistant_model=oracle)
    torch.testing.assert_close(actual, answer, rtol=0, atol=0)
    assert oracle.last_generation_stats.acceptance_length > 3
    if batch == "one":
        assert oracle.last_generation_stats.rounds == oracle.expected_rounds(inputs.shape[1], LONG)
    # A random drafter: nearly every round takes back the whole block.
    actual = generate(target, inputs, max_new_tokens=9, assistant_model=tiny_drafter(target))
    torch.testing.assert_close(actual, short_answer_of(architecture, batch, 9), rtol=0, atol=0)


@pytest.mark.parametrize("architecture", MAMBA2_ARCHITECTURES)
def test_blocks_are_computed_as_single_tokens_are(architecture: str) -> None:
    """Some of these compute a single token otherwise than several, more than rounding can explain."""
    outputs = {"return_dict_in_generate": True, "output_logits": True}
    assert_same_as_plain(shared_target(architecture), prompt(), max_new_tokens=NEW_TOKENS, **outputs)


@pytest.mark.parametrize("block_layout", ["anchor_then_masks", "anchor_first"])
@pytest.mark.parametrize("block_size", range(2, 9))
def test_every_block_size_and_layout(block_size: int, block_layout: str) -> None:
    target = shared_target("gemma3_text")
    for batch, inputs_of in BATCHES.items():
        expected = short_answer_of("gemma3_text", batch)
        drafter = oracle_for(target, inputs_of(), expected, block_size=block_size, block_layout=block_layout)
        actual = generate(target, inputs_of(), max_new_tokens=NEW_TOKENS, assistant_model=drafter)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
        assert max(drafter.last_generation_stats.verify_lengths) == drafter.config.draft_length + 1


@pytest.mark.parametrize("new_tokens", range(1, 10))
def test_every_small_budget(new_tokens: int) -> None:
    """The answer is cut exactly, whether the budget ends before, in or after a block."""
    target = shared_target()
    for batch, inputs_of in BATCHES.items():
        answer = answer_of("qwen3", batch)
        drafter = oracle_for(target, inputs_of(), answer, wrong_every=None, block_size=5)
        actual = generate(target, inputs_of(), max_new_tokens=new_tokens, assistant_model=drafter)
        torch.testing.assert_close(actual, short_answer_of("qwen3", batch, new_tokens), rtol=0, atol=0)


def test_mistakes_at_every_offset_of_a_block() -> None:
    target, answer = shared_target(), short_answer_of("qwen3", "one")
    start = prompt().shape[1]
    for first_mistake in range(start + 1, start + 7):
        mistakes = range(first_mistake, start + NEW_TOKENS, 6)
        drafter = oracle_drafter(target, answer.tolist(), mistakes=mistakes, block_size=7)
        actual = generate(target, prompt(), max_new_tokens=NEW_TOKENS, assistant_model=drafter)
        torch.testing.assert_close(actual, answer, rtol=0, atol=0)
        assert drafter.last_generation_stats.rounds == drafter.expected_rounds(start, NEW_TOKENS)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("variant", DRAFTER_VARIANTS)
def test_every_kind_of_drafter_attention(variant: str, batch: str) -> None:
    target, inputs, expected = shared_target("llama"), BATCHES[batch](), short_answer_of("llama", batch)
    drafter = oracle_for(target, inputs, expected, block_size=6, **DRAFTER_VARIANTS[variant])
    for implementation in ("sdpa", "eager"):
        drafter.set_attn_implementation(implementation)
        actual = generate(target, inputs, max_new_tokens=NEW_TOKENS, assistant_model=drafter)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3_text"])
def test_eager_target(architecture: str) -> None:
    target = exact_target(architecture, attn_implementation="eager")
    assert_same_as_plain(target, prompt(), max_new_tokens=NEW_TOKENS)
    assert_same_as_plain(target, ragged_batch(), max_new_tokens=NEW_TOKENS)


@pytest.mark.parametrize("architecture", ["llama", "qwen3_next"])
def test_several_answers_per_prompt(architecture: str) -> None:
    greedy_sampling = {"do_sample": True, "top_k": 1}  # greedy decoding itself refuses `num_return_sequences`
    assert_same_as_plain(
        shared_target(architecture), ragged_batch(), max_new_tokens=9, num_return_sequences=2, **greedy_sampling
    )


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3_text", "gpt_oss", "qwen3_next"])
def test_masked_tokens_inside_of_prompts(architecture: str) -> None:
    """As after a turn whose answers ended at different tokens: windows and recurrent states pass over them."""
    inputs = ragged_batch((14, 9, 12))
    inputs["attention_mask"][0, 3:6] = 0
    inputs["attention_mask"][1, 8:10] = 0
    assert_same_as_plain(shared_target(architecture), inputs, max_new_tokens=NEW_TOKENS)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("architecture", ["qwen3", "gemma3_text", "qwen3_next"])
def test_several_end_of_sequence_ids(architecture: str, batch: str) -> None:
    """Rows end at different steps, each at whichever id comes first."""
    answer = short_answer_of(architecture, batch)
    start = answer.shape[1] - NEW_TOKENS
    eos_token_id = sorted({int(answer[row, start + 4 + 4 * row]) for row in range(len(answer))})
    drafter = assert_same_as_plain(
        shared_target(architecture), BATCHES[batch](), max_new_tokens=NEW_TOKENS, eos_token_id=eos_token_id
    )
    assert drafter.last_generation_stats.committed_tokens < len(answer) * (NEW_TOKENS - 1)


def test_adapted_drafter() -> None:
    target, inputs, expected = shared_target(), ragged_batch(), short_answer_of("qwen3", "ragged")
    config = LoraConfig(target_modules=["q_proj", "fc"], init_lora_weights=False)
    drafter = get_peft_model(oracle_for(target, inputs, expected), config, autocast_adapter_dtype=False)
    actual = generate(target, inputs, max_new_tokens=NEW_TOKENS, assistant_model=drafter)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert drafter.last_generation_stats.acceptance_length > 2


def test_compiled_adapted_drafter() -> None:
    torch._dynamo.reset()
    target, expected = shared_target(), short_answer_of("qwen3", "one", 4)
    adapted = get_peft_model(tiny_drafter(target, num_hidden_layers=1), LoraConfig(target_modules=["fc"]))
    drafter = torch.compile(adapted, backend="eager", dynamic=True)
    actual = generate(target, prompt(), max_new_tokens=4, assistant_model=drafter)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert drafter.last_generation_stats.rounds > 0


def test_adapted_target() -> None:
    """LoRA on the target, its LM head and its embeddings included, with weights that change the answer."""
    target = exact_target(seed=5)
    plain_answer = generate(target, prompt(), max_new_tokens=NEW_TOKENS)
    config = LoraConfig(target_modules=["q_proj", "down_proj", "lm_head", "embed_tokens"], init_lora_weights=False)
    torch.manual_seed(0)
    adapted = get_peft_model(target, config, autocast_adapter_dtype=False)
    drafter = assert_same_as_plain(adapted, prompt(), drafter=tiny_drafter(target), max_new_tokens=NEW_TOKENS)
    assert not torch.equal(generate(adapted, prompt(), max_new_tokens=NEW_TOKENS), plain_answer)
    assert_same_as_plain(adapted, ragged_batch(), drafter=drafter, max_new_tokens=9)


@pytest.mark.parametrize("in_place", [False, True])
def test_compiled_target(in_place: bool) -> None:
    torch._dynamo.reset()
    target = exact_target("llama", seed=3, num_hidden_layers=1)
    expected = generate(target, prompt(), max_new_tokens=5)
    drafter = oracle_for(target, prompt(), expected, wrong_every=None, target_layer_ids=[0])
    if in_place:
        target.compile(backend="eager", dynamic=True)
    else:
        target = torch.compile(target, backend="eager", dynamic=True)
    actual = generate(target, prompt(), max_new_tokens=5, assistant_model=drafter)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert drafter.last_generation_stats.rounds == 1


@pytest.mark.parametrize("on_disk", ["model.layers.1", "lm_head", "model.embed_tokens"])
def test_target_partly_on_disk(on_disk: str, tmp_path: Path) -> None:
    """What is offloaded has its weights on the meta device outside its own forward."""
    exact_target().save_pretrained(tmp_path / "target")
    names = [
        "model.embed_tokens",
        "model.norm",
        "model.rotary_emb",
        "lm_head",
        *(f"model.layers.{i}" for i in range(4)),
    ]
    target = AutoModelForCausalLM.from_pretrained(
        tmp_path / "target",
        device_map={name: "disk" if name == on_disk else "cpu" for name in names},
        offload_folder=tmp_path / "offload",
        dtype=torch.float32,
    )
    for batch in BATCHES:
        drafter = oracle_for(shared_target(), BATCHES[batch](), answer_of("qwen3", batch))
        actual = generate(target, BATCHES[batch](), max_new_tokens=9, assistant_model=drafter)
        torch.testing.assert_close(actual, short_answer_of("qwen3", batch, 9), rtol=0, atol=0)
        assert drafter.last_generation_stats.acceptance_length > 1.5


def test_bfloat16_differs_only_at_near_ties() -> None:
    """Where the two answers part, the target's best two logits are closer than bfloat16 can tell apart."""
    for seed in range(3):
        target = exact_target(seed=seed).to(torch.bfloat16)
        expected = generate(target, prompt(), max_new_tokens=LONG)
        drafter = oracle_for(target, prompt(), expected, block_size=8)
        actual = generate(target, prompt(), max_new_tokens=LONG, assistant_model=drafter)
        differing = (actual != expected).nonzero()
        if len(differing):
            first = int(differing[0, 1])
            logits = target(input_ids=expected[:, :first]).logits[0, -1].float()
            best, second = logits.topk(2).values.tolist()
            # One unit in the last place of bfloat16 is 2^-8 of the value; a row's sums differ by a few of them.
            assert best - second <= abs(best) * 2**-5, (seed, first, best, second)
        else:  # from where they part on, the oracle's answers are those of the other text
            assert drafter.last_generation_stats.acceptance_length > 1.5


def test_the_default_device_is_the_users() -> None:
    """What is meant for the host is made there, also under `torch.set_default_device`."""
    target, one, several = shared_target(), prompt(), ragged_batch()
    drafter = tiny_drafter(target)
    expected = [generate(target, inputs, max_new_tokens=12).tolist() for inputs in (one, several)]
    with torch.device("meta"):  # nothing can be read from there
        assert generate(target, one, max_new_tokens=12, assistant_model=drafter).tolist() == expected[0]
        assert generate(target, several, max_new_tokens=12, assistant_model=drafter).tolist() == expected[1]
        generate(target, one, max_new_tokens=12, do_sample=True, assistant_model=drafter)
        engine = AdaFlashEngine(target, drafter, length_policy="cost_aware", max_concurrency=2)
        handles = [
            engine.submit(one[0].tolist(), max_new_tokens=12, do_sample=samples, seed=seed)
            for samples, seed in ((False, None), (True, 1))
        ]
        assert [handle.result().sequence_ids for handle in handles][0] == expected[0][0]


def test_ids_have_the_dtype_of_plain_decoding() -> None:
    target, ids = shared_target(), prompt().int()
    expected = generate(target, ids, max_new_tokens=6)
    actual = generate(target, ids, max_new_tokens=6, assistant_model=tiny_drafter(target))
    assert actual.dtype == expected.dtype and actual.tolist() == expected.tolist()
