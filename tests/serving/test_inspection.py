"""What `inspect` says of sound and broken checkpoints of every format, and of each engine's way with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_checkpoints import speculators_config, write_deepspec, write_torchspec
from peft import LoraConfig, get_peft_model
from tiny_checkpoints import HEAD, ZLAB_CONFIG, without, write
from tiny_models import tiny_drafter, tiny_target

from adaflash_hf import DFlashDrafterModel
from adaflash_hf.errors import InvalidInputError
from adaflash_hf.serving.engine_outlook import ENGINES
from adaflash_hf.serving.formats import DrafterBundle, ReadOptions, TargetFiles, write_drafter
from adaflash_hf.serving.inspection import Inspection, inspect_drafter


def drafter(**fields: Any) -> DFlashDrafterModel:
    return tiny_drafter(**{"rope_theta": 1e6, "target_model_name_or_path": "org/target", **fields})


def exported(folder: Path, name: str, **fields: Any) -> Path:
    model = drafter(**fields)
    write_drafter(DrafterBundle(model.config, model.state_dict(), "memory"), folder, name)
    return folder


def outlooks(result: Inspection) -> dict[str, str]:
    assert [entry.engine for entry in result.engines] == list(ENGINES)
    return {entry.engine: entry.outlook.value for entry in result.engines}


def reason(result: Inspection, engine: str) -> str:
    return next(entry.reason for entry in result.engines if entry.engine == engine)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("native", ("ready", "partial", "refuses", "refuses", "refuses")),
        ("z-lab", ("ready", "partial", "ready", "refuses", "ready")),
        ("adaflash-authors", ("ready", "partial", "partial", "refuses", "refuses")),
        ("speculators", ("refuses", "refuses", "refuses", "refuses", "ready")),
        ("sglang", ("ready", "partial", "ready", "refuses", "ready")),
        ("sglang-plugin", ("ready", "partial", "refuses", "ready", "refuses")),
        ("vllm", ("ready", "partial", "ready", "refuses", "ready")),
    ],
)
def test_each_format_runs_where_it_should(name: str, expected: tuple[str, ...], tmp_path: Path) -> None:
    result = inspect_drafter(exported(tmp_path / "out", name, length_head_config=HEAD))
    assert result.problems == []
    assert tuple(outlooks(result).values()) == expected
    assert result.format == {"sglang": "z-lab", "vllm": "z-lab"}.get(name, name)
    assert result.config is not None and result.config.target_layer_ids == [0, 2]
    json.dumps(result.as_dict())


def test_facts(tmp_path: Path) -> None:
    facts = inspect_drafter(exported(tmp_path / "out", "sglang-plugin", length_head_config=HEAD)).as_dict()
    assert facts["dtypes"] == {"bfloat16": 31}
    assert facts["drafter"]["target"] == "org/target"
    assert facts["drafter"]["block_layout"] == "anchor_then_masks"
    assert facts["drafter"]["draft_length"] == 3
    assert facts["drafter"]["length_head"] == "mean_last_residual"
    assert facts["parameters"] == sum(p.numel() for p in drafter(length_head_config=HEAD).parameters())
    assert facts["engines"]["sglang-plugin"] == {"outlook": "ready", "reason": ""}


def test_engines_that_go_wrong_silently_are_named(tmp_path: Path) -> None:
    tensors = drafter().state_dict()
    # A tensor is missing: SGLang starts all the same.
    result = inspect_drafter(write(tmp_path / "missing", ZLAB_CONFIG, without(tensors, "hidden_norm.weight")))
    assert len(result.problems) == 1 and "`hidden_norm.weight`" in result.problems[0]
    assert outlooks(result)["adaflash"] == "refuses"
    # Anchor-first in z-lab's format: both engines would take every row for another token.
    declared = {**ZLAB_CONFIG, "dflash_config": {**ZLAB_CONFIG["dflash_config"], "sample_from_anchor": True}}
    result = inspect_drafter(write(tmp_path / "anchor", declared, tensors))
    assert outlooks(result) == {
        "adaflash": "ready",
        "transformers": "wrong",
        "sglang": "wrong",
        "sglang-plugin": "refuses",
        "vllm": "wrong",
    }
    # The last layer means another thing there.
    nested = {"mask_token_id": 3, "target_layer_ids": [0, 3]}
    result = inspect_drafter(write(tmp_path / "last", {**ZLAB_CONFIG, "dflash_config": nested}, tensors))
    assert outlooks(result)["sglang"] == outlooks(result)["vllm"] == "wrong"
    # The window is dropped by Qwen3Config.
    fields = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 5}
    result = inspect_drafter(write(tmp_path / "window", {**ZLAB_CONFIG, **fields}, tensors))
    assert outlooks(result)["sglang"] == outlooks(result)["vllm"] == "refuses"
    assert "`use_sliding_window` is not true" in reason(result, "vllm")


def test_prefixes_and_heads_stop_vllm_only(tmp_path: Path) -> None:
    tensors = {f"model.{name}": tensor for name, tensor in drafter().state_dict().items()}
    result = inspect_drafter(write(tmp_path, ZLAB_CONFIG, tensors))
    assert (outlooks(result)["sglang"], outlooks(result)["vllm"]) == ("ready", "refuses")
    assert "It has no place for model." in reason(result, "vllm")


def test_speculators_defaults_make_vllm_causal(tmp_path: Path) -> None:
    config = speculators_config(None, num_target_layers=4)
    result = inspect_drafter(write(tmp_path, config, drafter().state_dict()))
    assert outlooks(result)["vllm"] == "wrong"
    assert "takes for causal attention in every layer" in reason(result, "vllm")


def test_formats_to_convert(tmp_path: Path) -> None:
    options = ReadOptions(block_size=4, trust_copies=True)
    for name, write_it in (("deepspec", write_deepspec), ("torchspec", write_torchspec)):
        result = inspect_drafter(write_it(tmp_path / name, drafter(), tiny_target()), options)
        assert (result.format, result.problems) == (name, [])
        assert outlooks(result)["adaflash"] == "refuses"
        assert "`adaflash convert`" in reason(result, "adaflash")
    assert "With method dspark" in reason(inspect_drafter(tmp_path / "deepspec", options), "vllm")


def test_broken_checkpoints_are_reported(tmp_path: Path) -> None:
    tensors = {name: tensor.clone() for name, tensor in drafter().state_dict().items()}
    tensors["fc.weight"][0, 0] = float("nan")
    result = inspect_drafter(write(tmp_path / "nan", ZLAB_CONFIG, tensors))
    assert ["`fc.weight` has NaN" in problem for problem in result.problems] == [True]
    assert result.config is not None, "the rest is described all the same"
    folder = write(tmp_path / "cut", ZLAB_CONFIG, tensors)
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:500])
    result = inspect_drafter(folder)
    assert "cannot be read" in result.problems[0] and result.engines == []
    result = inspect_drafter(write(tmp_path / "alien", {"architectures": ["GPT2LMHeadModel"]}, {"w": torch.zeros(1)}))
    assert result.format is None and set(outlooks(result).values()) == {"refuses"}
    (tmp_path / "empty").mkdir()
    assert "has no config.json" in inspect_drafter(tmp_path / "empty").problems[0]
    with pytest.raises(InvalidInputError):
        inspect_drafter(tmp_path / "nothing")


def test_mixed_dtypes_are_noted(tmp_path: Path) -> None:
    tensors = dict(drafter().state_dict())
    tensors["norm.weight"] = tensors["norm.weight"].to(torch.bfloat16)
    result = inspect_drafter(write(tmp_path, ZLAB_CONFIG, tensors))
    assert any("in 2 dtypes: " in note for note in result.notes)


def test_the_fit_with_a_target(tmp_path: Path) -> None:
    tiny_target().save_pretrained(tmp_path / "fits")
    tiny_target(num_hidden_layers=5).save_pretrained(tmp_path / "deeper")
    source = exported(tmp_path / "out", "native")
    fits = TargetFiles(str(tmp_path / "fits"))
    result = inspect_drafter(source, ReadOptions(target=fits))
    assert (result.fits, result.problems) == (fits.name, [])
    result = inspect_drafter(source, ReadOptions(target=TargetFiles(str(tmp_path / "deeper"))))
    assert result.fits is None and "`num_target_layers` = 4 layers" in result.problems[0]
    result = inspect_drafter(source, ReadOptions(target=TargetFiles(str(tmp_path / "gone"))))
    assert "config.json cannot be read" in result.problems[0]
    assert outlooks(result)["adaflash"] == "ready", "of the drafter nothing is wrong"


@pytest.mark.parametrize("name", ["native", "sglang", "speculators"])
def test_a_drafter_that_does_not_fit_runs_nowhere_with_this_target(name: str, tmp_path: Path) -> None:
    tiny_target(num_hidden_layers=5).save_pretrained(tmp_path / "deeper")
    source = exported(tmp_path / "out", name)
    alone, result = (
        inspect_drafter(source, ReadOptions(target=target)) for target in (None, TargetFiles(str(tmp_path / "deeper")))
    )
    assert outlooks(result)["adaflash"] == "refuses"
    if outlooks(alone)["adaflash"] == "ready":
        assert reason(result, "adaflash") == result.problems[0]
    assert not {"ready", "partial"} & set(outlooks(result).values())
    for engine, outlook in outlooks(alone).items():
        if outlook in ("refuses", "wrong"):
            assert reason(result, engine) == reason(alone, engine), "what is in the way without it, still is"


@pytest.mark.parametrize("name", ["native", "z-lab", "sglang-plugin"])
def test_the_target_is_the_one_that_the_files_name(name: str, tmp_path: Path) -> None:
    tiny_target().save_pretrained(tmp_path / "fits")
    options = ReadOptions(target=TargetFiles(str(tmp_path / "fits")))
    result = inspect_drafter(exported(tmp_path / "unnamed", name, target_model_name_or_path=None), options)
    assert (result.fits, result.as_dict()["drafter"]["target"]) == (str(tmp_path / "fits"), None)
    result = inspect_drafter(exported(tmp_path / "named", name), options)
    assert (result.fits, result.as_dict()["drafter"]["target"]) == (str(tmp_path / "fits"), "org/target")
    tiny_target(num_hidden_layers=5).config.save_pretrained(tmp_path / "deeper")
    options = ReadOptions(target=TargetFiles(str(tmp_path / "deeper")))
    (problem,) = inspect_drafter(tmp_path / "unnamed", options).problems
    assert "It was trained for" not in problem
    (problem,) = inspect_drafter(tmp_path / "named", options).problems
    assert "It was trained for org/target." in problem


def test_adapters(tmp_path: Path) -> None:
    drafter().save_pretrained(tmp_path / "base")
    base = DFlashDrafterModel.from_pretrained(tmp_path / "base")
    get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    result = inspect_drafter(tmp_path / "adapter")
    assert (result.format, result.problems) == ("peft", [])
    assert outlooks(result)["adaflash"] == "ready" and outlooks(result)["vllm"] == "refuses"
