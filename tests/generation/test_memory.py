"""How much of the target's hidden states is alive while a long answer is decoded."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from oracle_drafter import oracle_drafter
from plain_comparison import exact_target, prompt
from tiny_models import HIDDEN_SIZE, tiny_drafter
from torch import nn
from transformers import PreTrainedModel


NEW_TOKENS = 2_000
NUM_LAYERS = 2
TARGET_LAYER_IDS = [0]
BLOCK_SIZE = 16
PROMPT = prompt(150)


class Watch:
    """Weak references to everything that carries hidden states, looked at whenever the target starts a forward."""

    def __init__(self, target: nn.Module, drafter: nn.Module) -> None:
        self.layer_outputs: list[weakref.ref] = []
        self.features: list[weakref.ref] = []
        self.forwards = 0
        self.kept: set[tuple[bool, ...]] = set()
        self.most_rows = 0
        gc.collect()  # engines that other tests left
        self.of_others = hidden_tensors()  # what other tests keep
        target.register_forward_pre_hook(self.before_target, with_kwargs=True)
        target.register_forward_hook(self.after_target)
        drafter.register_forward_pre_hook(self.before_drafter, with_kwargs=True)
        for layer in target.model.layers:
            layer.register_forward_hook(self.after_layer)

    def before_target(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        assert not any(ref() is not None for ref in self.layer_outputs), "hidden states outlived their round"
        assert not any(ref() is not None for ref in self.features), "features outlived the draft made from them"
        self.layer_outputs.clear()
        self.features.clear()
        self.forwards += 1
        if self.forwards % 50 == 0:
            known = set(map(id, self.of_others))
            assert not [tensor.shape for tensor in hidden_tensors() if id(tensor) not in known]

    def after_layer(self, module: nn.Module, args: Any, output: Any) -> None:
        self.layer_outputs.append(weakref.ref(output[0] if isinstance(output, tuple) else output))

    def after_target(self, module: nn.Module, args: Any, output: Any) -> None:
        alive = [ref() for ref in self.layer_outputs]
        self.kept.add(tuple(states is not None for states in alive))
        if self.forwards > 1:
            self.most_rows = max(self.most_rows, *(states.shape[1] for states in alive if states is not None))

    def before_drafter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.features.append(weakref.ref(kwargs["context_hidden_states"]))


def hidden_tensors() -> list[torch.Tensor]:
    """Tensors as wide as hidden states or features, but for the drafter's mask embeddings, made once per call."""
    widths = (HIDDEN_SIZE, HIDDEN_SIZE * len(TARGET_LAYER_IDS))
    tensors = [o for o in gc.get_objects() if type(o) is torch.Tensor and o.dim() == 3 and o.shape[-1] in widths]
    return [tensor for tensor in tensors if tensor.shape[1] != BLOCK_SIZE - 1]


@torch.no_grad()
def memoryless_target() -> tuple[PreTrainedModel, list[int]]:
    """A target without attention, whose every token depends on the last alone, and what it answers to the prompt."""
    target = exact_target("llama", num_hidden_layers=NUM_LAYERS)
    for layer in target.model.layers:
        layer.self_attn.o_proj.weight.zero_()
    successors = target(torch.arange(target.config.vocab_size)[:, None]).logits[:, 0].argmax(dim=-1).tolist()
    answer = PROMPT[0].tolist()
    for _ in range(NEW_TOKENS):
        answer.append(successors[answer[-1]])
    return target, answer


def test_two_thousand_tokens() -> None:
    target, answer = memoryless_target()
    layout = {"num_hidden_layers": 1, "target_layer_ids": TARGET_LAYER_IDS, "block_size": BLOCK_SIZE}
    drafter = oracle_drafter(target, [answer], wrong_every=11, **layout)
    watch = Watch(target, drafter)
    ids = target.generate(PROMPT, max_new_tokens=NEW_TOKENS, do_sample=False, assistant_model=drafter)
    assert ids[0].tolist() == answer
    assert watch.forwards == drafter.last_generation_stats.target_forwards > NEW_TOKENS / 11
    assert watch.most_rows <= BLOCK_SIZE
    # Hidden states of the captured layers outlive the forward pass, and no others.
    (kept,) = watch.kept
    assert [layer for layer, is_kept in enumerate(kept) if is_kept] == TARGET_LAYER_IDS


def test_chunked_prefill_holds_one_chunk() -> None:
    target = exact_target("llama", num_hidden_layers=NUM_LAYERS)
    drafter = tiny_drafter(target, num_hidden_layers=1, target_layer_ids=TARGET_LAYER_IDS, block_size=BLOCK_SIZE)
    watch = Watch(target, drafter)
    target.generate(PROMPT, max_new_tokens=6, do_sample=False, assistant_model=drafter, prefill_chunk_size=32)
    assert watch.forwards > 5
