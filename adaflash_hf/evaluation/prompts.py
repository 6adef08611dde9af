"""Prompts as the demo, the benchmark and the command line use them: those shipped here, and their way into ids."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING

from ..errors import InvalidInputError


if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase


__all__ = ["DemoPrompt", "encode_prompt", "load_demo_prompts", "load_test_set_prompts"]

_TEST_SET_PROMPTS_FILE = "test_set_prompts.jsonl"
_DEMO_PROMPTS_PER_DOMAIN = 2


@dataclass(frozen=True)
class DemoPrompt:
    """
    One of the shipped prompts.

    Attributes:
        domain: `"maths"`, `"code"` or `"chat"`.
        source: The test set and the number of the prompt in it.
        text: What the user says.
    """

    domain: str
    source: str
    text: str


def load_test_set_prompts() -> list[DemoPrompt]:
    """The first 64 of GSM8K test, HumanEval and the Vicuna benchmark, in their order, none of them picked."""
    lines = resources.files(__package__).joinpath(_TEST_SET_PROMPTS_FILE).read_text(encoding="utf-8").splitlines()
    return [DemoPrompt(**json.loads(line)) for line in lines]


def load_demo_prompts() -> list[DemoPrompt]:
    """The demo's prompts: the first two of each of those test sets."""
    seen: Counter[str] = Counter()
    chosen = []
    for prompt in load_test_set_prompts():
        seen[prompt.domain] += 1
        if seen[prompt.domain] <= _DEMO_PROMPTS_PER_DOMAIN:
            chosen.append(prompt)
    return chosen


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, text: str, *, chat: bool | None = None, system: str | None = None
) -> dict[str, Tensor]:
    """
    Turn one prompt into the inputs of `generate()`.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            The target's tokenizer.
        text (`str`):
            The prompt.
        chat (`bool`, *optional*):
            Whether to wrap the prompt in the tokenizer's chat template; by default only if it has one.
        system (`str`, *optional*):
            A system message in front of the prompt; needs the chat template.

    Returns:
        `dict[str, torch.Tensor]`: `input_ids` and `attention_mask` of shape `(1, prompt_tokens)`.
    """
    has_template = getattr(tokenizer, "chat_template", None) is not None
    if chat is None:
        chat = has_template
    if chat and not has_template:
        raise InvalidInputError("`chat` is on, but the target's tokenizer has no chat template; pass --no-chat.")
    if system is not None and not chat:
        raise InvalidInputError(f"`system` is {system!r}, but a system message needs the chat template; pass --chat.")
    if chat:
        messages = [{"role": "system", "content": system}] if system is not None else []
        messages.append({"role": "user", "content": text})
        encoded = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
    else:
        encoded = tokenizer(text, return_tensors="pt")
    if encoded["input_ids"].shape[-1] == 0:
        raise InvalidInputError(f"`prompt` is {text!r}, which gives no token; pass a prompt that is not empty.")
    return {name: encoded[name] for name in ("input_ids", "attention_mask")}
