"""From native to every format and back, and from every format to every other: nothing changes, to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints import HEAD, assert_same_drafter
from tiny_models import tiny_drafter, tiny_target

from adaflash_hf import DFlashDrafterModel
from adaflash_hf.serving.formats import (
    WRITABLE_FORMATS,
    DrafterBundle,
    ReadOptions,
    TargetFiles,
    WriteOptions,
    read_drafter,
    write_drafter,
)
from adaflash_hf.serving.formats.read_back import comparable_fields


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "head": {"length_head_config": HEAD},
    "paper_head": {"length_head_config": {"head_type": "mean_linear", "bottleneck_size": 6}},
    "sliding": {"layer_types": ["sliding_attention"] * 2, "sliding_window": 5},
    "mixed": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5, "is_causal": False},
    "mixed_head": {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 5,
        "is_causal": False,
        "length_head_config": HEAD,
    },
    "causal": {"is_causal": True},
    "yarn": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0}},
    "biased": {"attention_bias": True, "num_key_value_heads": 4, "head_dim": 16},
    "anchor_first": {"block_layout": "anchor_first"},
    "scaled": {"input_embedding_scale": 5.5, "output_multiplier": 0.25, "final_logit_softcapping": 30.0},
    "vocabulary": {"draft_vocab_size": 5},
}
# What a format refuses to hold, because its readers would get it wrong.
REFUSED = {
    "causal": {"speculators"},
    "anchor_first": {"z-lab", "sglang", "sglang-plugin", "vllm"},
    "scaled": {"sglang", "sglang-plugin", "vllm", "speculators"},
}
HEADLESS = ("z-lab", "sglang", "vllm", "speculators")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetFiles:
    """A saved target, whose LM head has the rows of a draft vocabulary."""
    folder = tmp_path_factory.mktemp("target")
    tiny_target().to(torch.bfloat16).save_pretrained(folder)
    return TargetFiles(str(folder))


def drafter_of(variant: str, target: TargetFiles) -> DFlashDrafterModel:
    fields = {"rope_theta": 1e6, "target_model_name_or_path": target.name, **VARIANTS[variant]}
    drafter = tiny_drafter(**fields).to(torch.bfloat16)
    if drafter.config.draft_vocab_size is not None:
        drafter.set_draft_vocabulary(torch.tensor([2, 3, 50, 51, 95]))
    return drafter


def bundle_of(drafter: DFlashDrafterModel) -> DrafterBundle:
    return DrafterBundle(drafter.config, drafter.state_dict(), "memory")


def assert_same(found: DrafterBundle, expected: DrafterBundle) -> None:
    assert comparable_fields(found.config) == comparable_fields(expected.config)
    assert found.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        assert found.tensors[name].dtype == tensor.dtype, name
        assert torch.equal(found.tensors[name], tensor), name


def formats_for(variant: str) -> list[str]:
    left_out = set(REFUSED.get(variant, ()))
    if VARIANTS[variant].get("length_head_config") != HEAD:
        left_out.add("adaflash-authors")
    return [name for name in WRITABLE_FORMATS if name not in left_out]


@pytest.mark.parametrize("variant", VARIANTS)
def test_there_and_back(variant: str, target: TargetFiles, tmp_path: Path) -> None:
    original = bundle_of(drafter_of(variant, target))
    for name in formats_for(variant):
        written = write_drafter(original, tmp_path / name, name, WriteOptions(target=target))
        back = read_drafter(tmp_path / name, ReadOptions(target=target))
        assert_same(back, written.holds)
        # Whatever the format holds is what the original had.
        for tensor_name, tensor in back.tensors.items():
            assert torch.equal(tensor, original.tensors[tensor_name]), f"{name}: {tensor_name}"
        if name == "native":
            assert_same(back, original)


def test_between_any_two_formats(target: TargetFiles, tmp_path: Path) -> None:
    original = bundle_of(drafter_of("mixed_head", target))
    body = {name: tensor for name, tensor in original.tensors.items() if not name.startswith("length_head.")}
    names = formats_for("mixed_head")
    for first in names:
        write_drafter(original, tmp_path / first, first, WriteOptions(target=target))
    for first in names:
        bundle = read_drafter(tmp_path / first)
        # SGLang's and vLLM's are z-lab's, written by the same code.
        for second in (name for name in names if name not in ("sglang", "vllm")):
            if second == "adaflash-authors" and first in HEADLESS:
                continue
            out = tmp_path / f"{first}-{second}"
            write_drafter(bundle, out, second, WriteOptions(target=target))
            back = read_drafter(out)
            for name, tensor in body.items():
                assert torch.equal(back.tensors[name], tensor), f"{first} to {second}: {name}"
            has_lost_head = first in HEADLESS or second in HEADLESS
            assert ("length_head.down.weight" in back.tensors) == (not has_lost_head)
            assert back.config.is_causal is False and back.config.sliding_window == 5


def test_what_is_written_loads_and_computes_the_same(target: TargetFiles, tmp_path: Path) -> None:
    drafter = drafter_of("head", target)
    for name in ("native", "z-lab", "adaflash-authors", "sglang-plugin"):
        write_drafter(bundle_of(drafter), tmp_path / name, name, WriteOptions(target=target))
        loaded = DFlashDrafterModel.from_pretrained(tmp_path / name, dtype=torch.float32)
        expected = tiny_drafter(rope_theta=1e6, length_head_config=None if name == "z-lab" else HEAD)
        # In float32 from the start: casting a model to bfloat16 and back coarsens its RoPE table.
        expected.load_state_dict({key: drafter.state_dict()[key] for key in expected.state_dict()})
        assert_same_drafter(loaded, expected)
        assert loaded.config.target_model_name_or_path == target.name


def test_float32_survives_where_it_may(target: TargetFiles, tmp_path: Path) -> None:
    original = bundle_of(tiny_drafter(target_model_name_or_path=target.name))
    for name in ("native", "z-lab", "speculators"):
        write_drafter(original, tmp_path / name, name, WriteOptions(target=target))
        assert torch.equal(read_drafter(tmp_path / name).tensors["fc.weight"], original.tensors["fc.weight"])


def test_engines_get_bfloat16_and_the_rounding_is_told(target: TargetFiles, tmp_path: Path) -> None:
    original = bundle_of(tiny_drafter())
    for name in ("sglang", "sglang-plugin", "vllm"):
        written = write_drafter(original, tmp_path / name, name, WriteOptions(target=target))
        assert {tensor.dtype for tensor in read_drafter(tmp_path / name).tensors.values()} == {torch.bfloat16}
        assert "25 of 25 tensors were rounded from float32 to torch.bfloat16" in " ".join(written.notes)
