"""What cannot be served is refused with an error of the library before the target has run once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from plain_comparison import (
    CACHE_NAME,
    assert_same_as_plain,
    exact_target,
    prompt,
    ragged_batch,
    rows_per_forward,
)
from tiny_models import tiny_drafter, tiny_target
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BatchEncoding,
    GenerationConfig,
    MambaConfig,
    T5Config,
)
from transformers.cache_utils import QuantizedLayer

from adaflash_hf import AdaFlashError, DrafterCompatibilityError, InvalidInputError, UnsupportedGenerationError
from adaflash_hf.generation.request_checks import rotary_limit


def assert_refused(target: Any, error: type[AdaFlashError], message: str, inputs: Any = None, **kwargs: Any) -> None:
    """The call fails as it should, without a forward pass of the target and without a streamed token."""
    rows = rows_per_forward(target)
    kwargs = {"assistant_model": tiny_drafter(), "max_new_tokens": 4, **kwargs}
    with pytest.raises(error, match=message):
        target.generate(**(inputs or {"inputs": prompt()}), **kwargs)
    assert rows == []


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_beams": 2}, "`num_beams` is 2.* or generate without `assistant_model`"),
        ({"prompt_lookup_num_tokens": 3}, "`prompt_lookup_num_tokens` is 3"),
        ({"use_cache": False}, "`use_cache` is False"),
        ({"force_words_ids": [[5]]}, "`force_words_ids` is"),
        ({"token_healing": True}, "`token_healing` is on"),
        ({"custom_generate": lambda *args, **kwargs: None}, "`custom_generate` and a DFlash drafter"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options_that_cannot_be_combined(kwargs: dict[str, Any], message: str) -> None:
    assert_refused(exact_target(), UnsupportedGenerationError, message, **kwargs)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"draft_proposal": "greedy"}, r"`draft_proposal` is 'greedy', expected one of \('argmax', 'sample'\)"),
        ({"length_policy": "longest"}, "`length_policy` is 'longest'"),
        ({"length_policy": "length_head"}, "has none"),
        ({"speculation_type": "eagle"}, "`speculation_type` is 'eagle'"),
    ],
    ids=lambda value: "=".join(next(iter(value.items()))) if isinstance(value, dict) else "",
)
def test_values_that_are_not_allowed(kwargs: dict[str, Any], message: str) -> None:
    assert_refused(exact_target(), InvalidInputError, message, **kwargs)


def test_drafter_arguments_without_a_drafter() -> None:
    with pytest.raises(ValueError, match="length_policy"):
        exact_target().generate(prompt(), max_new_tokens=4, length_policy="fixed")


def test_right_padding() -> None:
    inputs = ragged_batch((4, 6))
    right_padded = {name: torch.stack([value[0].roll(-2), value[1]]) for name, value in inputs.items()}
    assert_refused(exact_target(), InvalidInputError, "Row 0 of `attention_mask` ends in padding", right_padded)


@pytest.mark.parametrize("shape", [(1, 0), (2, 0)])
def test_empty_prompt(shape: tuple[int, int]) -> None:
    assert_refused(
        exact_target(), InvalidInputError, "The prompt is empty", {"inputs": torch.zeros(shape, dtype=torch.long)}
    )


def test_empty_prompt_of_embeddings() -> None:
    inputs = {"inputs_embeds": torch.zeros(1, 0, 32)}
    assert_refused(exact_target(), InvalidInputError, "`inputs_embeds` has no columns", inputs)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            {"inputs": BatchEncoding({"input_ids": prompt()})},
            r"a BatchEncoding with 'input_ids'.*\(\*\*inputs",
        ),
        ({"input_ids": prompt().tolist()}, "`input_ids` is a list, expected a tensor.*return_tensors='pt'"),
        ({"inputs": "Name three rivers."}, "`input_ids` is a str"),
        ({"input_ids": prompt()[0]}, r"`input_ids` has shape \(9,\), expected \(batch_size, length\)"),
    ],
    ids=["encoding", "list", "text", "one dimension"],
)
def test_prompt_of_another_form(inputs: dict[str, Any], message: str) -> None:
    assert_refused(exact_target(), InvalidInputError, message, inputs)


@pytest.mark.parametrize("columns", [5, 15])
def test_mask_of_another_length(columns: int) -> None:
    inputs = {"input_ids": prompt(9), "attention_mask": torch.ones(1, columns, dtype=torch.long)}
    assert_refused(exact_target(), InvalidInputError, f"has {columns} columns, but the prompt has 9", inputs)


def test_row_without_tokens() -> None:
    inputs = {"input_ids": prompt(4).repeat(2, 1), "attention_mask": torch.tensor([[1] * 4, [0] * 4])}
    assert_refused(exact_target(), InvalidInputError, "Row 1 of `attention_mask` has no tokens", inputs)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotation_that_changes_with_the_length(kind: str) -> None:
    """Beyond the limit a block is rotated otherwise than single tokens; up to it, answers are plain ones."""
    parameters = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    if kind == "longrope":
        parameters |= {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "original_max_position_embeddings": 16}
    limit = 16 if kind == "longrope" else 24
    target = exact_target("llama", max_position_embeddings=24, rope_parameters=parameters)
    assert rotary_limit(target.config) == limit
    assert_same_as_plain(target, prompt(9), max_new_tokens=limit - 9)
    assert_refused(
        target, UnsupportedGenerationError, f"beyond {limit}", {"inputs": prompt(9)}, max_new_tokens=limit - 8
    )


def test_rotations_that_do_not_change() -> None:
    assert rotary_limit(exact_target().config) is None
    assert rotary_limit(exact_target("gemma3_text").config) is None


def test_recurrent_layers_that_begin_anew_with_a_block() -> None:
    target = tiny_target("jamba")
    assert_refused(target, UnsupportedGenerationError, "`model_type` 'jamba'")


def test_attentions_of_a_batch() -> None:
    target = exact_target(attn_implementation="eager")
    outputs = {"return_dict_in_generate": True, "output_attentions": True}
    assert_refused(target, UnsupportedGenerationError, "`output_attentions` is on", ragged_batch(), **outputs)


def test_processor_with_the_state_of_a_batch() -> None:
    assert_refused(exact_target(), UnsupportedGenerationError, "batch of 4", ragged_batch(), guidance_scale=1.5)


@pytest.mark.parametrize("kind", [PromptTuningConfig, PrefixTuningConfig])
def test_adapters_that_add_tokens(kind: Any) -> None:
    target = get_peft_model(exact_target(), kind(task_type="CAUSAL_LM", num_virtual_tokens=2)).eval()
    message = f"{kind.__name__}, which puts tokens of its own .* generate without `assistant_model`"
    assert_refused(target, UnsupportedGenerationError, message, ragged_batch())


def test_one_adapter_per_row() -> None:
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    target = get_peft_model(exact_target(), config, adapter_name="own").eval()
    names = {"adapter_names": ["own", "__base__"]}
    assert_refused(target, UnsupportedGenerationError, "`adapter_names` was given", ragged_batch((4, 6)), **names)


def test_quantised_cache() -> None:
    class EightBit(QuantizedLayer):
        def _quantize(self, tensor: torch.Tensor, axis: int) -> torch.Tensor:
            return tensor

        def _dequantize(self, tensor: torch.Tensor) -> torch.Tensor:
            return tensor

    cache = transformers.DynamicCache()
    cache.layers = [EightBit() for _ in range(4)]
    assert_refused(exact_target(), UnsupportedGenerationError, "EightBit, which cannot forget", **{CACHE_NAME: cache})


def test_encoder_decoder_target() -> None:
    target = AutoModelForSeq2SeqLM.from_config(
        T5Config(d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4, vocab_size=96, decoder_start_token_id=0)
    )
    assert_refused(target, DrafterCompatibilityError, "encoder-decoder")


def test_target_that_does_not_fit() -> None:
    assert_refused(exact_target(num_hidden_layers=3), DrafterCompatibilityError, "`num_target_layers` = 4")


def test_purely_recurrent_target() -> None:
    config = MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=4, state_size=4, tie_word_embeddings=False)
    target = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    assert_refused(target, UnsupportedGenerationError, "recurrent layers|makes no `Cache`")


class TestLockstep:
    """Ranks that wait for each other need the same number of forward passes."""

    def test_recurrent_target(self) -> None:
        target = exact_target("qwen3_next")
        drafter = tiny_drafter(target)
        assert_refused(
            target,
            UnsupportedGenerationError,
            "`synced_gpus` needs the same",
            synced_gpus=True,
            assistant_model=drafter,
        )

    def test_guidance(self) -> None:
        assert_refused(
            exact_target(), UnsupportedGenerationError, "`guidance_scale` runs", synced_gpus=True, guidance_scale=1.5
        )


def test_recurrent_batch_with_a_cache() -> None:
    target = exact_target("qwen3_next")
    cache = transformers.DynamicCache(config=target.config)
    kwargs = {"assistant_model": tiny_drafter(target), CACHE_NAME: cache}
    assert_refused(target, UnsupportedGenerationError, "`cache` was passed for a batch of 4", ragged_batch(), **kwargs)


def test_option_from_a_generation_config() -> None:
    config = GenerationConfig(max_new_tokens=4, num_beams=3)
    assert_refused(exact_target(), UnsupportedGenerationError, "`num_beams` is 3", generation_config=config)
