"""Loading is strict: nothing missing, nothing damaged, nothing unpickled, and every argument reaches transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_checkpoints import (
    HEAD,
    ZLAB_CONFIG,
    as_written_by_the_authors,
    assert_same_drafter,
    hidden,
    perturb,
    without,
    write,
)
from tiny_models import random_block, tiny_drafter
from transformers import AutoModel

from adaflash_hf import AdaFlashError, DFlashDrafterConfig, DFlashDrafterModel, DrafterCheckpointError


@pytest.mark.parametrize("load", [DFlashDrafterModel.from_pretrained, AutoModel.from_pretrained])
def test_perturbed_saved_and_loaded(load: Callable, tmp_path: Path) -> None:
    drafter = tiny_drafter(
        length_head_config=HEAD, layer_types=["sliding_attention", "full_attention"], sliding_window=5
    )
    before = hidden(drafter)
    perturb(drafter)
    assert (hidden(drafter) - before).abs().max() > 1e-3
    drafter.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists(), "this is to test shards as well"
    assert_same_drafter(load(tmp_path), drafter)


@pytest.mark.parametrize("load", [DFlashDrafterModel.from_pretrained, AutoModel.from_pretrained])
def test_shards_saved_over_a_single_file_are_not_passed_over(load: Callable, tmp_path: Path) -> None:
    tiny_drafter(seed=1).save_pretrained(tmp_path)
    tiny_drafter(seed=1).save_pretrained(tmp_path, max_shard_size="20KB")
    assert_same_drafter(load(tmp_path), tiny_drafter(seed=1))  # both are there, and the same
    tiny_drafter(seed=2).save_pretrained(tmp_path, max_shard_size="20KB")
    with pytest.raises(DrafterCheckpointError, match=r"other weights in `model\.safetensors` than in the shards"):
        load(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert_same_drafter(load(tmp_path), tiny_drafter(seed=2))
    # The other way round transformers removes the shards, and the index without them means nothing.
    tiny_drafter(seed=3).save_pretrained(tmp_path)
    assert_same_drafter(load(tmp_path), tiny_drafter(seed=3))


def test_loading_arguments_reach_transformers(tmp_path: Path) -> None:
    original = tiny_drafter(rope_theta=1e6)
    original.save_pretrained(tmp_path / "ours", variant="best")
    for path, extra in (
        (write(tmp_path / "zlab" / "inner", ZLAB_CONFIG, original.state_dict()).parent, {"subfolder": "inner"}),
        (tmp_path / "ours", {"variant": "best"}),
    ):
        loaded, info = DFlashDrafterModel.from_pretrained(
            path,
            dtype=torch.bfloat16,
            attn_implementation="eager",
            device_map="cpu",
            output_loading_info=True,
            **extra,
        )
        assert loaded.dtype == torch.bfloat16
        assert loaded.config._attn_implementation == "eager"
        assert loaded.config.name_or_path == str(path)
        assert not info["missing_keys"] and not info["unexpected_keys"]


@pytest.mark.parametrize("load", [DFlashDrafterModel.from_pretrained, AutoModel.from_pretrained])
@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("auto", torch.bfloat16), ("float16", torch.float16), (torch.float32, torch.float32), (None, torch.bfloat16)],
)
def test_dtypes_are_named_as_in_transformers(load: Callable, dtype: Any, expected: Any, tmp_path: Path) -> None:
    tiny_drafter().to(torch.bfloat16).save_pretrained(tmp_path)
    assert load(tmp_path, **({} if dtype is None else {"dtype": dtype})).dtype == expected


def test_a_given_configuration_or_state_dict_is_used(tmp_path: Path) -> None:
    original = tiny_drafter()
    original.save_pretrained(tmp_path)
    config = DFlashDrafterConfig.from_pretrained(tmp_path, output_multiplier=0.5)
    assert DFlashDrafterModel.from_pretrained(tmp_path, config=config).config.output_multiplier == 0.5
    assert DFlashDrafterModel.from_pretrained(tmp_path, output_multiplier=0.25).config.output_multiplier == 0.25
    loaded = DFlashDrafterModel.from_pretrained(None, config=config, state_dict=original.state_dict())
    assert_same_drafter(loaded, original)
    with pytest.raises(DrafterCheckpointError, match="the given `state_dict`: 1 tensors are missing: `fc.weight`"):
        DFlashDrafterModel.from_pretrained(None, config=config, state_dict=without(original.state_dict(), "fc.weight"))


@pytest.mark.parametrize("load", [DFlashDrafterModel.from_pretrained, AutoModel.from_pretrained])
def test_an_adapter_directory_loads_its_drafter_and_itself(load: Callable, tmp_path: Path) -> None:
    drafter = tiny_drafter()
    drafter.save_pretrained(tmp_path / "base")
    base = DFlashDrafterModel.from_pretrained(tmp_path / "base")
    wrapped = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "fc"], init_lora_weights=False))
    adapted = wrapped(*random_block(drafter.config, new_context=11)).last_hidden_state
    wrapped.save_pretrained(tmp_path / "adapter")
    loaded = load(tmp_path / "adapter")
    assert type(loaded) is DFlashDrafterModel
    torch.testing.assert_close(hidden(loaded), adapted.detach())
    assert (adapted - hidden(drafter)).abs().max() > 1e-3


def damage_missing(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["layers.1.self_attn.k_norm.weight"]


def damage_unexpected(tensors: dict[str, torch.Tensor]) -> None:
    tensors["layers.2.mlp.up_proj.weight"] = torch.zeros(48, 32)


def damage_shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["fc.weight"] = torch.zeros(32, 96)


def damage_nan(tensors: dict[str, torch.Tensor]) -> None:
    tensors["norm.weight"] = torch.full((32,), float("nan"))


def damage_infinity(tensors: dict[str, torch.Tensor]) -> None:
    tensors["layers.0.mlp.up_proj.weight"] = torch.zeros(48, 32).index_fill(0, torch.tensor([7]), float("inf"))


def damage_head(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if name.startswith("length_head.")]:
        del tensors[name]


DAMAGE: dict[Callable, str] = {
    damage_missing: "1 tensors are missing: `layers.1.self_attn.k_norm.weight`",
    damage_unexpected: "1 tensors have no place in the drafter: `layers.2.mlp.up_proj.weight`",
    damage_shape: r"`fc.weight` has shape \[32, 96\], but config.json asks for \[32, 64\]",
    damage_nan: "`norm.weight` has NaN or infinite values",
    damage_infinity: "`layers.0.mlp.up_proj.weight` has NaN or infinite values",
    damage_head: "4 tensors are missing: `length_head.*Remove `length_head_config`",
}


@pytest.mark.parametrize("load", [DFlashDrafterModel.from_pretrained, AutoModel.from_pretrained])
@pytest.mark.parametrize("damage", DAMAGE, ids=lambda function: function.__name__)
def test_damage_is_refused(damage: Callable, load: Callable, tmp_path: Path) -> None:
    drafter = tiny_drafter(length_head_config={"bottleneck_size": 5})
    drafter.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    damage(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DrafterCheckpointError, match=DAMAGE[damage]):
        load(tmp_path)


def as_integers(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors["fc.weight"] = tensors["fc.weight"].to(torch.int8)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def cut_short(directory: Path) -> None:
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def git_lfs_pointer(directory: Path) -> None:
    (directory / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")


def shard_missing(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {"fc.weight": "model-00001-of-00002.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def damaged_index(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_text("{}")


def with_fields(**fields: Any) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps({**config, **fields}))

    return change


@pytest.mark.parametrize("load", [DFlashDrafterModel.from_pretrained, AutoModel.from_pretrained])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (as_integers, "`fc.weight` is stored as I8"),
        (cut_short, r"model.safetensors cannot be read .*not whole; download"),
        (git_lfs_pointer, "cannot be read .*git lfs pull"),
        (shard_missing, "model-00001-of-00002.safetensors cannot be read"),
        (damaged_index, "index.json does not list the weight files"),
        (with_fields(hidden_size="32"), "config.json cannot be used: Field 'hidden_size' expected int"),
        (with_fields(hidden_act="unheard-of"), "no model that can be built .*unheard-of.*Correct `hidden_act`"),
        (with_fields(rope_parameters={"rope_type": "x", "rope_theta": 1e4}), "no model that can be built .*'x'"),
    ],
)
def test_damaged_files_are_refused(damage: Callable, message: str, load: Callable, tmp_path: Path) -> None:
    tiny_drafter().save_pretrained(tmp_path)
    damage(tmp_path)
    with pytest.raises(AdaFlashError, match=message):
        load(tmp_path)


def test_a_missing_configuration_is_named(tmp_path: Path) -> None:
    tiny_drafter().save_pretrained(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(DrafterCheckpointError, match="has no config.json"):
        DFlashDrafterModel.from_pretrained(tmp_path)


def test_a_length_head_that_the_configuration_does_not_mention_is_refused(tmp_path: Path) -> None:
    tensors = as_written_by_the_authors(tiny_drafter(length_head_config=HEAD))
    with pytest.raises(DrafterCheckpointError, match="Describe the length head in config.json"):
        DFlashDrafterModel.from_pretrained(write(tmp_path, ZLAB_CONFIG, tensors))


@pytest.mark.parametrize("load", [DFlashDrafterModel.from_pretrained, AutoModel.from_pretrained])
@pytest.mark.parametrize("options", [{}, {"use_safetensors": False}])
def test_pickles_are_never_opened(load: Callable, options: dict[str, Any], tmp_path: Path) -> None:
    marker = tmp_path / "unpickled"

    class Payload:
        def __reduce__(self) -> tuple[Callable, tuple]:
            return Path.touch, (marker,)

    drafter = tiny_drafter()
    drafter.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({"fc.weight": Payload()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(DrafterCheckpointError, match="has no `model.safetensors`. Pickled weights"):
        load(tmp_path, **options)
    assert not marker.exists()
