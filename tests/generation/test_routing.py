"""`generate()` reaches AdaFlash decoding for our drafters and is untouched for everybody else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from plain_comparison import assert_same_as_plain, exact_target, generate, oracle_for, prompt, shared_target
from tiny_models import tiny_drafter, tiny_target
from transformers import pipeline
from transformers.generation import GenerationMixin
from transformers.generation.utils import GenerationMode

from adaflash_hf import (
    DFlashDrafterModel,
    InvalidInputError,
    generate_with_drafter,
    install_routing,
    is_routing_active,
    uninstall_routing,
)


@pytest.fixture
def without_routing() -> Iterator[None]:
    uninstall_routing()
    yield
    install_routing()


class TestSwitch:
    def test_on_by_import_and_installed_once(self) -> None:
        assert is_routing_active()
        routed = GenerationMixin.generate
        install_routing()
        assert GenerationMixin.generate is routed

    def test_off_and_on_again(self, without_routing: None) -> None:
        assert not is_routing_active()
        original = GenerationMixin.generate
        uninstall_routing()
        assert GenerationMixin.generate is original
        install_routing()
        assert is_routing_active()
        uninstall_routing()
        assert GenerationMixin.generate is original

    def test_signature_and_documentation_are_transformers_own(self, without_routing: None) -> None:
        import inspect

        original = GenerationMixin.generate
        signature, text = inspect.signature(original), original.__doc__
        install_routing()
        assert inspect.signature(GenerationMixin.generate) == signature
        assert GenerationMixin.generate.__doc__ == text

    def test_explicit_call_needs_no_routing(self, without_routing: None) -> None:
        target = shared_target()
        expected = generate(target, prompt(), max_new_tokens=12)
        drafter = oracle_for(target, prompt(), expected)
        actual = generate_with_drafter(target, prompt(), max_new_tokens=12, do_sample=False, assistant_model=drafter)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
        assert drafter.last_generation_stats.acceptance_length > 1.5
        with pytest.raises(InvalidInputError, match="`assistant_model` is a NoneType"):
            generate_with_drafter(target, prompt())


class TestEverybodyElse:
    """Calls without our drafter arrive at transformers' own function exactly as they were made."""

    @pytest.fixture
    def arrivals(self, without_routing: None, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
        calls: list[tuple[Any, Any]] = []

        def recording(self: Any, *args: Any, **kwargs: Any) -> str:
            calls.append((args, kwargs))
            return "transformers"

        monkeypatch.setattr(GenerationMixin, "generate", recording)
        install_routing()
        return calls

    @pytest.mark.parametrize(
        ("args", "kwargs"),
        [
            ((), {}),
            ((1, 2, 3), {"assistant_model": "a string", "custom_generate": "org/name"}),
            ((1, 2, 3, 4, 5, 6, "a string", 8, 9, 10, "org/name"), {}),
            ((1,), {"assistant_model": None, "max_new_tokens": 3, "made_up": True}),
            ((1, 2, 3, 4, 5, 6, None, 8, 9, 10, 11), {}),
        ],
    )
    def test_arguments_pass_unchanged(self, arrivals: list[Any], args: tuple, kwargs: dict[str, Any]) -> None:
        assert exact_target().generate(*args, **kwargs) == "transformers"
        assert arrivals == [(args, kwargs)]

    @pytest.mark.parametrize(
        ("args", "kwargs"), [((1,), {"assistant_model": "org/name"}), ((1, *[None] * 5, "org/name"), {})]
    )
    def test_a_name_is_no_model(self, arrivals: list[Any], args: tuple, kwargs: dict[str, Any]) -> None:
        with pytest.raises(InvalidInputError, match=r"'org/name', expected a model.*AutoModel.from_pretrained"):
            exact_target().generate(*args, **kwargs)
        assert not arrivals

    def test_stock_speculation_type(self, arrivals: list[Any]) -> None:
        target, drafter = exact_target(), tiny_drafter()
        for kwargs in ({"speculation_type": "dflash"}, {}):
            assert target.generate(1, assistant_model=drafter, **kwargs) == "transformers"
            assert arrivals[-1] == ((1,), {"assistant_model": drafter, **kwargs})
            target.generation_config.speculation_type = "dflash"

    def test_stock_loop_reads_row_one_only(self, arrivals: list[Any]) -> None:
        drafter = tiny_drafter(block_layout="anchor_first")
        with pytest.raises(InvalidInputError, match="`block_layout` is 'anchor_first'"):
            exact_target().generate(prompt(), assistant_model=drafter, speculation_type="dflash")

    def test_autoregressive_assistant(self) -> None:
        target = exact_target()
        assistant = tiny_target("llama", seed=3)
        calls: list[int] = []
        assistant.register_forward_pre_hook(lambda *args: calls.append(1))
        expected = generate(target, prompt(), max_new_tokens=9)
        actual = generate(target, prompt(), max_new_tokens=9, assistant_model=assistant)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
        assert calls

    def test_prompt_lookup(self) -> None:
        target = exact_target()
        expected = generate(target, prompt(), max_new_tokens=9)
        actual = generate(target, prompt(), max_new_tokens=9, prompt_lookup_num_tokens=3)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


class TestStockLoop:
    """The drafter keeps transformers' own DFlash contract, so its loop works with no routing at all."""

    @pytest.mark.parametrize("architecture", ["qwen3", "gemma3_text", "gpt_oss"])
    @pytest.mark.parametrize("is_sliding", [False, True])
    def test_exact(self, architecture: str, is_sliding: bool, without_routing: None) -> None:
        target = shared_target(architecture)
        expected = generate(target, prompt(), max_new_tokens=20)
        variant = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6} if is_sliding else {}
        drafter = oracle_for(target, prompt(), expected, **variant)
        actual = generate(target, prompt(), max_new_tokens=20, assistant_model=drafter, speculation_type="dflash")
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
        # Gemma's embedding scales what the oracle recognises its anchors by.
        assert len(drafter.calls) < 14 or architecture == "gemma3_text"

    def test_left_padding(self, without_routing: None) -> None:
        target = shared_target()
        inputs = {"input_ids": torch.cat([torch.zeros(1, 3, dtype=torch.long), prompt()], dim=1)}
        inputs["attention_mask"] = (inputs["input_ids"] != 0).long()
        expected = generate(target, inputs, max_new_tokens=9)
        actual = generate(
            target, inputs, max_new_tokens=9, assistant_model=tiny_drafter(target), speculation_type="dflash"
        )
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)

    def test_sampling_runs(self, without_routing: None) -> None:
        drafter = tiny_drafter()
        torch.manual_seed(0)
        ids = generate(
            shared_target(),
            prompt(),
            max_new_tokens=9,
            do_sample=True,
            assistant_model=drafter,
            speculation_type="dflash",
        )
        assert ids.shape == (1, 18)


