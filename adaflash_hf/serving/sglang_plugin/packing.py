"""Rows of a rectangle of blocks laid one after the other, as many of each block as are verified, and back again."""

from __future__ import annotations

import torch


__all__ = ["pack_rows", "packed_places", "unpack_rows"]


def packed_places(verify_lengths: torch.Tensor, block_size: int, num_rows: int) -> torch.Tensor:
    """
    Which row of the rectangle each packed row is.

    Args:
        verify_lengths (`torch.Tensor` of shape `(num_requests,)`): Rows of each block, the first ones.
        block_size (`int`): Rows of a block in the rectangle.
        num_rows (`int`): Packed rows: the sum of the lengths, or more where a CUDA graph wants a round number.

    Returns:
        `torch.Tensor` of shape `(num_rows,)`: int64; -1 for the rows after the sum.
    """
    ends = verify_lengths.long().cumsum(0)
    places = torch.arange(num_rows, device=ends.device)
    request = torch.searchsorted(ends, places, right=True).clamp(max=len(ends) - 1)
    within = places - ends[request] + verify_lengths.long()[request]
    return torch.where(places < ends[-1], request * block_size + within, -1)


def pack_rows(rectangle: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """
    Args:
        rectangle (`torch.Tensor` of shape `(num_requests * block_size,)`): A number per row.
        places (`torch.Tensor` of shape `(num_rows,)`): See [`packed_places`].

    Returns:
        `torch.Tensor` of shape `(num_rows,)`: The numbers of the packed rows; 0 where there is none.
    """
    return torch.where(places < 0, 0, rectangle[places.clamp(min=0)])


def unpack_rows(packed: torch.Tensor, places: torch.Tensor, num_rows: int) -> torch.Tensor:
    """
    Args:
        packed (`torch.Tensor` of shape `(at least len(places), width)`): Results of the packed rows.
        places (`torch.Tensor` of shape `(n,)`): See [`packed_places`].
        num_rows (`int`): Rows of the rectangle.

    Returns:
        `torch.Tensor` of shape `(num_rows, width)`: The rectangle; zeros in rows that were not computed.
    """
    # The row after the last one takes what belongs nowhere.
    rectangle = packed.new_zeros(num_rows + 1, packed.shape[1])
    rectangle.index_copy_(0, torch.where(places < 0, num_rows, places), packed[: len(places)])
    return rectangle[:num_rows]
