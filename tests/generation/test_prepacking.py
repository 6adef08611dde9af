"""Prepacked linear layers compute what `nn.Linear` computes, and stay up to date with their weights."""

import copy

import pytest
import torch
from torch import nn

from adaflash_hf.generation.prepacking import PrepackedLinear, prepack_linear_layers, restore_linear_layers


# float32 sums of 40 products in another order
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


@pytest.fixture
def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 24), nn.ReLU(), nn.Linear(24, 40, bias=False))


@pytest.mark.parametrize("shape", [(1, 40), (8, 40), (3, 1, 40), (2, 7, 40)])
def test_same_values_as_linear(layers, shape):
    inputs = torch.randn(*shape)
    with torch.no_grad():
        expected = layers(inputs)
        assert prepack_linear_layers(layers) == 2
        actual = layers(inputs)
    assert actual.shape == expected.shape
    torch.testing.assert_close(actual, expected, **TOLERANCE)


def test_follows_weight_updates(layers):
    prepack_linear_layers(layers)
    inputs = torch.randn(4, 40)
    with torch.no_grad():
        before = layers(inputs)
        layers[0].weight.mul_(2.0)
        layers[0].bias.mul_(2.0)
        torch.testing.assert_close(layers(inputs), 2 * before, **TOLERANCE)
        layers[2].weight = nn.Parameter(torch.zeros_like(layers[2].weight))
        assert layers(inputs).abs().max() == 0


def test_gradients_still_flow(layers):
    prepack_linear_layers(layers)
    layers(torch.randn(4, 40)).sum().backward()
    assert layers[0].weight.grad is not None


def test_other_dtypes_are_left_alone(layers):
    assert prepack_linear_layers(layers.bfloat16()) == 0
    assert type(layers[0]) is nn.Linear


def test_converted_after_packing_still_works(layers):
    prepack_linear_layers(layers)
    layers.bfloat16()
    with torch.no_grad():
        assert layers(torch.randn(2, 40, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_copies_and_state_dict(layers):
    names = list(layers.state_dict())
    prepack_linear_layers(layers)
    assert list(layers.state_dict()) == names
    inputs = torch.randn(4, 40)
    with torch.no_grad():
        torch.testing.assert_close(copy.deepcopy(layers)(inputs), layers(inputs))


def test_restore(layers):
    prepack_linear_layers(layers)
    assert type(layers[0]) is PrepackedLinear
    restore_linear_layers(layers)
    assert type(layers[0]) is nn.Linear
    assert "_packed_weight" not in layers[0].__dict__
