from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tiny_models import ARCHITECTURES, MASK_TOKEN_ID, tiny_drafter, tiny_target

from adaflash_hf import DFlashDrafterModel
from adaflash_hf.errors import InvalidInputError
from adaflash_hf.training.initialization import (
    attach_length_head,
    choose_mask_token_id,
    drafter_config_for_target,
    initialize_from_target,
)


def stand_in_tokenizer(size=96, template="", **fields):
    special = dict.fromkeys(("mask_token_id", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id"))
    added = {i: SimpleNamespace(content=name, special=True) for i, name in enumerate(fields.pop("tokens", []))}

    class Tokenizer(SimpleNamespace):
        def __len__(self):
            return size

    return Tokenizer(**{**special, "chat_template": template, "added_tokens_decoder": added, **fields})


def new_drafter(target, **fields):
    torch.manual_seed(5)
    return DFlashDrafterModel(drafter_config_for_target(target, mask_token_id=MASK_TOKEN_ID, **fields))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_drafter_for_any_target_has_its_sizes_and_runs(architecture):
    target = tiny_target(architecture)
    drafter = new_drafter(target, num_hidden_layers=2, block_size=4)
    config, theirs = drafter.config, target.config.get_text_config()
    for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"):
        assert getattr(config, name) == getattr(theirs, name)
    assert config.vocab_size == 96 and config.num_target_layers == 4 and config.target_layer_ids == [2]
    assert drafter.length_head is not None
    copied = initialize_from_target(drafter, target)
    assert {"norm.weight", "hidden_norm.weight", "fc.weight", "layers.1.input_layernorm.weight"} <= set(copied)
    noise, context = torch.randn(1, 4, config.hidden_size), torch.randn(1, 6, config.context_feature_size)
    assert drafter(noise_embeds=noise, context_hidden_states=context).last_hidden_state.isfinite().all()


def test_default_depth_and_layers_of_a_deep_target():
    config = drafter_config_for_target(tiny_target("llama", num_hidden_layers=30), mask_token_id=3, length_head=None)
    assert config.num_hidden_layers == 5 and config.target_layer_ids == [1, 8, 14, 20, 27]
    assert config.length_head_config is None


def test_scales_of_the_target_are_taken_over():
    gemma = drafter_config_for_target(tiny_target("gemma3_text"), mask_token_id=3)
    assert gemma.input_embedding_scale == pytest.approx(32**0.5, rel=1e-3)
    assert gemma.hidden_act == "gelu_pytorch_tanh"
    assert drafter_config_for_target(tiny_target("llama"), mask_token_id=3).input_embedding_scale == 1


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3_text"])
def test_copied_layers_are_the_last_ones_and_norm_alike(architecture):
    target = tiny_target(architecture)
    decoder = target.get_decoder()
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if "norm" in name:
                parameter.uniform_(-0.5, 0.5)  # Gemma stores the weight minus one
    drafter = new_drafter(target, num_hidden_layers=2)
    copied = set(initialize_from_target(drafter, target))
    assert torch.equal(drafter.layers[0].self_attn.q_proj.weight, decoder.layers[2].self_attn.q_proj.weight)
    assert torch.equal(drafter.layers[1].mlp.down_proj.weight, decoder.layers[3].mlp.down_proj.weight)
    states = torch.randn(3, 32)
    torch.testing.assert_close(drafter.norm(states), decoder.norm(states))
    torch.testing.assert_close(drafter.hidden_norm(states), decoder.layers[2].input_layernorm(states))
    second = "pre_feedforward_layernorm" if architecture == "gemma3_text" else "post_attention_layernorm"
    torch.testing.assert_close(
        drafter.layers[0].post_attention_layernorm(states), getattr(decoder.layers[2], second)(states)
    )
    assert ("layers.0.self_attn.q_norm.weight" in copied) == (architecture != "llama")


def test_what_does_not_fit_keeps_its_random_start():
    target = tiny_target("llama")
    drafter = new_drafter(target, num_hidden_layers=6, intermediate_size=20, num_key_value_heads=4)
    before = {name: parameter.clone() for name, parameter in drafter.named_parameters()}
    copied = set(initialize_from_target(drafter, target))
    # Six layers from a target of four: the last four take its layers, the first two have none.
    assert "layers.2.self_attn.q_proj.weight" in copied
    assert not any(name.startswith(("layers.0.", "layers.1.")) for name in copied)
    assert not any("mlp" in name or "k_proj" in name for name in copied)
    for name, parameter in drafter.named_parameters():
        assert torch.equal(parameter, before[name]) or name in copied


def test_mixture_of_experts_keeps_a_random_mlp():
    target = tiny_target("qwen3_moe")
    copied = initialize_from_target(new_drafter(target, num_hidden_layers=1), target)
    assert "layers.0.self_attn.o_proj.weight" in copied and not any("mlp" in name for name in copied)


def test_mask_token_choices():
    target = tiny_target("llama")  # 96 embedding rows
    target.generation_config.eos_token_id = [4]
    assert choose_mask_token_id(target, stand_in_tokenizer(mask_token_id=9)) == 9
    assert choose_mask_token_id(target, stand_in_tokenizer(size=90)) == 90
    tokens = ["<s>", "<a>", "<|reserved_0|>", "<|reserved_1|>", "</s>", "<z>"]
    assert choose_mask_token_id(target, stand_in_tokenizer(tokens=tokens)) == 2
    tokens = ["<s>", "<a>", "<b>", "<c>", "</s>", "<|im_start|>"]
    tokenizer = stand_in_tokenizer(tokens=tokens, template="<|im_start|>user", pad_token_id=3, bos_token_id=0)
    assert choose_mask_token_id(target, tokenizer) == 2
    with pytest.raises(InvalidInputError, match="mask_token_id"):
        choose_mask_token_id(target, stand_in_tokenizer(tokens=["<s>"], bos_token_id=0))


def test_a_head_can_be_attached_saved_and_loaded(tmp_path):
    drafter = tiny_drafter()
    assert drafter.length_head is None
    head = attach_length_head(drafter, "mean_last_residual")
    drafter.save_pretrained(tmp_path)
    loaded = DFlashDrafterModel.from_pretrained(tmp_path)
    assert loaded.config.length_head_config.head_type == "mean_last_residual"
    assert torch.equal(loaded.length_head.down.weight, head.down.weight)
