from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tiny_models import ARCHITECTURES, tiny_target

from adaflash_hf.training.features import FeatureShard, compute_target_features, features_path, write_features


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_features_are_layer_outputs_and_padding_changes_nothing(architecture):
    target = tiny_target(architecture)
    ids = torch.randint(4, 96, (2, 12), generator=torch.Generator().manual_seed(0))
    features = compute_target_features(target, ids, (0, 2), with_final=True)
    states = target(ids, output_hidden_states=True).hidden_states
    assert torch.equal(features.context, torch.cat([states[1], states[3]], dim=-1))
    torch.testing.assert_close(target.lm_head(features.final), target(ids).logits, atol=1e-5, rtol=1e-4)
    alone = compute_target_features(target, ids[:1, :7], (0, 2))
    assert alone.final is None
    torch.testing.assert_close(alone.context, features.context[:1, :7], atol=1e-5, rtol=1e-4)


def test_shards_keep_rows_dtype_and_origin(tmp_path):
    path = features_path(tmp_path / "trajectories-00003.parquet")
    assert path == Path(tmp_path / "features-00003.safetensors")
    rows = [torch.randn(4, 6).bfloat16(), torch.randn(2, 6).bfloat16()]
    target = tiny_target("llama")
    target.name_or_path = "org/target"
    write_features(path, rows, target, (1, 3))
    shard = FeatureShard(path, [1, 3])
    assert torch.equal(shard[0], rows[0]) and torch.equal(shard[1], rows[1])
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"target": "org/target", "target_layer_ids": "[1, 3]"}
    assert list(tmp_path.iterdir()) == [path]
