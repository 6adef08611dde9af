from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import tiny_drafter_config, tiny_target

from adaflash_hf.errors import DrafterCompatibilityError, InvalidInputError
from adaflash_hf.serving.formats import TargetFiles
from adaflash_hf.serving.target_fit import check_fit


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3_text", "qwen3_next"])
def test_no_weights_are_needed(architecture: str, tmp_path: Path) -> None:
    tiny_target(architecture).config.save_pretrained(tmp_path)
    target = TargetFiles(str(tmp_path))
    check_fit(tiny_drafter_config(), target)
    with pytest.raises(DrafterCompatibilityError, match="`num_target_layers` = 9"):
        check_fit(tiny_drafter_config(num_target_layers=9), target)
    with pytest.raises(DrafterCompatibilityError, match="`vocab_size` is 50"):
        check_fit(tiny_drafter_config(vocab_size=50), target)
    with pytest.raises(DrafterCompatibilityError, match="It was trained for org/other"):
        check_fit(tiny_drafter_config(num_target_layers=9, target_model_name_or_path="org/other"), target)


def test_the_configuration_is_left_alone(tmp_path: Path) -> None:
    tiny_target().config.save_pretrained(tmp_path)
    config = tiny_drafter_config()
    before = config.to_dict()
    check_fit(config, TargetFiles(str(tmp_path)))
    assert config.to_dict() == before


def test_something_else_than_a_language_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(InvalidInputError, match="makes no language model"):
        check_fit(tiny_drafter_config(), TargetFiles(str(tmp_path)))
