"""Stand-ins for what the command line and the comparison drive: a target that fakes drafting, and a byte tokenizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import tiny_target
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from adaflash_hf import embedded_target
from adaflash_hf.commands import loading
from adaflash_hf.embedded_target import LoadedTarget
from adaflash_hf.generation.statistics import GenerationStats


CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SPECIAL_TOKENS = ["<pad>", "<s>", "</s>", "<mask>"]


def byte_tokenizer(*, chat: bool = True) -> PreTrainedTokenizerFast:
    """A tokenizer with one id per byte, after the four special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(SPECIAL_TOKENS + alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", mask_token="<mask>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE if chat else None
    return tokenizer


def byte_target() -> PreTrainedModel:
    """A tiny target for the ids of [`byte_tokenizer`]."""
    return tiny_target("llama", vocab_size=len(SPECIAL_TOKENS) + 256)


def load_byte_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every command load that target, whatever it is asked for, and print to a wide terminal."""
    for module in (embedded_target, loading):  # the second has its own name for it, once it is imported
        monkeypatch.setattr(module, "load_target", lambda *a, **k: LoadedTarget(byte_target(), byte_tokenizer()))
    monkeypatch.setenv("COLUMNS", "160")


class StandInDrafter:
    """Holds statistics as a drafter does, and the mistake that the stand-in target shall make with it."""

    def __init__(self, wrong_at: int | None = None) -> None:
        self.wrong_at = wrong_at
        self.last_generation_stats: GenerationStats | None = None


class StandInTarget:
    """A tiny target whose `generate()` takes a `StandInDrafter`: plain decoding with one token changed on request."""

    def __init__(self) -> None:
        self.model = byte_target()
        self.calls: list[dict[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, **kwargs: Any) -> Any:
        return self.model(**kwargs)

    def generate(self, **kwargs: Any) -> torch.Tensor:
        self.calls.append(dict(kwargs))
        drafter = kwargs.pop("assistant_model", None)
        drafting = {name: kwargs.pop(name) for name in ("length_policy", "draft_proposal") if name in kwargs}
        assert drafter is not None or not drafting, "plain decoding was given options of the drafter"
        output_ids = self.model.generate(**kwargs)
        if drafter is not None:
            prompt_tokens = kwargs["input_ids"].shape[1]
            if drafter.wrong_at is not None:
                output_ids[0, prompt_tokens + drafter.wrong_at] ^= 1
            drafter.last_generation_stats = GenerationStats(
                rounds=4, drafted_tokens=12, accepted_tokens=6, committed_tokens=10, verify_lengths={4: 3, 2: 1}
            )
        return output_ids