def test_drafter_is_recognised_by_its_model_type() -> None:
    """PEFT and compile wrappers and remote-code twins are not instances of our class."""
    target = shared_target()
    wrapped = get_peft_model(tiny_drafter(target), LoraConfig(target_modules=["fc"]))
    assert not isinstance(wrapped, DFlashDrafterModel)
    assert_same_as_plain(target, prompt(), drafter=wrapped, max_new_tokens=5)
    assert wrapped.last_generation_stats.rounds == wrapped.get_base_model().last_generation_stats.rounds > 0


def test_pipeline(tmp_path: Any) -> None:
    from stand_ins import byte_tokenizer

    tokenizer = byte_tokenizer()
    target = exact_target(vocab_size=len(tokenizer))
    drafter = tiny_drafter(target, vocab_size=len(tokenizer))
    generator = pipeline("text-generation", model=target, tokenizer=tokenizer)
    options = {"max_new_tokens": 9, "do_sample": False, "return_tensors": True}
    expected = generator("Hello there", **options)
    actual = generator("Hello there", assistant_model=drafter, **options)
    assert actual == expected
    assert drafter.last_generation_stats.rounds > 0


def test_generation_mode_names_are_still_there() -> None:
    """What the refusal of other ways of decoding relies on."""
    assert {"GREEDY_SEARCH", "SAMPLE", "ASSISTED_GENERATION", "BEAM_SEARCH"} <= {mode.name for mode in GenerationMode}
