from __future__ import annotations

import json

import pytest
import torch
from published_drafters import adapted_drafter

from adaflash_hf.errors import PublishedVersionError
from adaflash_hf.online.version_checks import check_configuration, read_weights


@pytest.fixture
def directory(tmp_path):
    adapted_drafter(5).save_pretrained(tmp_path)
    return tmp_path


def test_weights_come_in_the_dtype_in_use(directory):
    in_use = adapted_drafter(4).to(torch.bfloat16)
    check_configuration(directory, in_use.config)
    weights = read_weights(directory, in_use.state_dict())
    expected = adapted_drafter(5).to(torch.bfloat16).state_dict()
    assert weights.keys() == expected.keys()
    assert all(weights[name].equal(tensor) for name, tensor in expected.items())


def test_weights_do_not_hang_on_the_file(directory):
    weights = read_weights(directory, adapted_drafter().state_dict())
    before = weights["fc.weight"].clone()
    path = directory / "model.safetensors"
    path.write_bytes(b"\xff" * path.stat().st_size)
    assert weights["fc.weight"].equal(before)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("target_model_name_or_path", "org/another-target"),
        ("mask_token_id", 7),
        ("target_layer_ids", [0, 1]),
        ("block_size", 6),
        ("length_head_config", {"head_type": "mean_last_residual"}),
    ],
)
def test_another_configuration_is_refused(directory, field, value):
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    with pytest.raises(PublishedVersionError, match=field):
        check_configuration(directory, adapted_drafter().config)


def test_how_a_checkpoint_was_written_does_not_matter(directory):
    path = directory / "config.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps({**fields, "dtype": "bfloat16", "transformers_version": "9.9", "architectures": []}))
    check_configuration(directory, adapted_drafter().config)


def test_an_unreadable_version_is_refused(directory):
    (directory / "config.json").write_text("{")
    with pytest.raises(PublishedVersionError, match="cannot be read"):
        check_configuration(directory, adapted_drafter().config)
    (directory / "model.safetensors").write_bytes(b"12345678")
    with pytest.raises(PublishedVersionError, match="cannot be read"):
        read_weights(directory, adapted_drafter().state_dict())


def save_changed(directory, **tensors):
    from safetensors.torch import save_file

    state = {**adapted_drafter(5).state_dict(), **tensors}
    save_file({name: tensor for name, tensor in state.items() if tensor is not None}, directory / "model.safetensors")


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_one_number_that_is_not_finite_is_enough(directory, poison):
    weight = adapted_drafter(5).norm.weight.detach().clone()
    weight[3] = poison
    save_changed(directory, **{"norm.weight": weight})
    with pytest.raises(PublishedVersionError, match=r"`norm.weight`.*not finite"):
        read_weights(directory, adapted_drafter().state_dict())


def test_what_overflows_the_dtype_in_use_is_not_finite(directory):
    save_changed(directory, **{"norm.weight": torch.full_like(adapted_drafter().norm.weight, 1e5)})
    read_weights(directory, adapted_drafter().state_dict())
    with pytest.raises(PublishedVersionError, match="float16"):
        read_weights(directory, adapted_drafter().half().state_dict())


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("norm.weight", None, "lacks the tensors"),
        ("extra.weight", torch.zeros(3), "in addition"),
        ("norm.weight", torch.zeros(3), "shape"),
        ("norm.weight", torch.zeros(32, dtype=torch.int64), "not finite"),
    ],
)
def test_tensors_are_exactly_those_in_use(directory, name, tensor, message):
    save_changed(directory, **{name: tensor})
    with pytest.raises(PublishedVersionError, match=message):
        read_weights(directory, adapted_drafter().state_dict())


def test_another_draft_vocabulary_is_refused(tmp_path):
    in_use, other = adapted_drafter(), adapted_drafter()
    in_use.set_draft_vocabulary(torch.tensor([1, 5, 9]))
    other.set_draft_vocabulary(torch.tensor([1, 5, 8]))
    other.save_pretrained(tmp_path)
    with pytest.raises(PublishedVersionError, match="draft vocabulary"):
        read_weights(tmp_path, in_use.state_dict())
