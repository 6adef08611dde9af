"""speculators, DeepSpec and TorchSpec beyond the traps: what is filled in, left out, and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_checkpoints import (
    deepspec_config,
    speculators_config,
    target_copies,
    torchspec_config,
    torchspec_tensors,
    write_deepspec,
    write_torchspec,
)
from tiny_checkpoints import write
from tiny_models import tiny_drafter, tiny_target

from adaflash_hf.errors import DrafterCheckpointError, DrafterExportError
from adaflash_hf.serving.formats import (
    DrafterBundle,
    DrafterForm,
    ReadOptions,
    TargetFiles,
    read_drafter,
    write_drafter,
)


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("target")
    tiny_target().save_pretrained(folder)
    return str(folder)


def refusal(source: Path, **options: Any) -> str:
    with pytest.raises(DrafterCheckpointError) as error:
        read_drafter(source, ReadOptions(**options))
    return str(error.value)


def write_native(tmp_path: Path, **fields: Any) -> DrafterForm:
    drafter = tiny_drafter(**fields)
    return write_drafter(
        DrafterBundle(drafter.config, drafter.state_dict(), "memory"), tmp_path / "out", "speculators"
    )


def test_speculators_depth_comes_from_the_verifier(target_folder: str, tmp_path: Path) -> None:
    tensors = tiny_drafter().state_dict()
    source = write(tmp_path / "named", speculators_config(target_folder), tensors)
    config = read_drafter(source).config
    assert (config.num_target_layers, config.target_model_name_or_path) == (4, target_folder)
    source = write(tmp_path / "unnamed", speculators_config(None), tensors)
    assert "it names no verifier. Pass --target" in refusal(source)
    source = write(tmp_path / "gone", speculators_config(str(tmp_path / "gone-target")), tensors)
    assert "names a verifier that cannot be read" in refusal(source)
    assert read_drafter(source, ReadOptions(target=TargetFiles(target_folder))).config.num_target_layers == 4


def test_speculators_training_copies_are_left_out(target_folder: str, tmp_path: Path) -> None:
    copies = target_copies(tiny_target())
    extra = {"verifier_lm_head.weight": torch.zeros(96, 32), "verifier_norm.weight": torch.zeros(32)}
    source = write(
        tmp_path / "in", speculators_config(target_folder), {**tiny_drafter().state_dict(), **copies, **extra}
    )
    bundle = read_drafter(source)
    assert bundle.tensors.keys() == tiny_drafter().state_dict().keys()
    assert sum("is left out" in note for note in bundle.notes) == 4


def test_speculators_other_kinds_are_refused(target_folder: str, tmp_path: Path) -> None:
    tensors = tiny_drafter().state_dict()
    config = speculators_config(target_folder, speculators_model_type="eagle3")
    assert "`speculators_model_type` is 'eagle3'" in refusal(write(tmp_path / "a", config, tensors))
    config = speculators_config(target_folder, aux_hidden_state_layer_ids=None)
    assert "`aux_hidden_state_layer_ids` is missing" in refusal(write(tmp_path / "b", config, tensors))
    config = speculators_config(target_folder, draft_vocab_size=7)
    assert "`draft_vocab_size` is 7, but the table `d2t`" in refusal(write(tmp_path / "c", config, tensors))


def test_speculators_needs_a_verifier(tmp_path: Path) -> None:
    with pytest.raises(DrafterExportError, match="Pass --target"):
        write_native(tmp_path)
    written = write_native(tmp_path, target_model_name_or_path="org/target", final_logit_softcapping=20.0)
    assert written.config["speculators_config"]["verifier"]["name_or_path"] == "org/target"
    assert any("are unknown to speculators" in note for note in written.notes)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"markov_rank": 8, "markov_head_type": "vanilla"}, "its drafts depend on a Markov head"),
        ({"architectures": ["Gemma4DSparkModel"]}, "only Qwen3DSparkModel has the layers"),
    ],
)
def test_deepspec_variants_are_refused(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    source = write_deepspec(tmp_path, tiny_drafter(), tiny_target(), **changes)
    assert reason in refusal(source, trust_copies=True)


def test_deepspec_confidence_heads_are_left_out(tmp_path: Path) -> None:
    heads = {"confidence_head.proj.weight": torch.zeros(1, 32), "confidence_head.proj.bias": torch.zeros(1)}
    tensors = {**tiny_drafter().state_dict(), **heads}
    source = write(tmp_path, deepspec_config(enable_confidence_head=True), tensors)
    bundle = read_drafter(source)
    assert not any(name.startswith("confidence_head") for name in bundle.tensors)
    assert any("confidence head has no place" in note for note in bundle.notes)


def test_torchspec_defaults_are_its_own(tmp_path: Path) -> None:
    # Its class takes hidden size over heads where z-lab's takes 128, and spreads the ids by itself.
    source = write_torchspec(
        tmp_path, tiny_drafter(), tiny_target(), target_layer_ids=None, target_num_hidden_layers=12
    )
    config = read_drafter(source, ReadOptions(block_size=8, trust_copies=True)).config
    assert (config.head_dim, config.target_layer_ids, config.block_size) == (8, [1, 9], 8)
    source = write_torchspec(
        tmp_path, tiny_drafter(), tiny_target(), target_layer_ids=None, target_num_hidden_layers=None
    )
    assert read_drafter(source, ReadOptions(block_size=8, trust_copies=True)).config.num_target_layers == 36


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"target_layer_ids": [0, 1, 2]}, "takes 2 layers' outputs"),
        ({"target_hidden_size": 24}, "64 columns, which is no multiple of the target's hidden size 24"),
        ({"markov_rank": 4}, "depend on a Markov head"),
    ],
)
def test_torchspec_contradictions_are_refused(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    source = write_torchspec(tmp_path, tiny_drafter(), tiny_target(), **changes)
    assert reason in refusal(source, block_size=4, trust_copies=True)


def test_torchspec_incomplete(tmp_path: Path) -> None:
    tensors = torchspec_tensors(tiny_drafter(), tiny_target())
    del tensors["context_proj.weight"]
    source = write(tmp_path, torchspec_config(), tensors)
    assert "`context_proj.weight` is missing" in refusal(source, block_size=4)


def test_a_target_of_another_size_is_told(tmp_path: Path) -> None:
    tiny_target(vocab_size=80).save_pretrained(tmp_path / "target")
    source = write_deepspec(tmp_path / "in", tiny_drafter(), tiny_target())
    target = TargetFiles(str(tmp_path / "target"))
    assert "has shape [96, 32], the target's in" in refusal(source, target=target)


def test_rounded_copies_are_copies(tmp_path: Path) -> None:
    target = tiny_target()
    target.save_pretrained(tmp_path / "target")
    source = write_deepspec(tmp_path / "in", tiny_drafter().to(torch.bfloat16), target.to(torch.bfloat16))
    bundle = read_drafter(source, ReadOptions(target=TargetFiles(str(tmp_path / "target"))))
    assert bundle.config.block_layout == "anchor_first"
