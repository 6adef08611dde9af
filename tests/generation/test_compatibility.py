"""Whether a drafter fits a target: every mismatch is named with both values, and wrappers do not hide it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import ARCHITECTURES, COMMON_FIELDS, TARGET_LAYER_IDS, tiny_drafter, tiny_target
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForImageTextToText,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from adaflash_hf import DFlashDrafterModel, DrafterCompatibilityError
from adaflash_hf.generation.compatibility import check_drafter_fits_target


def with_lora(model: nn.Module, *modules: str) -> nn.Module:
    return get_peft_model(model, LoraConfig(r=2, target_modules=list(modules)))


def multimodal_target() -> PreTrainedModel:
    """A Gemma 3 with a vision tower: its text configuration is nested."""
    text = {**COMMON_FIELDS, "query_pre_attn_scalar": 8, "tie_word_embeddings": True}
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = CONFIG_MAPPING["gemma3"](text_config=text, vision_config=vision, mm_tokens_per_image=4)
    return AutoModelForImageTextToText.from_config(config, dtype=torch.float32)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_fitting_pair_passes(architecture: str) -> None:
    target = tiny_target(architecture)
    check_drafter_fits_target(tiny_drafter(target), target)


MISMATCHES: dict[str, tuple[dict[str, Any], str]] = {
    "depth": ({"num_target_layers": 5}, "`num_target_layers` = 5 layers, this target has `num_hidden_layers` = 4"),
    "target_hidden_size": ({"target_hidden_size": 48}, "`target_hidden_size` = 48, the target's `hidden_size` is 32"),
    "hidden_size": (
        {"hidden_size": 40, "target_hidden_size": 32},
        "`hidden_size` is 40, the target's token embeddings have 32 columns",
    ),
    "vocabulary": ({"vocab_size": 120}, "`vocab_size` is 120, the target's token embedding has 96 rows"),
    "mask": (
        {"vocab_size": None, "mask_token_id": 96},
        "`mask_token_id` is 96, but the target's token embedding has 96",
    ),
}


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("name", MISMATCHES)
def test_a_mismatch_is_named_with_both_values(name: str, wrapped: bool) -> None:
    changes, message = MISMATCHES[name]
    target: nn.Module = tiny_target()
    drafter: nn.Module = tiny_drafter(**changes, target_model_name_or_path="org/the-right-target")
    if wrapped:
        target, drafter = with_lora(target, "q_proj"), torch.compile(with_lora(drafter, "q_proj", "fc"))
    with pytest.raises(DrafterCompatibilityError) as error:
        check_drafter_fits_target(drafter, target)
    assert message in str(error.value)
    assert name == "mask" or name == "hidden_size" or "trained for org/the-right-target" in str(error.value)


def test_layer_ids_changed_after_loading() -> None:
    drafter = tiny_drafter()
    drafter.config.target_layer_ids = [0, 7]
    with pytest.raises(DrafterCompatibilityError, match=r"is \[0, 7\], but the target's layers are numbered 0 to 3"):
        check_drafter_fits_target(drafter, tiny_target())


@pytest.mark.parametrize(("drafter_dtype", "target_dtype"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_dtypes_must_agree_and_the_remedy_works(drafter_dtype: str, target_dtype: str) -> None:
    drafter = tiny_drafter().to(getattr(torch, drafter_dtype))
    target = tiny_target().to(getattr(torch, target_dtype))
    message = (
        rf"drafter computes in torch.{drafter_dtype}, the target in torch.{target_dtype}.*`drafter.to\(target.dtype\)`"
    )
    with pytest.raises(DrafterCompatibilityError, match=message):
        check_drafter_fits_target(drafter, target)
    check_drafter_fits_target(drafter.to(target.dtype), target)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_activations_that_are_scaled_over_all_rows_are_refused() -> None:
    target = tiny_target("llama")
    quantised = torch.ao.quantization.quantize_dynamic(target, {nn.Linear}, dtype=torch.qint8)
    with pytest.raises(DrafterCompatibilityError, match=r"dynamically quantised .* Quantise weights only"):
        check_drafter_fits_target(tiny_drafter(target), quantised)


def test_quantised_weights_are_judged_by_what_they_compute_in() -> None:
    target, drafter = tiny_target().to(torch.bfloat16), tiny_drafter().to(torch.bfloat16)
    for model in (target, drafter):
        model.config.dtype = torch.bfloat16
        for linear in [module for module in model.modules() if isinstance(module, nn.Linear)]:
            # Packed to half its rows and stored in bytes, as four-bit quantisers do.
            packed = torch.zeros(linear.weight.numel() // 2, 1, dtype=torch.uint8)
            linear.weight = nn.Parameter(packed, requires_grad=False)
    check_drafter_fits_target(drafter, target)
    with pytest.raises(
        DrafterCompatibilityError, match="drafter computes in torch.float32, the target in torch.bfloat"
    ):
        check_drafter_fits_target(tiny_drafter(), target)


@pytest.mark.parametrize("modules", [("q_proj", "v_proj"), ("lm_head", "embed_tokens")])
def test_wrapped_targets_and_drafters_pass(modules: tuple[str, ...]) -> None:
    target, drafter = with_lora(tiny_target(), *modules), with_lora(tiny_drafter(), "q_proj", "fc")
    check_drafter_fits_target(drafter, target)
    check_drafter_fits_target(torch.compile(drafter), torch.compile(target))


def test_targets_with_saved_copies_of_their_head_pass() -> None:
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    check_drafter_fits_target(tiny_drafter(), get_peft_model(tiny_target(), config))


def test_nested_text_configurations_are_found() -> None:
    target = multimodal_target()
    rows = target.get_input_embeddings().weight.shape[0]
    drafter = tiny_drafter(vocab_size=rows)
    check_drafter_fits_target(drafter, target)
    with pytest.raises(DrafterCompatibilityError, match="`num_target_layers` = 9"):
        check_drafter_fits_target(tiny_drafter(vocab_size=rows, num_target_layers=9), target)


def test_offloaded_weights_are_not_needed() -> None:
    with torch.device("meta"):
        target = tiny_target()
    check_drafter_fits_target(tiny_drafter(), target)


def test_a_resized_vocabulary_can_be_declared() -> None:
    target, drafter = tiny_target(), tiny_drafter()
    target.resize_token_embeddings(104, mean_resizing=False)
    with pytest.raises(DrafterCompatibilityError, match="set `drafter.config.vocab_size = 104`"):
        check_drafter_fits_target(drafter, target)
    drafter.config.vocab_size = 104
    check_drafter_fits_target(drafter, target)


def test_a_drafter_without_a_declared_vocabulary_fits_any() -> None:
    check_drafter_fits_target(tiny_drafter(vocab_size=None), tiny_target())


def test_encoder_decoders_are_refused() -> None:
    config = T5Config(vocab_size=96, d_model=32, d_kv=8, d_ff=48, num_layers=4, num_heads=4)
    with pytest.raises(DrafterCompatibilityError, match="T5ForConditionalGeneration, an encoder-decoder"):
        check_drafter_fits_target(tiny_drafter(), T5ForConditionalGeneration(config))


def test_targets_without_a_head_are_refused() -> None:
    headless = AutoModel.from_config(tiny_target().config)
    with pytest.raises(DrafterCompatibilityError, match=r"`get_output_embeddings\(\)` is None"):
        check_drafter_fits_target(tiny_drafter(), headless)


def test_other_modules_are_refused() -> None:
    with pytest.raises(DrafterCompatibilityError, match="`target` is a Linear, not a transformers model"):
        check_drafter_fits_target(tiny_drafter(), nn.Linear(2, 2))
    with pytest.raises(DrafterCompatibilityError, match="`drafter` is a Qwen3ForCausalLM of type 'qwen3'"):
        check_drafter_fits_target(tiny_target(), tiny_target())


def test_nothing_is_changed_by_checking() -> None:
    target, drafter = tiny_target(), tiny_drafter()
    assert isinstance(drafter, DFlashDrafterModel)
    check_drafter_fits_target(drafter, target)
    assert drafter.config.target_layer_ids == TARGET_LAYER_IDS
    assert drafter.dtype == target.dtype == torch.float32
