"""Length heads: values worked out by hand, published tensor names, saving alone and inside a drafter."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import random_block, tiny_drafter
from transformers import AutoModel

from adaflash_hf import DrafterCheckpointError, InvalidInputError, LengthHeadConfig, LengthHeadModel


HEAD_TYPES = ("mean_linear", "mean_last_residual")


def silu(x: float) -> float:
    return x / (1.0 + math.exp(-x))


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


def head_with(config: LengthHeadConfig, **tensors: list) -> LengthHeadModel:
    """A head whose tensors, named with `__` for `.`, are given in full."""
    head = LengthHeadModel(config).eval()
    head.load_state_dict({name.replace("__", "."): torch.tensor(value) for name, value in tensors.items()})
    return head


def random_head(head_type: str, hidden_size: int = 6) -> LengthHeadModel:
    torch.manual_seed(0)
    return LengthHeadModel(
        LengthHeadConfig(hidden_size=hidden_size, bottleneck_size=5, head_type=head_type, initializer_range=0.5)
    ).eval()


def test_mean_linear_by_hand() -> None:
    head = head_with(
        LengthHeadConfig(hidden_size=2, bottleneck_size=1),
        down__weight=[[1.0, -2.0]],
        down__bias=[0.5],
        out__weight=[[3.0]],
        out__bias=[-1.0],
    )
    # Row 1: 1*1 - 2*0 + .5 = 1.5, row 2: 1*0 - 2*1 + .5 = -1.5. SiLU comes before the mean over rows.
    block = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    expected = sigmoid(3.0 * (silu(1.5) + silu(-1.5)) / 2 - 1.0)
    assert head(block).ratio.tolist() == pytest.approx([expected])


def test_mean_last_residual_by_hand() -> None:
    head = head_with(
        LengthHeadConfig(hidden_size=1, bottleneck_size=2, head_type="mean_last_residual"),
        down__weight=[[1.0, 0.0], [0.0, 1.0]],
        down__bias=[0.0, 0.0],
        res__0__weight=[[0.0, 1.0], [0.0, 0.0]],
        res__0__bias=[0.0, 1.0],
        out__weight=[[1.0, 1.0]],
        out__bias=[0.25],
    )
    # Mean over the block 2, last row 3: features (silu 2, silu 3); the residual adds (silu(silu 3), silu 1).
    block = torch.tensor([[[1.0], [2.0], [3.0]]])
    mean, last = silu(2.0), silu(3.0)
    expected = sigmoid((mean + silu(last)) + (last + silu(1.0)) + 0.25)
    assert head(block).ratio.tolist() == pytest.approx([expected])


@pytest.mark.parametrize(
    ("head_type", "shapes"),
    [
        ("mean_linear", {"down.weight": [5, 6], "down.bias": [5], "out.weight": [1, 5], "out.bias": [1]}),
        (
            "mean_last_residual",
            {
                "down.weight": [5, 12],
                "down.bias": [5],
                "res.0.weight": [5, 5],
                "res.0.bias": [5],
                "out.weight": [1, 5],
                "out.bias": [1],
            },
        ),
    ],
)
def test_tensor_names_and_shapes(head_type: str, shapes: dict[str, list[int]]) -> None:
    assert {name: list(t.shape) for name, t in random_head(head_type).state_dict().items()} == shapes


@pytest.mark.parametrize("head_type", HEAD_TYPES)
def test_loss_is_the_squared_error_of_the_ratio(head_type: str) -> None:
    head = random_head(head_type)
    block, labels = torch.randn(3, 4, 6), torch.tensor([0.25, 1.0, 0.5])
    output = head(block, labels=labels)
    assert output.ratio.shape == (3,)
    assert ((output.ratio > 0) & (output.ratio < 1)).all()
    torch.testing.assert_close(output.loss, ((output.ratio - labels) ** 2).mean())
    assert head(block).loss is None


@pytest.mark.parametrize("head_type", HEAD_TYPES)
def test_every_row_matters_and_gradients_reach_every_weight(head_type: str) -> None:
    head = random_head(head_type)
    block = torch.randn(1, 4, 6, requires_grad=True)
    head(block, labels=torch.tensor([1.0])).loss.backward()
    assert (block.grad.abs().sum(dim=-1) > 0).all(), "the anchor's row is an input as well"
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in head.parameters())


def test_ratio_is_float32_in_bfloat16_models() -> None:
    assert random_head("mean_linear").to(torch.bfloat16)(torch.randn(2, 4, 6).bfloat16()).ratio.dtype == torch.float32


@pytest.mark.parametrize("head_type", HEAD_TYPES)
def test_saved_and_loaded_alone(head_type: str, tmp_path: Path) -> None:
    head, block = random_head(head_type), torch.randn(2, 4, 6)
    head.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "adaflash_length_head"
    for loaded in (LengthHeadModel.from_pretrained(tmp_path), AutoModel.from_pretrained(tmp_path)):
        assert type(loaded) is LengthHeadModel
        torch.testing.assert_close(loaded(block).ratio, head(block).ratio, rtol=0, atol=0)


def test_a_head_taken_out_of_a_drafter_is_the_same_head(tmp_path: Path) -> None:
    drafter = tiny_drafter(length_head_config={"bottleneck_size": 5})
    noise, context = random_block(drafter.config)
    hidden = drafter(noise, context).last_hidden_state
    drafter.length_head.save_pretrained(tmp_path / "head")
    assert set(load_file(tmp_path / "head" / "model.safetensors")) == {
        "down.weight",
        "down.bias",
        "out.weight",
        "out.bias",
    }
    alone = LengthHeadModel.from_pretrained(tmp_path / "head")
    torch.testing.assert_close(alone(hidden).ratio, drafter.length_head(hidden).ratio, rtol=0, atol=0)


def test_wrong_width_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"shape \(2, 4, 7\); expected \[batch_size, block_size, 6\]"):
        random_head("mean_linear")(torch.randn(2, 4, 7))


def test_weights_of_another_head_type_are_refused(tmp_path: Path) -> None:
    random_head("mean_last_residual").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "head_type": "mean_linear"}))
    with pytest.raises(DrafterCheckpointError, match="2 tensors have no place"):
        LengthHeadModel.from_pretrained(tmp_path)
