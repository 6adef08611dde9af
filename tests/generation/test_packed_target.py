"""Rows of many requests in one forward of the target give what each request gives alone."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from plain_comparison import TOLERANCE, generate, rows_per_forward, shared_target
from tiny_models import ALTERNATING_LAYERS, COMMON_FIELDS, SLIDING_WINDOW, tiny_target
from torch import nn
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, PreTrainedModel

from adaflash_hf.errors import InvalidInputError, UnsupportedGenerationError
from adaflash_hf.generation.packed_target import PackedTarget
from adaflash_hf.generation.prepacking import can_prepack, prepack_linear_layers


ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3_moe", "gemma3_text", "gpt_oss")
LAYER_IDS = [0, 2]
NEW_TOKENS = 24


def random_prompts(lengths: tuple[int, ...] = (11, 3, 70, 25), seed: int = 0) -> list[list[int]]:
    generator = random.Random(seed)
    return [[generator.randrange(5, 96) for _ in range(length)] for length in lengths]


def gemma2() -> PreTrainedModel:
    """Scores capped before the softmax, logits after the head; scaled embeddings and queries."""
    torch.manual_seed(0)
    config = Gemma2Config(
        **COMMON_FIELDS,
        layer_types=ALTERNATING_LAYERS,
        sliding_window=SLIDING_WINDOW,
        query_pre_attn_scalar=4,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=5.0,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()


def alone(target: PreTrainedModel, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and features of a whole sequence in one ordinary forward."""
    with torch.no_grad():
        outputs = target(torch.tensor([tokens]), output_hidden_states=True)
    return outputs.logits[0], torch.cat([outputs.hidden_states[i + 1][0] for i in LAYER_IDS], dim=-1)


def replay(target: PreTrainedModel, sequences: list[list[int]], packed: PackedTarget | None = None) -> None:
    """Feeds the sequences in random portions, mixed, some rolled back, and compares every row with `alone`."""
    packed = packed or PackedTarget(target)
    generator = random.Random(0)
    expected = [alone(target, tokens) for tokens in sequences]
    slots = [packed.allocate(generator.choice([0, 100])) for _ in sequences]
    done = [0] * len(sequences)
    while unfinished := [i for i, tokens in enumerate(sequences) if done[i] < len(tokens)]:
        chosen = generator.sample(unfinished, generator.randint(1, len(unfinished)))
        counts = [min(generator.choice([1, 2, 6, 30]), len(sequences[i]) - done[i]) for i in chosen]
        rows = [sequences[i][done[i] : done[i] + count] for i, count in zip(chosen, counts, strict=True)]
        outputs = packed.forward([slots[i] for i in chosen], rows, layer_ids=LAYER_IDS)
        assert outputs.counts == outputs.logits_counts == counts
        for i, count, logits, features in zip(
            chosen, counts, outputs.logits_by_slot(), outputs.features_by_slot(), strict=True
        ):
            torch.testing.assert_close(logits, expected[i][0][done[i] : done[i] + count], **TOLERANCE)
            torch.testing.assert_close(features, expected[i][1][done[i] : done[i] + count], **TOLERANCE)
            done[i] += generator.randint(1, count)
            packed.truncate(slots[i], done[i])
            assert packed.length(slots[i]) == done[i]
    for slot in slots:
        packed.release(slot)
    assert packed.memory_bytes == 0


def greedy(packed: PackedTarget, prompts: list[list[int]], new_tokens: int = NEW_TOKENS) -> list[list[int]]:
    """Decodes all prompts together; the second half of them joins later."""
    answers: dict[int, list[int]] = {}
    pending, waiting = dict(enumerate(prompts)), len(prompts) // 2
    slots: dict[int, int] = {}
    while pending:
        running = [i for i in pending if i < waiting]
        waiting = len(prompts)
        for i in running:
            if i not in slots:
                slots[i] = packed.allocate()
        outputs = packed.forward([slots[i] for i in running], [pending[i] for i in running], logits_for="last")
        for i, token in zip(running, outputs.logits.argmax(dim=-1).tolist(), strict=True):
            answers.setdefault(i, []).append(token)
            pending[i] = [token]
            if len(answers[i]) == new_tokens:
                packed.release(slots[i])
                del pending[i]
    return [answers[i] for i in range(len(prompts))]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_same_as_each_request_alone(architecture: str) -> None:
    replay(shared_target(architecture), random_prompts((70, 3, 33, 9)))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_answers_are_those_of_generate(architecture: str) -> None:
    target, prompts = shared_target(architecture), random_prompts()
    expected = [
        generate(target, torch.tensor([ids]), max_new_tokens=NEW_TOKENS)[0, len(ids) :].tolist() for ids in prompts
    ]
    assert greedy(PackedTarget(target), prompts) == expected


