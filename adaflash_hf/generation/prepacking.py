"""Linear layers whose weights are laid out for a handful of rows, on CPUs.

Verification multiplies two to sixteen rows by every weight of the target. PyTorch's own `nn.Linear` rearranges a
float32 weight on each call with more than one row, and where the processor has no instructions for bfloat16 or float16
it emulates them row by row. Where it has them, a rearranged weight is still read and multiplied twice as fast. Here a
weight is rearranged once, in one of two layouts:

- **half**: FBGEMM's float16 weights, which are widened to float32 on their way into the multiplication: half the bytes
  of float32, and activations, products and sums in float32. Used where float16 holds the weight without loss, after a
  scale by a power of two if need be. That is every float16 and bfloat16 weight, and a float32 one that came from such
  a checkpoint.
- **full**: oneDNN's weights in their own dtype, for all other float32 layers, and for bfloat16 where x86 processors
  multiply it (AMX, AVX512-BF16).

Milliseconds of 30 layers of 576 x 1536 on one AVX2 core (float32 `nn.Linear`, bfloat16 `nn.Linear`, full, half): one
row 10, 7, 10, 4; four rows 18, 26, 14, 5; eight rows 19, 47, 15, 8; sixteen rows 27, 91, 23, 12. And of
SmolLM2-135M's layers in bfloat16 on two cores with AVX512-BF16 (`nn.Linear`, full): one row 14, 7; eight rows 15, 9;
64 rows 34, 23; 1024 rows 370, 247.

A copy costs memory: as much as the weight itself, or half of it for a float32 weight in the half layout. While tokens
are generated it is made unasked where there is plenty (`automatic_prepacking.py`). One row of bfloat16 or float16 in
the half layout stays with PyTorch all the same: in a whole model, with casts before and after every layer, its own was
faster (67 ms of SmolLM2-135M's step against 90). So does one float32 row on one thread (62 ms against 67; on two
threads 64 against 56).
"""

from __future__ import annotations

import copy
import itertools
import math
import weakref
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from ..cpu_arithmetic import multiplies_natively
from ..errors import MissingDependencyError


if TYPE_CHECKING:
    from transformers import PreTrainedModel


__all__ = [
    "USERS",
    "PrepackedLinear",
    "can_prepack",
    "can_prepack_full",
    "can_prepack_half",
    "can_prepack_natively",
    "has_prepacked_layers",
    "is_kept_plain",
    "is_rearranged",
    "prepack_linear_layers",
    "restore_linear_layers",
    "settle_prepacking",
    "unpacked_twin",
    "version_of",
]

# The full layout is chosen for this many rows; it serves any number of them.
ROWS_HINT = 8
# SmolLM2-135M over 128 and 256 float32 rows, in ms: 359 and 640 with PyTorch's own layers, 340 and 700 with these.
_MOST_ROWS = 192
# Largest part of the largest weight of an output that the half layout may lose of any weight, which only very small
# ones do: less than float32 loses in the sum, and where the result has sixteen bits, a thousandth of what rounding it
# loses.
_LOSS_LIMIT = 2.0**-30
_LOSS_LIMIT_OF_HALVES = 2.0**-20
_LARGEST_HALF = 65504.0


def can_prepack_half() -> bool:
    """Whether this build of PyTorch, on this processor, multiplies float32 rows by float16 weights (FBGEMM, x86)."""
    # FBGEMM is listed on processors with AVX2 only; other engines round the products to float16.
    is_offered = "fbgemm" in torch.backends.quantized.supported_engines
    names = ("linear_prepack_fp16", "linear_dynamic_fp16")
    has_operators = all(hasattr(torch.ops.quantized, name) for name in names)
    return is_offered and has_operators and torch.backends.quantized.engine in ("x86", "fbgemm")


def _full_operators() -> tuple[Any, Any] | None:
    """oneDNN's operators in this build of PyTorch: rearrange a weight, multiply by it."""
    if not torch.backends.mkldnn.is_available():
        return None
    operators = torch.ops.mkldnn
    names = ("_reorder_linear_weight", "_linear_pointwise")
    if not all(hasattr(operators, name) for name in names):
        return None
    # Of the one overload that there is: asking for it once is cheaper than letting each call look for it.
    return operators._reorder_linear_weight.default, operators._linear_pointwise.default


def can_prepack_full() -> bool:
    """Whether this build of PyTorch has oneDNN's operators for rearranged float32 weights."""
    return _full_operators() is not None


def can_prepack_natively(dtype: torch.dtype) -> bool:
    """
    Whether oneDNN's operators take weights of a dtype below float32, and the processor multiplies it.

    Args:
        dtype (`torch.dtype`): Of the weights.
    """
    # The operators refuse bfloat16 without AVX512, and emulate it on most processors with it.
    is_taken = dtype == torch.bfloat16 and can_prepack_full() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return is_taken and multiplies_natively(dtype)


