"""Additive attention masks for packed batches, only where a row must not see a key that its call reads."""

from __future__ import annotations

import torch

from .visibility import Visibility


__all__ = ["BandMasks", "padded_mask", "rows_per_band"]

# Queries of a long run are answered this many at a time: the mask stays small, and no key after them is read. On CPUs
# 64 were fastest of 32 to 512 at a prefill of 512 tokens; accelerators would rather have fewer calls.
ROWS_PER_BAND = {"cpu": 64}
ROWS_PER_BAND_OF_ACCELERATORS = 512
# From here on the mask is kept small at the price of more calls.
MANY_KEYS = 16384
ROWS_PER_BAND_OF_MANY_KEYS = 16


def rows_per_band(device_type: str, num_keys: int) -> int:
    """How many queries of one request are answered by one call.

    Args:
        device_type (`str`): `"cpu"` or an accelerator.
        num_keys (`int`): Keys that the last of them reads.
    """
    if num_keys > MANY_KEYS:
        return ROWS_PER_BAND_OF_MANY_KEYS
    return ROWS_PER_BAND.get(device_type, ROWS_PER_BAND_OF_ACCELERATORS)


def _as_bias(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What is added to the scores; boolean masks would be turned into this by every layer again."""
    bias = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return bias.masked_fill_(~visible, torch.finfo(dtype).min)


class BandMasks:
    """Masks for queries that are the last tokens of the keys: all of them are corners of one band.

    Args:
        visibility (`Visibility`): Which keys a row sees.
    """

    def __init__(self, visibility: Visibility):
        self.visibility = visibility
        self._bands: dict[tuple[int, torch.dtype, torch.device, int], torch.Tensor] = {}

    def corner(
        self, rows: int, keys: int, dtype: torch.dtype, device: torch.device, group_size: int
    ) -> torch.Tensor | None:
        """
        Args:
            rows (`int`): Queries, the last ones of the keys.
            keys (`int`): Keys; the first is the first that any of the queries sees.
            dtype (`torch.dtype`), device (`torch.device`): Of the mask.
            group_size (`int`): Query heads per key head; each row appears that many times in a row.

        Returns:
            `torch.Tensor` of shape `(1, 1, rows * group_size, keys)`, *optional*: None if nothing is hidden.
        """
        if rows == 1 or self.visibility.is_unlimited:
            return None
        height = rows
        if self.visibility.is_causal:
            height = max(rows, rows_per_band(device.type, keys))
        key = (height, dtype, device, group_size)
        band = self._bands.get(key)
        if band is None or band.shape[1] < keys:
            # Queries and keys counted back from the last one.
            query = torch.arange(1 - height, 1, device=device)[:, None]
            width = max(256, 1 << (keys - 1).bit_length())
            visible = self.visibility.mask(query, torch.arange(1 - width, 1, device=device)[None])
            band = _as_bias(visible, dtype).repeat_interleave(group_size, dim=0)
            self._bands[key] = band
        return band[None, None, (height - rows) * group_size :, band.shape[1] - keys :]


def padded_mask(
    visibility: Visibility,
    spans: list[tuple[int, int]],
    rows: int,
    keys: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    group_size: int,
) -> torch.Tensor | None:
    """The mask of a call for several requests.

    Args:
        visibility (`Visibility`): Which keys a row sees.
        spans (`list[tuple[int, int]]`): First and last query of each request, counted in its own tokens.
        rows (`int`): Queries per request; where a request has fewer, its last one is repeated.
        keys (`tuple[int, int]`): Tokens of each request that are read, the second exclusive.
        dtype (`torch.dtype`), device (`torch.device`): Of the mask.
        group_size (`int`): Query heads per key head; each row appears that many times in a row.

    Returns:
        `torch.Tensor` of shape `(num_requests, 1, rows * group_size or 1, keys)`, *optional*: None if nothing is
        hidden.
    """
    is_uniform = all(span == spans[0] for span in spans) and spans[0][1] == keys[1] - 1
    if is_uniform and (rows == 1 or visibility.is_unlimited):
        return None
    bounds = torch.tensor(spans, device=device)
    last = bounds[:, 1, None, None]  # (num_requests, 1, 1)
    key = torch.arange(*keys, device=device)
    visible = key <= last
    if not visibility.is_unlimited:
        query = torch.minimum(bounds[:, 0, None, None] + torch.arange(rows, device=device)[:, None], last)
        visible = visible & visibility.mask(query, key)  # (num_requests, rows, keys)
    bias = _as_bias(visible, dtype)
    if bias.shape[1] > 1:
        bias = bias.repeat_interleave(group_size, dim=1)
    return bias[:, None]
