"""Dtypes of a checkpoint's tensors: what it is in, and what writing it in another one costs."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...errors import DrafterExportError


__all__ = ["cast_tensors", "dtype_name"]


def dtype_name(tensors: Mapping[str, torch.Tensor]) -> str:
    """The dtype that most of the floating-point elements have, such as `"bfloat16"`."""
    elements: dict[torch.dtype, int] = {}
    for tensor in tensors.values():
        if tensor.is_floating_point():
            elements[tensor.dtype] = elements.get(tensor.dtype, 0) + tensor.numel()
    return str(max(elements, key=lambda dtype: elements[dtype])).removeprefix("torch.")


def cast_tensors(
    tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """
    Casts floating-point tensors.

    Args:
        tensors (`Mapping[str, torch.Tensor]`): What to cast; not modified.
        dtype (`torch.dtype`, *optional*): None leaves them as they are.

    Returns:
        `tuple`: the tensors, contiguous, and a note if a value was rounded.

    Raises:
        DrafterExportError: A value does not fit the dtype.
    """
    result: dict[str, torch.Tensor] = {}
    rounded = 0
    for name, tensor in tensors.items():
        cast = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
        if cast.dtype != tensor.dtype:
            if torch.isfinite(tensor).all() and not torch.isfinite(cast).all():
                raise DrafterExportError(
                    f"`{name}` has values that are too large for {dtype}. Choose another --dtype."
                )
            rounded += not torch.equal(cast.to(tensor.dtype), tensor)
        result[name] = cast.contiguous()
    if not rounded:
        return result, []
    return result, [f"{rounded} of {len(tensors)} tensors were rounded from {dtype_name(tensors)} to {dtype}."]