def can_prepack(module: nn.Module) -> bool:
    """
    Whether a module is a plain linear layer on the CPU that rearranging makes faster: in float32; in bfloat16 or
    float16 where the processor has no instructions for them and [`can_prepack_half`]; where it has,
    [`can_prepack_natively`].
    """
    if type(module) not in (nn.Linear, PrepackedLinear):
        return False
    weight = module.weight
    if weight.device.type != "cpu":
        return False
    if weight.dtype not in (torch.bfloat16, torch.float16):
        return weight.dtype == torch.float32
    return can_prepack_natively(weight.dtype) if multiplies_natively(weight.dtype) else can_prepack_half()


class _Copy:
    """A rearranged weight, and which weight it is of."""

    def __init__(self, weight: torch.Tensor, multiply: Multiply | None):
        self.multiply = multiply
        # Held as well, so that no other weight comes to lie at its address.
        self._weight, self._version = weight.detach(), version_of(weight)

    def is_of(self, weight: torch.Tensor) -> bool:
        """Whether this is the weight, unchanged since."""
        return weight.data_ptr() == self._weight.data_ptr() and version_of(weight) == self._version


def version_of(tensor: torch.Tensor) -> int:
    """Grows with each change in place, of which tensors made under inference mode keep no count."""
    return 0 if tensor.is_inference() else tensor._version


# Beside the modules, which can be copied and pickled as ever: neither layout can be copied, nor oneDNN's pickled.
_COPIES: weakref.WeakKeyDictionary[nn.Module, _Copy] = weakref.WeakKeyDictionary()
# Layers that the user wants as they are.
_KEPT_PLAIN: weakref.WeakSet[nn.Module] = weakref.WeakSet()
# Attribute of layers that are prepacked for as long as somebody generates: how many do.
USERS = "_adaflash_users"


class PrepackedLinear(nn.Linear):
    """`nn.Linear` that keeps a rearranged copy of its weight for inference.

    The parameter itself is untouched: saving, training and moving the module work as before. The copy is renewed when
    the weight has been replaced or changed in place. Results have the dtype of the input; they are summed in float32.
    """

    allows_rounding = False

    def _packed(self) -> Multiply | None:
        """Multiplies by the rearranged weight; None where it is not one to rearrange, as after a move to a GPU."""
        weight = self.weight
        copy = _COPIES.get(self)
        if copy is None or not copy.is_of(weight):
            copy = _Copy(weight, _rearrange(weight.detach(), self.allows_rounding) if can_prepack(self) else None)
            _COPIES[self] = copy
        return copy.multiply

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() or input.dtype != self.weight.dtype or torch.compiler.is_compiling():
            return super().forward(input)
        if torch.is_autocast_enabled(input.device.type):
            return super().forward(input)  # the dtype of the result is autocast's to choose
        multiply = self._packed()
        if multiply is None or _suits_pytorch(input, multiply):
            return super().forward(input)
        if input.dim() < 2:
            return self.forward(input[None])[0]
        if multiply.dtype == input.dtype:
            return multiply(input, self.bias)
        bias = None if self.bias is None else self.bias.float()
        return multiply(input.float(), bias).to(input.dtype)

    @property
    def layout(self) -> Literal["half", "full"] | None:
        """How the weight is laid out; None if it is not, as after a move to a GPU."""
        multiply = self._packed()
        return None if multiply is None else "half" if isinstance(multiply, _HalfWeight) else "full"


