from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_checkpoints import deepspec_config, speculators_config, torchspec_config
from tiny_checkpoints import HEAD_FLAGS, ZLAB_CONFIG, write
from tiny_models import tiny_drafter_config

from adaflash_hf.errors import DrafterCheckpointError, InvalidInputError
from adaflash_hf.serving.formats import (
    FORMATS,
    READABLE_FORMATS,
    WRITABLE_FORMATS,
    detect_format,
    format_called,
    open_checkpoint,
)


WITH_FLAGS = {**ZLAB_CONFIG, "dflash_config": {**ZLAB_CONFIG["dflash_config"], **HEAD_FLAGS}}


@pytest.mark.parametrize(
    ("config", "tensor", "name"),
    [
        (tiny_drafter_config().to_dict(), "fc.weight", "native"),
        (ZLAB_CONFIG, "fc.weight", "z-lab"),
        (WITH_FLAGS, "fc.weight", "adaflash-authors"),
        (ZLAB_CONFIG, "thresh_head_two_model.out.bias", "adaflash-authors"),
        ({**ZLAB_CONFIG, "architectures": ["AdaFlashDraftModel"]}, "fc.weight", "sglang-plugin"),
        (speculators_config("org/target"), "fc.weight", "speculators"),
        (deepspec_config(), "fc.weight", "deepspec"),
        ({**deepspec_config(), "architectures": ["Gemma4DSparkModel"]}, "fc.weight", "deepspec"),
        (torchspec_config(), "context_proj.weight", "torchspec"),
        ({**ZLAB_CONFIG, "num_target_layers": 36}, "context_proj.weight", "torchspec"),
    ],
)
def test_each_format_is_recognised(config: dict[str, Any], tensor: str, name: str, tmp_path: Path) -> None:
    config = {key: str(value) if key == "dtype" else value for key, value in config.items()}
    assert detect_format(open_checkpoint(write(tmp_path, config, {tensor: torch.zeros(2)}))).name == name


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash2 drafter"),
        ({"architectures": ["MuseGlimmerAssistantModel"]}, "load it with transformers"),
        ({"architectures": ["DFlashForCausalLM"], "model_type": "dflash"}, "verl-speco's format"),
        ({"architectures": ["DominoDraftModel"]}, "Domino drafter"),
        ({"architectures": None, "model_type": None, "dflash_config": None}, "`architectures` is"),
    ],
)
def test_other_kinds_are_refused_by_name(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path, {**ZLAB_CONFIG, **changes}, {"fc.weight": torch.zeros(2)}))
    with pytest.raises(DrafterCheckpointError, match=reason) as caught:
        detect_format(checkpoint)
    assert str(tmp_path) in str(caught.value)


def test_names() -> None:
    assert set(READABLE_FORMATS) | set(WRITABLE_FORMATS) == set(FORMATS)
    assert set(WRITABLE_FORMATS) - set(READABLE_FORMATS) == {"sglang", "vllm"}
    assert format_called("vllm").dtype == torch.bfloat16
    with pytest.raises(InvalidInputError, match="known formats"):
        format_called("ggml")