def test_capped_and_scaled_scores() -> None:
    target = gemma2()
    replay(target, random_prompts((30, 3, 41)))
    assert target.config._attn_implementation == "eager"


def test_adapted_target() -> None:
    config = LoraConfig(target_modules=["q_proj", "v_proj", "down_proj", "lm_head"], init_lora_weights=False)
    torch.manual_seed(0)
    adapted = get_peft_model(tiny_target(seed=5), config, autocast_adapter_dtype=False).eval()
    replay(adapted, random_prompts((20, 5)))


def test_compiled_target() -> None:
    torch._dynamo.reset()
    target, prompt = tiny_target("llama", num_hidden_layers=1), random_prompts((6,))[0]
    with torch.no_grad():
        expected = target(torch.tensor([prompt])).logits[0]
    packed = PackedTarget(torch.compile(target, backend="eager", dynamic=True))
    slots = [packed.allocate(), packed.allocate()]
    packed.forward(slots, [prompt[:4], prompt[:5]], logits_for="none")
    logits = packed.forward(slots, [prompt[4:], prompt[5:]]).logits
    torch.testing.assert_close(logits, expected[[4, 5, 5]], **TOLERANCE)


@pytest.mark.skipif(not can_prepack(nn.Linear(2, 2)), reason="this build of PyTorch cannot prepack")
def test_prepacked_layers() -> None:
    target = tiny_target("llama")
    assert prepack_linear_layers(target) > 0
    replay(target, random_prompts((20, 5)))


