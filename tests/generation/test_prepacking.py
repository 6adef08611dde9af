"""Prepacked linear layers compute what `nn.Linear` computes, and stay up to date with their weights."""

import copy
import pickle

import pytest
import torch
from tiny_models import tiny_target
from torch import nn

from adaflash_hf.generation.prepacking import (
    PrepackedLinear,
    can_prepack_half,
    can_prepack_natively,
    prepack_linear_layers,
    restore_linear_layers,
    unpacked_twin,
)


# float32 sums of 40 products in another order
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}
HALVES = [torch.bfloat16, torch.float16]
needs_native = pytest.mark.skipif(
    not can_prepack_natively(torch.bfloat16), reason="this processor, or build of PyTorch, emulates bfloat16"
)
needs_half = pytest.mark.skipif(not can_prepack_half(), reason="this build of PyTorch has no FBGEMM")


@pytest.fixture
def no_half_instructions(monkeypatch):
    """A processor like most: it emulates bfloat16 and float16."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True})


def bfloat16_values(layers: nn.Module) -> nn.Module:
    """As read from a bfloat16 checkpoint into float32."""
    for parameter in layers.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return layers


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


@pytest.mark.parametrize("rows", [1, 8, 300])
def test_autocast_chooses_the_dtype(rows):
    plain = nn.Linear(40, 24)
    layer = copy.deepcopy(plain)
    prepack_linear_layers(layer)
    inputs = torch.randn(rows, 40)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(layer(inputs), plain(inputs), rtol=0, atol=0)


def test_gradients_still_flow(layers):
    prepack_linear_layers(layers)
    layers(torch.randn(4, 40)).sum().backward()
    assert layers[0].weight.grad is not None


@pytest.mark.parametrize("dtype", HALVES)
def test_dtypes_with_instructions_that_onednn_does_not_take_are_left_alone(layers, dtype, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True, "amx_fp16": True})
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False, raising=False)
    assert prepack_linear_layers(layers.to(dtype)) == 0
    assert type(layers[0]) is nn.Linear


@needs_native
@pytest.mark.parametrize("shape", [(1, 40), (40,), (2, 7, 40), (0, 40), (300, 40)])
def test_bfloat16_with_instructions_keeps_its_dtype(layers, shape):
    layers.to(torch.bfloat16)
    inputs = torch.randn(*shape).bfloat16()
    with torch.no_grad():
        exact = nn.functional.linear(inputs.double(), layers[0].weight.double(), layers[0].bias.double())
        assert prepack_linear_layers(layers) == 2
        assert layers[0].layout == "full"
        actual = layers[0](inputs)
        # As where a head sees the last row of each sequence alone.
        strided = torch.randn(3, 4, 40).bfloat16()[:, -1:]
        torch.testing.assert_close(layers[0](strided), layers[0](strided.contiguous()), rtol=0, atol=0)
    assert actual.dtype == torch.bfloat16
    assert actual.shape == exact.shape
    # one rounding of the sum, in float32
    torch.testing.assert_close(actual, exact.bfloat16(), rtol=torch.finfo(torch.bfloat16).eps, atol=1e-6)


@needs_native
def test_follows_updates_in_its_own_dtype(layers):
    prepack_linear_layers(layers.to(torch.bfloat16))
    inputs = torch.randn(4, 40).bfloat16()
    with torch.no_grad():
        before = layers(inputs)
        layers[2].weight.mul_(2.0)
        assert torch.equal(layers(inputs), 2 * before)
        layers.float()
        assert layers(inputs.float()).dtype == torch.float32


@needs_half
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", [(1, 40), (40,), (2, 7, 40), (0, 40)])
def test_half_dtypes_are_summed_in_float32(layers, dtype, shape, no_half_instructions):
    layers.to(dtype)
    inputs = torch.randn(*shape).to(dtype)
    with torch.no_grad():
        exact = nn.functional.linear(inputs.double(), layers[0].weight.double(), layers[0].bias.double())
        native = layers[0](inputs)
        assert prepack_linear_layers(layers) == 2
        assert layers[0].layout == "half"
        actual = layers[0](inputs)
    assert actual.dtype == dtype
    assert actual.shape == native.shape
    # one rounding of the exact sum, where a native product may round more than once
    if inputs.numel() == 40:
        assert torch.equal(actual, native)  # one row stays with PyTorch
    else:
        torch.testing.assert_close(actual, exact.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)
    torch.testing.assert_close(actual, native, rtol=2 * torch.finfo(dtype).eps, atol=1e-3)


@pytest.mark.parametrize(
    ("rows", "threads", "is_native"), [(1, 1, True), (1, 2, False), (2, 1, False), (200, 2, True)]
)
def test_float32_rows_that_gain_nothing_stay_with_pytorch(layers, rows, threads, is_native, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    inputs, calls = torch.randn(rows, 40), []
    with torch.no_grad():
        native = layers[0](inputs)
        prepack_linear_layers(layers)
        assert layers[0].layout == "full"
        monkeypatch.setattr(
            nn.Linear, "forward", lambda self, x: calls.append(x) or nn.functional.linear(x, self.weight, self.bias)
        )
        torch.testing.assert_close(layers[0](inputs), native, **TOLERANCE)
    assert bool(calls) == is_native


@needs_half
def test_float32_weights_that_float16_holds_take_half_the_bytes(layers):
    bfloat16_values(layers)
    inputs = torch.randn(5, 40)
    with torch.no_grad():
        expected = layers(inputs)
        prepack_linear_layers(layers)
        assert [layer.layout for layer in (layers[0], layers[2])] == ["half", "half"]
        torch.testing.assert_close(layers(inputs), expected, **TOLERANCE)


@needs_half
@pytest.mark.parametrize("magnitude", [2.0**-40, 2.0**40])
def test_weights_outside_of_the_range_of_float16_are_scaled(layers, magnitude):
    bfloat16_values(layers)[0].weight.data.mul_(magnitude)
    inputs = torch.randn(5, 40)
    with torch.no_grad():
        layers[0].bias.zero_()
        expected = layers[0](inputs)
        prepack_linear_layers(layers)
        assert layers[0].layout == "half"
        torch.testing.assert_close(layers[0](inputs) / magnitude, expected / magnitude, **TOLERANCE)


@needs_half
@pytest.mark.parametrize("damage", ["one bit", "infinite", "far apart"])
def test_float32_weights_that_float16_would_change_stay_float32(layers, damage):
    weight = bfloat16_values(layers)[0].weight.data
    weight[0, 0] = {"one bit": 1 + 2.0**-20, "infinite": float("inf"), "far apart": 2.0**100}[damage]
    if damage == "far apart":
        weight[0, 1:] = 0  # an output of its own, beside outputs that are much smaller
    inputs = torch.randn(2, 40)
    with torch.no_grad():
        expected = layers[0](inputs)
        prepack_linear_layers(layers)
        torch.testing.assert_close(layers[0](inputs), expected, **TOLERANCE)
    assert layers[0].layout == "full"


@needs_half
def test_rounding_is_for_those_who_allow_it(layers):
    inputs = torch.randn(6, 40)
    with torch.no_grad():
        exact = layers(inputs)
        prepack_linear_layers(layers)
        assert layers[0].layout == "full"
        prepack_linear_layers(layers, allow_rounding=True)
        restore_linear_layers(layers)
        prepack_linear_layers(layers, allow_rounding=True)
        assert layers[0].layout == "half"
        torch.testing.assert_close(layers(inputs), exact, rtol=2**-9, atol=2**-9)
        restore_linear_layers(layers)
        prepack_linear_layers(layers)
        assert layers[0].layout == "full"


@needs_half
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_follows_updates_of_every_layout(layers, dtype, no_half_instructions):
    bfloat16_values(layers).to(dtype)
    prepack_linear_layers(layers)
    inputs = torch.randn(4, 40).to(dtype)
    with torch.no_grad():
        before = layers[2](inputs[:, :24])
        layers[2].weight.mul_(2.0)
        assert torch.equal(layers[2](inputs[:, :24]), 2 * before)
        layers[2].weight.zero_()
        assert not layers[2](inputs[:, :24]).any()


@needs_half
def test_logits_of_a_bfloat16_target(no_half_instructions):
    target = tiny_target("llama").bfloat16()
    ids = torch.arange(1, 25)[None]
    with torch.no_grad():
        native = target(ids).logits.float()
        assert prepack_linear_layers(target) > 0
        packed = target(ids).logits.float()
    exact = tiny_target("llama").to(torch.bfloat16).float()(ids).logits
    assert (packed - native).abs().max() <= 4 * torch.finfo(torch.bfloat16).eps * native.abs().max()
    # as near to the same weights in float32 as native products are
    assert (packed - exact).abs().mean() <= 1.2 * (native - exact).abs().mean()


def test_converted_after_packing_still_works(layers):
    prepack_linear_layers(layers)
    layers.bfloat16()
    with torch.no_grad():
        assert layers(torch.randn(2, 40, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize("half", [False, True])
def test_copies_and_state_dict(layers, half):
    if half:
        bfloat16_values(layers)
    names = list(layers.state_dict())
    prepack_linear_layers(layers)
    assert list(layers.state_dict()) == names
    inputs = torch.randn(4, 40)
    with torch.no_grad():
        torch.testing.assert_close(copy.deepcopy(layers)(inputs), layers(inputs))
        torch.testing.assert_close(pickle.loads(pickle.dumps(layers))(inputs), layers(inputs))


def test_restore(layers):
    prepack_linear_layers(layers)
    assert type(layers[0]) is PrepackedLinear
    restore_linear_layers(layers)
    assert type(layers[0]) is nn.Linear
    assert "_packed_weight" not in layers[0].__dict__


def test_the_twin_is_plain_and_shares_all_tensors():
    target = tiny_target("llama")
    prepack_linear_layers(target)
    twin = unpacked_twin(target)
    assert not any(isinstance(module, PrepackedLinear) for module in twin.modules())
    assert any(isinstance(module, PrepackedLinear) for module in target.modules())
    for (name, tensor), (_, original) in zip(twin.named_parameters(), target.named_parameters(), strict=True):
        assert tensor is original, name
    input_ids = torch.arange(5)[None]
    with torch.no_grad():
        torch.testing.assert_close(twin(input_ids).logits, target(input_ids).logits, rtol=1e-4, atol=1e-5)
