from __future__ import annotations

import base64
import io

import pytest
import torch
from sglang_server import _SafeUnpickler
from tiny_models import tiny_drafter, tiny_target

from adaflash_hf.errors import DrafterExportError
from adaflash_hf.serving.draft_payload import DraftWeights, check_same_drafter, draft_weights, payloads, stale_tensors


def read(payload: str) -> list[tuple[str, torch.Tensor]]:
    """As SGLang does: with an unpickler that knows tensors and nothing else."""
    return _SafeUnpickler(io.BytesIO(base64.b64decode(payload))).load()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("drafter")
    tiny_drafter(
        tiny_target("llama"), length_head_config={"head_type": "mean_linear", "bottleneck_size": 4}
    ).save_pretrained(path)
    return path


def test_tensors_arrive_by_value_in_bfloat16(folder):
    weights = draft_weights(folder, has_plugin=True)
    arrived = dict(read(next(payloads(weights, 2**30))))
    assert arrived.keys() == weights.tensors.keys()
    for name, tensor in arrived.items():
        assert tensor.dtype == torch.bfloat16
        torch.testing.assert_close(tensor, weights.tensors[name], rtol=0, atol=0)


def test_the_length_head_goes_where_it_is_known(folder):
    plugin, stock = (draft_weights(folder, has_plugin=known).tensors for known in (True, False))
    heads = {name for name in plugin if name.startswith("length_head.")}
    assert heads and plugin.keys() - heads == stock.keys()


def test_buckets_hold_all_and_views_nothing_else(folder):
    base = torch.arange(1000, dtype=torch.float32)
    weights = DraftWeights("x", {"a": base[:10], "b": base[10:20], "ids": torch.arange(3), "c": base[20:30]})
    buckets = list(payloads(weights, 80))
    assert [[name for name, _ in read(bucket)] for bucket in buckets] == [["a", "b"], ["c"]]
    assert all(len(bucket) < 2000 for bucket in buckets)
    assert read(buckets[1])[0][1].tolist() == list(range(20, 30))
    assert [[name for name, _ in read(bucket)] for bucket in payloads(weights, 1)] == [["a"], ["b"], ["c"]]


def test_only_weights_may_change():
    ours = DraftWeights("served", {"a": torch.zeros(2), "ids": torch.arange(3)})
    check_same_drafter(DraftWeights("new", {"a": torch.ones(2), "ids": torch.arange(3)}), ours)
    with pytest.raises(DrafterExportError, match=r"new has \(3,\) for `a`, served is \(2,\)"):
        check_same_drafter(DraftWeights("new", {"a": torch.ones(3), "ids": torch.arange(3)}), ours)
    with pytest.raises(DrafterExportError, match="new has None for `a`"):
        check_same_drafter(DraftWeights("new", {"ids": torch.arange(3)}), ours)
    with pytest.raises(DrafterExportError, match="another `ids`"):
        check_same_drafter(DraftWeights("new", {"a": torch.ones(2), "ids": torch.arange(1, 4)}), ours)


def test_which_tensors_of_a_server_should_have_changed():
    names = [f"layers.0.self_attn.{part}_proj.weight" for part in "qkv"] + ["norm.weight", "fc.weight"]
    ours = DraftWeights("served", {name: torch.zeros(1) for name in names})
    new = DraftWeights("new", {**ours.tensors, names[1]: torch.ones(1), "fc.weight": torch.ones(1)})
    fused = "layers.0.self_attn.qkv_proj.weight"
    before = {f"{rank}:{name}": "old" for rank in range(2) for name in (fused, "norm.weight", "fc.weight", "rope")}
    assert stale_tensors(new, ours, before, before) == ["fc.weight", fused]
    # The norm is the same in both, and one rank's share of a fused tensor may be.
    after = {**before, f"1:{fused}": "new", "0:fc.weight": "new", "1:fc.weight": "new"}
    assert stale_tensors(new, ours, before, after) == []
