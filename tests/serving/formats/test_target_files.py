from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import tiny_target

from adaflash_hf.errors import InvalidInputError
from adaflash_hf.serving.formats import TargetFiles


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shards", ["1MB", "20KB"])
def test_reads_single_tensors(tied: bool, shards: str, tmp_path: Path) -> None:
    model = tiny_target(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path, max_shard_size=shards)
    target = TargetFiles(str(tmp_path))
    assert (target.config.num_hidden_layers, target.path) == (4, str(tmp_path))
    assert torch.equal(target.embedding(), model.get_input_embeddings().weight)
    assert torch.equal(target.lm_head(), model.get_output_embeddings().weight)


def test_nothing_is_read_before_it_is_asked_for() -> None:
    target = TargetFiles("org/nowhere")
    assert (target.name, target.path) == ("org/nowhere", "org/nowhere")


def test_what_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="config.json cannot be read") as error:
        _ = TargetFiles(str(tmp_path)).config
    assert "\n" not in str(error.value)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 63, "num_attention_heads": 4}')
    with pytest.raises(InvalidInputError, match=r"config.json cannot be read \(The hidden size \(63\) is not"):
        _ = TargetFiles(str(tmp_path)).config
    tiny_target().config.save_pretrained(tmp_path)
    with pytest.raises(InvalidInputError, match="has no safetensors weights"):
        TargetFiles(str(tmp_path)).lm_head()