class EightBitLinear(nn.Module):
    """A linear layer of another class, whose weight is stored in bytes, as quantisers make them."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.scale = linear.weight.detach().abs().amax(dim=1, keepdim=True) / 127
        self.register_buffer("weight", torch.round(linear.weight.detach() / self.scale).to(torch.int8))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        assert input.numel() > 0, "quantised kernels multiply nothing badly"
        return nn.functional.linear(input, self.weight * self.scale)


def test_quantised_target() -> None:
    target = tiny_target("llama")
    for name, module in list(target.named_modules()):
        if isinstance(module, nn.Linear):
            target.set_submodule(name, EightBitLinear(module))
    packed = PackedTarget(target)
    packed.forward([packed.allocate()], [[5, 6]], logits_for="none")
    replay(target, random_prompts((20, 5)))


def test_target_on_disk(tmp_path: Path) -> None:
    tiny_target().save_pretrained(tmp_path / "target")
    names = ["model.norm", "model.rotary_emb", "lm_head", *(f"model.layers.{i}" for i in range(4))]
    target = AutoModelForCausalLM.from_pretrained(
        tmp_path / "target",
        device_map={"model.embed_tokens": "disk", **dict.fromkeys(names, "cpu")},
        offload_folder=tmp_path / "offload",
        dtype=torch.float32,
    )
    assert PackedTarget(target).device.type == "cpu"
    replay(target, random_prompts((20, 5)))


def test_linear_layers_see_the_sum_of_rows() -> None:
    target = tiny_target("llama")
    rows, packed = rows_per_forward(target), PackedTarget(target)
    slots = [packed.allocate() for _ in range(3)]
    head_rows: list[int] = []
    target.lm_head.register_forward_pre_hook(lambda module, args: head_rows.append(args[0].shape[1]))
    packed.forward(slots, [[5] * 40, [6], [7, 8, 9]], logits_for=["none", "all", "last"])
    packed.forward(slots, [[5], [6], [7, 8, 9]])
    assert rows == [44, 5]
    assert head_rows == [2, 5]


class TestLogitsFor:
    def outputs(self, which: Any) -> Any:
        packed = PackedTarget(shared_target())
        return packed.forward([packed.allocate(), packed.allocate()], [[5, 6, 7], [8, 9]], logits_for=which)

    @pytest.mark.parametrize(
        ("which", "rows"),
        [("all", [0, 1, 2, 3, 4]), ("last", [2, 4]), (["last", "all"], [2, 3, 4]), (["none", "last"], [4])],
    )
    def test_rows(self, which: Any, rows: list[int]) -> None:
        everything = self.outputs("all").logits
        torch.testing.assert_close(self.outputs(which).logits, everything[rows], **TOLERANCE)

    def test_none(self) -> None:
        outputs = self.outputs("none")
        assert outputs.logits.shape == (0, 96)
        assert outputs.logits_counts == [0, 0]

    @pytest.mark.parametrize("which", ["first", ["all"], ["all", "some"]])
    def test_unknown(self, which: Any) -> None:
        with pytest.raises(InvalidInputError, match="`logits_for` is"):
            self.outputs(which)


class TestInputs:
    def test_lists_tensors_and_packed_ids_are_the_same(self) -> None:
        target = shared_target()
        given: list[tuple[Any, Any]] = [
            ([[5, 6, 7], [8, 9]], None),
            ([torch.tensor([5, 6, 7]), [8, 9]], None),
            (torch.tensor([5, 6, 7, 8, 9]), [3, 2]),
        ]
        logits = []
        for token_ids, counts in given:
            packed = PackedTarget(target)
            logits.append(packed.forward([packed.allocate(), packed.allocate()], token_ids, counts).logits)
        assert torch.equal(logits[0], logits[1])
        assert torch.equal(logits[0], logits[2])

    @pytest.mark.parametrize(
        ("token_ids", "counts", "message"),
        [
            ([[5], []], None, "at least one id"),
            ([[5]], None, "2 `slots` but ids for 1"),
            (torch.tensor([5, 6]), None, "`counts` is None"),
            (torch.tensor([5, 6]), [1, 2], "as many ids as the counts add up to"),
        ],
    )
    def test_refused(self, token_ids: Any, counts: Any, message: str) -> None:
        packed = PackedTarget(shared_target())
        slots = [packed.allocate(), packed.allocate()]
        with pytest.raises(InvalidInputError, match=message):
            packed.forward(slots, token_ids, counts)
        assert [packed.length(slot) for slot in slots] == [0, 0]

    def test_features_not_asked_for(self) -> None:
        packed = PackedTarget(shared_target())
        outputs = packed.forward([packed.allocate()], [[5]])
        with pytest.raises(InvalidInputError, match="`features` is None"):
            outputs.features_by_slot()


def test_a_failing_forward_leaves_slots_as_they_were() -> None:
    target = tiny_target("llama")
    packed = PackedTarget(target)
    slot = packed.allocate()
    packed.forward([slot], [[5, 6, 7]])
    handle = target.model.layers[2].register_forward_pre_hook(lambda module, args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        packed.forward([slot], [[8, 9]])
    handle.remove()
    assert packed.length(slot) == 3
    actual = packed.forward([slot], [[8]]).logits
    torch.testing.assert_close(actual, alone(target, [5, 6, 7, 8])[0][-1:], **TOLERANCE)


def test_plain_generate_between_forwards() -> None:
    target, prompt = shared_target("gemma3_text"), random_prompts((20,))[0]
    expected = generate(target, torch.tensor([prompt]), max_new_tokens=8)
    packed = PackedTarget(target)
    slot = packed.allocate()
    packed.forward([slot], [prompt[:10]])
    assert torch.equal(generate(target, torch.tensor([prompt]), max_new_tokens=8), expected)
    logits = packed.forward([slot], [prompt[10:]]).logits
    assert int(logits[-1].argmax()) == int(expected[0, len(prompt)])


def test_sliding_layers_keep_about_their_window() -> None:
    packed = PackedTarget(shared_target("gemma3_text"))
    slot = packed.allocate()
    for _ in range(20):
        packed.forward([slot], [[7] * 20], logits_for="none")
    per_layer = 2 * 2 * 8 * 4
    # Two layers keep 400 tokens in a room of 512, two no more than a room for one chunk and the window.
    assert packed.memory_bytes == per_layer * (2 * 512 + 2 * 64)


class TestUnsupportedTargets:
    @pytest.mark.parametrize("architecture", ["qwen3_next", "lfm2"])
    def test_recurrent_layers(self, architecture: str) -> None:
        with pytest.raises(UnsupportedGenerationError, match=r"Layer 0 of the target(?s:.*)Use `generate\(\)`"):
            PackedTarget(tiny_target(architecture))

    def test_no_attention_interface(self) -> None:
        target = tiny_target("llama")
        target._supports_attention_backend = False
        with pytest.raises(UnsupportedGenerationError, match="does not use transformers' attention interface"):
            PackedTarget(target)

    def test_prompt_learning(self) -> None:
        config = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
        with pytest.raises(UnsupportedGenerationError, match="PrefixTuningConfig"):
            PackedTarget(get_peft_model(tiny_target("llama"), config))

    def test_another_mask(self) -> None:
        """A configuration that makes a decoder see what comes after a row."""
        target = tiny_target("llama")
        target.config.is_causal = False
        packed = PackedTarget(target)
        slot = packed.allocate()
        with pytest.raises(UnsupportedGenerationError, match="masks its attention in another way than causally"):
            packed.forward([slot], [[5, 6]])
        assert packed.length(slot) == 0

    def test_layers_with_attention_of_their_own(self) -> None:
        target = AutoModelForCausalLM.from_config(LlamaConfig(**COMMON_FIELDS))
        attention = target.model.layers[1].self_attn
        attention.forward = lambda hidden_states, **kwargs: (hidden_states, None)
        packed = PackedTarget(target)
        with pytest.raises(UnsupportedGenerationError, match="Only 3 of the target's 4 layers"):
            packed.forward([packed.allocate()], [[5, 6]])
