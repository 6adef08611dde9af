"""Reading and writing as a whole: nothing half-written, nothing overwritten unasked, every fault told in one line."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_checkpoints import speculators_config
from full_disk import full_disk
from safetensors.torch import load_file
from tiny_checkpoints import ZLAB_CONFIG, write
from tiny_models import tiny_drafter, tiny_target

from adaflash_hf import DFlashDrafterModel
from adaflash_hf.errors import AdaFlashError, DrafterCheckpointError, DrafterExportError, InvalidInputError
from adaflash_hf.serving.formats import (
    DrafterBundle,
    ReadOptions,
    TargetFiles,
    WriteOptions,
    convert_drafter,
    drafter_files,
    read_drafter,
    write_drafter,
)


@pytest.fixture(scope="module")
def bundle() -> DrafterBundle:
    drafter = tiny_drafter(target_model_name_or_path="org/target")
    return DrafterBundle(drafter.config, drafter.state_dict(), "memory")


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_native_checkpoints_carry_their_sources(bundle: DrafterBundle, tmp_path: Path) -> None:
    write_drafter(bundle, tmp_path / "out", "native")
    assert {"config.json", "model.safetensors", "modeling_dflash_drafter.py"} <= set(names(tmp_path / "out"))
    assert "auto_map" in json.loads((tmp_path / "out" / "config.json").read_text())


def test_engine_checkpoints_are_two_files(bundle: DrafterBundle, tmp_path: Path) -> None:
    write_drafter(bundle, tmp_path / "deep" / "out", "sglang")
    assert names(tmp_path / "deep" / "out") == ["config.json", "model.safetensors"]
    assert names(tmp_path / "deep") == ["out"], "nothing is left beside it"
    config = json.loads((tmp_path / "deep" / "out" / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"] and config["dtype"] == "bfloat16"
    assert "auto_map" not in config and config["target_model_name_or_path"] == "org/target"


def test_nothing_is_replaced_without_force(bundle: DrafterBundle, tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_drafter(bundle, out, "native")
    with pytest.raises(InvalidInputError, match="there is a checkpoint; pass --force"):
        write_drafter(bundle, out, "sglang")
    assert (out / "modeling_dflash_drafter.py").exists()
    write_drafter(bundle, out, "sglang", force=True)
    assert names(out) == ["config.json", "model.safetensors"], "no file of the old one is left"


def test_other_directories_are_not_replaced_even_with_force(bundle: DrafterBundle, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years")
    with pytest.raises(InvalidInputError, match="holds something else than a checkpoint .'thesis.tex'."):
        write_drafter(bundle, tmp_path / "mine", "sglang", force=True)
    (tmp_path / "file").write_text("x")
    with pytest.raises(InvalidInputError, match="is no directory"):
        write_drafter(bundle, tmp_path / "file", "sglang", force=True)
    (tmp_path / "empty").mkdir()
    write_drafter(bundle, tmp_path / "empty", "sglang")


def test_a_drafter_is_not_converted_onto_itself(bundle: DrafterBundle, tmp_path: Path) -> None:
    write_drafter(bundle, tmp_path / "drafter", "native")
    os.symlink(tmp_path / "drafter", tmp_path / "link")
    with pytest.raises(InvalidInputError, match="the drafter itself"):
        convert_drafter(tmp_path / "link", tmp_path / "drafter", "sglang", force=True)


@pytest.mark.parametrize("name", ["native", "z-lab"])
@pytest.mark.parametrize("options", [ReadOptions, WriteOptions])
def test_the_target_that_was_given_is_named_by_what_is_written(name: str, options: Any, tmp_path: Path) -> None:
    drafter = tiny_drafter()
    write_drafter(DrafterBundle(drafter.config, drafter.state_dict(), "memory"), tmp_path / "in", name)
    tiny_target().config.save_pretrained(tmp_path / "target")
    target = TargetFiles(str(tmp_path / "target"))
    assert read_drafter(tmp_path / "in", ReadOptions(target=target)).config.target_model_name_or_path is None
    given = {"read_options" if options is ReadOptions else "write_options": options(target=target)}
    bundle, written = convert_drafter(tmp_path / "in", tmp_path / "out", "speculators", **given)
    assert bundle.config.target_model_name_or_path is None
    assert written.holds.config.target_model_name_or_path == target.name
    assert read_drafter(tmp_path / "out").config.target_model_name_or_path == target.name


def test_a_failing_check_leaves_the_old_one(bundle: DrafterBundle, tmp_path: Path, monkeypatch: Any) -> None:
    """What was written is read back before it takes its name."""
    write_drafter(bundle, tmp_path / "out", "native")

    def lose_the_end(tensors: dict[str, torch.Tensor], path: Path, metadata: Any = None) -> None:
        save_file(tensors, path, metadata=metadata)
        os.truncate(path, path.stat().st_size - 100)

    save_file = drafter_files.save_file
    monkeypatch.setattr(drafter_files, "save_file", lose_the_end)
    with pytest.raises(AdaFlashError, match="cannot be read"):
        write_drafter(bundle, tmp_path / "out", "sglang", force=True)
    assert names(tmp_path) == ["out"]
    assert isinstance(DFlashDrafterModel.from_pretrained(tmp_path / "out"), DFlashDrafterModel)


def test_too_little_room_is_told_before_anything_is_written(
    bundle: DrafterBundle, tmp_path: Path, monkeypatch: Any
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(DrafterExportError, match="16 MB are needed there and 0 MB are free. Make room"):
        write_drafter(bundle, tmp_path / "out", "sglang")
    assert names(tmp_path) == []


@pytest.mark.parametrize("name", ["native", "sglang"])
def test_a_disk_that_fills_up_is_told(name: str, bundle: DrafterBundle, tmp_path: Path) -> None:
    with full_disk(30_000), pytest.raises(DrafterExportError, match="writing failed.*nothing was left behind"):
        write_drafter(bundle, tmp_path / "out", name)
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (
            lambda folder: os.truncate(folder / "model.safetensors", 9000),
            "cannot be read .* was not written to its end",
        ),
        (lambda folder: (folder / "model.safetensors").write_bytes(b""), "cannot be read"),
        (lambda folder: (folder / "model.safetensors").unlink(), "has no `model.safetensors`"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json is not JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), "config.json holds a list; expected an object"),
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
    ],
)
def test_damaged_checkpoints_are_refused(damage: Any, reason: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "in", ZLAB_CONFIG, tiny_drafter().state_dict())
    damage(folder)
    with pytest.raises(DrafterCheckpointError, match=reason):
        read_drafter(folder)


def test_pickles_are_named_and_not_opened(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(ZLAB_CONFIG))
    (tmp_path / "draft.pt").write_bytes(b"\x80\x04boom")
    with pytest.raises(DrafterCheckpointError, match="Pickled weights.*Found here: draft.pt"):
        read_drafter(tmp_path)


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_values_that_are_not_finite_are_refused(value: str, bundle: DrafterBundle, tmp_path: Path) -> None:
    tensors = {name: tensor.clone() for name, tensor in bundle.tensors.items()}
    tensors["norm.weight"][3] = float(value)
    folder = write(tmp_path / "in", ZLAB_CONFIG, tensors)
    with pytest.raises(DrafterCheckpointError, match="`norm.weight` has NaN or infinite values"):
        convert_drafter(folder, tmp_path / "out", "native")
    assert names(tmp_path) == ["in"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_size": "wide"}, "makes no drafter: .*cannot be used: Field 'hidden_size' expected int"),
        ({"num_attention_heads": 3}, "config.json makes no drafter: .*must be a multiple"),
        ({"block_size": 1}, "config.json makes no drafter: .*`block_size` is 1"),
        ({"quantization_config": {"quant_method": "fp8"}}, "is quantised"),
        ({"intermediate_size": 49}, "has shape .48, 32., but config.json asks for .49, 32."),
        ({"hidden_size": 10**12}, "config.json makes no drafter: its sizes are impossible"),
        ({"architectures": [None]}, "`architectures` in config.json is .None.; expected a list of names"),
        ({"architectures": "DFlashDraftModel"}, "is 'DFlashDraftModel'; expected a list of names"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "`architectures` is .'Qwen3ForCausalLM'."),
    ],
)
def test_a_config_that_makes_no_drafter_is_refused(changes: dict, reason: str, tmp_path: Path) -> None:
    folder = write(tmp_path, {**ZLAB_CONFIG, **changes}, tiny_drafter().state_dict())
    with pytest.raises(DrafterCheckpointError, match=reason) as error:
        read_drafter(folder)
    assert "\n" not in str(error.value)


def test_weights_in_whole_numbers_are_refused(tmp_path: Path) -> None:
    state = {name: tensor.to(torch.int8) for name, tensor in tiny_drafter().state_dict().items()}
    with pytest.raises(DrafterCheckpointError, match=r"is stored as I8; expected floating-point weights"):
        read_drafter(write(tmp_path, ZLAB_CONFIG, state))


def test_what_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="neither a directory nor a Hub repository"):
        read_drafter(tmp_path / "nothing")
    with pytest.raises(InvalidInputError, match="is a file; pass the directory"):
        (tmp_path / "file").write_text("x")
        read_drafter(tmp_path / "file")


def test_the_dtype_is_the_engines_or_the_users(bundle: DrafterBundle, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="runs drafters in torch.bfloat16 only"):
        write_drafter(bundle, tmp_path / "out", "vllm", WriteOptions(dtype=torch.float32))
    write_drafter(bundle, tmp_path / "out", "z-lab", WriteOptions(dtype=torch.float16))
    assert load_file(tmp_path / "out" / "model.safetensors")["fc.weight"].dtype == torch.float16
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float16"


def test_formats_that_are_only_read_or_unknown(bundle: DrafterBundle, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="'deepspec', which is only read"):
        write_drafter(bundle, tmp_path / "out", "deepspec")
    with pytest.raises(InvalidInputError, match="`format` is 'gguf'; known formats are native"):
        write_drafter(bundle, tmp_path / "out", "gguf")


def test_sharded_checkpoints_are_read(bundle: DrafterBundle, tmp_path: Path) -> None:
    drafter = tiny_drafter()
    drafter.save_pretrained(tmp_path / "in", max_shard_size="20KB")
    assert (tmp_path / "in" / "model.safetensors.index.json").exists()
    read = read_drafter(tmp_path / "in")
    assert all(torch.equal(read.tensors[name], tensor) for name, tensor in drafter.state_dict().items())
    next((tmp_path / "in").glob("model-00002*")).unlink()
    with pytest.raises(DrafterCheckpointError, match="the weight file model-00002-of-00004.safetensors is missing"):
        read_drafter(tmp_path / "in")


def test_the_format_can_be_dictated(tmp_path: Path) -> None:
    config = speculators_config(None, num_target_layers=4)
    folder = write(tmp_path, {**config, **ZLAB_CONFIG}, tiny_drafter().state_dict())
    with pytest.raises(DrafterCheckpointError, match="layer ids are one higher"):
        read_drafter(folder, source_format="z-lab")
    assert read_drafter(folder, source_format="speculators").config.target_layer_ids == [0, 2]
