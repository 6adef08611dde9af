"""Linear layers whose weights are laid out for a handful of rows, on CPUs.

Verification multiplies two to sixteen rows by every weight of the target. On a CPU without bfloat16 matrix
instructions, the matrix library behind PyTorch's float32 `nn.Linear` rearranges the weight on each call with more than
one row: on two AVX2 cores a step of SmolLM2-135M took 62 ms for one row, 93 ms for two and 105 ms for eight. With
weights rearranged once by oneDNN it took 53, 62 and 73 ms. That doubles the memory of the weights, so it is the user's
choice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..errors import MissingDependencyError


__all__ = ["PrepackedLinear", "can_prepack", "prepack_linear_layers", "restore_linear_layers"]

# The layout is chosen for this many rows; it serves any number of them.
ROWS_HINT = 8


def _packing_operators() -> tuple[Any, ...] | None:
    """oneDNN's operators in this build of PyTorch: rearrange a weight, multiply by it."""
    if not torch.backends.mkldnn.is_available():
        return None
    operators = torch.ops.mkldnn
    names = ("_reorder_linear_weight", "_linear_pointwise")
    return tuple(getattr(operators, name) for name in names) if all(hasattr(operators, n) for n in names) else None


def can_prepack(module: nn.Module) -> bool:
    """Whether a module is a plain float32 linear layer on the CPU."""
    if type(module) not in (nn.Linear, PrepackedLinear):
        return False
    weight = module.weight
    return weight.device.type == "cpu" and weight.dtype == torch.float32


class PrepackedLinear(nn.Linear):
    """`nn.Linear` that keeps a rearranged copy of its weight for inference.

    The parameter itself is untouched: saving, training and moving the module work as before. The copy is renewed when
    the weight has been replaced or changed in place.
    """

    def _packed(self) -> torch.Tensor:
        stamp = (self.weight.data_ptr(), self.weight._version)
        cached = self.__dict__.get("_packed_weight")
        if cached is None or cached[0] != stamp:
            operators = _packing_operators()
            assert operators is not None
            cached = (stamp, operators[0](self.weight.detach(), ROWS_HINT))
            self.__dict__["_packed_weight"] = cached
        return cached[1]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() or not can_prepack(self) or input.dtype != torch.float32:
            return super().forward(input)
        rows = input.reshape(-1, input.shape[-1])
        output = torch.ops.mkldnn._linear_pointwise(rows, self._packed(), self.bias, "none", [], "")
        return output.view(*input.shape[:-1], -1)

    def __getstate__(self) -> dict[str, Any]:
        # oneDNN's layout can be neither pickled nor deep-copied
        return {name: value for name, value in self.__dict__.items() if name != "_packed_weight"}


def prepack_linear_layers(model: nn.Module) -> int:
    """Rearranges the weights of all float32 linear layers on the CPU for blocks of a few rows.

    Args:
        model (`nn.Module`): A target or a drafter. Changed in place; layers of other kinds are left alone.

    Returns:
        `int`: Number of layers rearranged; 0 on an accelerator or in another dtype.

    Raises:
        MissingDependencyError: If this build of PyTorch has no oneDNN.
    """
    layers = [module for module in model.modules() if can_prepack(module)]
    if layers and _packing_operators() is None:
        raise MissingDependencyError(
            f"PyTorch {torch.__version__} was built without oneDNN, which `prepack_linear_layers` needs. Leave the "
            "call out, or install a standard CPU build of PyTorch."
        )
    for layer in layers:
        layer.__class__ = PrepackedLinear
        layer._packed()  # type: ignore[operator]
    return len(layers)


def restore_linear_layers(model: nn.Module) -> None:
    """Turns prepacked layers back into plain ones and frees the rearranged copies."""
    for module in model.modules():
        if isinstance(module, PrepackedLinear):
            module.__dict__.pop("_packed_weight", None)
            object.__setattr__(module, "__class__", nn.Linear)