class _FullWeight:
    """A weight in oneDNN's layout. `dtype` is that of the rows it multiplies."""

    def __init__(self, weight: torch.Tensor):
        operators = _full_operators()
        if operators is None:
            raise MissingDependencyError(
                f"PyTorch {torch.__version__} was built without oneDNN, which `prepack_linear_layers` needs. Leave "
                "the call out, or install a standard CPU build of PyTorch."
            )
        reorder, self._multiply = operators
        self._packed = reorder(weight, ROWS_HINT)
        self.dtype = weight.dtype

    def __call__(self, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return self._multiply(rows, self._packed, bias, "none", [], "")


class _HalfWeight:
    """A weight in FBGEMM's layout, times a power of two. `dtype` is that of the rows it multiplies."""

    dtype = torch.float32

    def __init__(self, weight: torch.Tensor, scale: float):
        scaled = (weight.float() * scale).contiguous()
        self._packed = torch.ops.quantized.linear_prepack_fp16(scaled, None)
        self._multiply = torch.ops.quantized.linear_dynamic_fp16.default
        self._inverse = 1 / scale

    def __call__(self, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        output = self._multiply(rows, self._packed)
        if self._inverse != 1:
            output.mul_(self._inverse)
        return output if bias is None else output.add_(bias)


# Takes rows `(..., in_features)` of its dtype, and the bias.
Multiply = _FullWeight | _HalfWeight


def _suits_pytorch(rows: torch.Tensor, multiply: Multiply) -> bool:
    """
    Whether PyTorch multiplies these rows better by itself: a single one of sixteen bits that would be cast before and
    after; a single one for which one thread reads a weight that is no smaller rearranged; and so many float32 rows
    that they pay for rearranging.
    """
    num_rows = rows.shape[:-1].numel()
    if rows.dtype != torch.float32:
        return num_rows == 1 and multiply.dtype != rows.dtype
    is_full = isinstance(multiply, _FullWeight)
    return num_rows > _MOST_ROWS or (num_rows == 1 and is_full and torch.get_num_threads() == 1)


def _rearrange(weight: torch.Tensor, allows_rounding: bool) -> Multiply:
    if can_prepack_natively(weight.dtype):
        return _FullWeight(weight)
    scale = _scale_for_half(weight, allows_rounding) if can_prepack_half() else None
    return _FullWeight(weight.float()) if scale is None else _HalfWeight(weight, scale)


def _scale_for_half(weight: torch.Tensor, allows_rounding: bool) -> float | None:
    """A power of two, 1 if possible, by which float16 may hold the weight; None if there is none."""
    largest = float(weight.abs().amax()) if weight.numel() else 0.0
    if largest == 0:
        return 1.0
    if not math.isfinite(largest):
        return None  # float16 has no place for it, and whoever looks for it shall find it in the result
    limit = _LOSS_LIMIT if weight.dtype == torch.float32 else _LOSS_LIMIT_OF_HALVES
    largest_scale = 2.0 ** math.floor(math.log2(_LARGEST_HALF / largest))
    for scale in (1.0, largest_scale):
        scaled = weight.float() * scale
        loss = (scaled.half().float() - scaled).abs().amax(dim=1)  # infinite where it does not fit
        if bool((loss <= limit * scaled.abs().amax(dim=1)).all()):
            return scale
    return largest_scale if allows_rounding else None


def prepack_linear_layers(model: nn.Module, *, allow_rounding: bool = False) -> int:
    """Rearranges the weights of a model's linear layers on the CPU for blocks of a few rows.

    In float32, in bfloat16, and in float16 on x86 processors without instructions for it, one row costs less and
    eight rows cost a fraction of what they did; see the head of this module for numbers, memory included.

    Args:
        model (`nn.Module`): A target or a drafter. Changed in place; layers of other kinds are left alone.
        allow_rounding (`bool`, defaults to `False`):
            Whether float32 weights may be rounded to float16, which takes half the time. For drafters: what they draft
            hardly changes, and what is generated not at all.

    Returns:
        `int`: Number of layers rearranged; 0 on an accelerator, and of dtypes that gain nothing.

    Raises:
        MissingDependencyError: If this build of PyTorch has no oneDNN, and the layers need it.
    """
    layers = [module for module in model.modules() if can_prepack(module)]
    for layer in layers:
        layer.__class__ = PrepackedLinear
        layer.__dict__.pop(USERS, None)
        _KEPT_PLAIN.discard(layer)
        if allow_rounding:
            layer.allows_rounding = True  # type: ignore[assignment]
        layer._packed()  # type: ignore[operator]
    return len(layers)


def restore_linear_layers(model: nn.Module) -> None:
    """
    Turns prepacked layers back into plain ones, frees the rearranged copies, and has `generate()` and engines make no
    new ones.

    Args:
        model (`nn.Module`): A target or a drafter. Changed in place.
    """
    for module in model.modules():
        if type(module) not in (nn.Linear, PrepackedLinear):
            continue
        _COPIES.pop(module, None)
        _KEPT_PLAIN.add(module)
        for name in (USERS, "allows_rounding"):
            module.__dict__.pop(name, None)
        object.__setattr__(module, "__class__", nn.Linear)


def settle_prepacking(model: nn.Module, is_wanted: bool, *, allow_rounding: bool = False) -> None:
    """
    [`prepack_linear_layers`] or [`restore_linear_layers`], as the user decided.

    Args:
        model (`nn.Module`): Changed in place.
        is_wanted (`bool`): The user's decision.
        allow_rounding (`bool`, defaults to `False`): For drafters; see [`prepack_linear_layers`].
    """
    if is_wanted:
        prepack_linear_layers(model, allow_rounding=allow_rounding)
    else:
        restore_linear_layers(model)  # or generating would rearrange its weights unasked


def has_prepacked_layers(model: nn.Module) -> bool:
    """Whether a model has layers that are prepacked now."""
    return any(isinstance(module, PrepackedLinear) for module in model.modules())


def is_kept_plain(module: nn.Module) -> bool:
    """Whether [`restore_linear_layers`] was the last that the user said of a layer."""
    return module in _KEPT_PLAIN


def is_rearranged(module: nn.Module) -> bool:
    """Whether there is a rearranged copy of a layer's weight, in use or kept for the next time."""
    return module in _COPIES


def unpacked_twin(model: PreTrainedModel) -> PreTrainedModel:
    """
    The same model with plain linear layers: what a user has who rearranged nothing, to compare with.

    Args:
        model (`PreTrainedModel`):
            Left as it is.

    Returns:
        `PreTrainedModel`: a copy of the modules that shares all tensors, so that it costs no memory
    """
    shared = {id(tensor): tensor for tensor in itertools.chain(model.parameters(), model.buffers())}
    twin = copy.deepcopy(model, shared)
    restore_linear_layers(twin)
    return twin
