"""Keys and values of many requests, each in its own rows, for forward passes that carry rows of several at once."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedConfig
from transformers.cache_utils import Cache


__all__ = ["PackedCache"]


class PackedCache(Cache):
    """A cache whose rows belong to requests ("slots"), read and written by the `"adaflash_packed"` attention.

    Args:
        config (`PreTrainedConfig`): Configuration of the decoder.
    """

    def __init__(self, config: PreTrainedConfig):
        raise NotImplementedError

    def allocate(self, expected_tokens: int = 0) -> int:
        """Opens a slot. `expected_tokens`, if known, saves moving the slot as it grows."""
        raise NotImplementedError

    def release(self, slot: int) -> None:
        """Closes a slot; its memory is used again or given back."""
        raise NotImplementedError

    def length(self, slot: int) -> int:
        """Tokens that a slot holds."""
        raise NotImplementedError

    def truncate(self, slot: int, length: int) -> None:
        """Forgets the tokens of a slot beyond the first `length`."""
        raise NotImplementedError

    def begin(self, slots: Sequence[int], counts: Sequence[int], context_counts: Sequence[int] | None = None) -> None:
        """Announces the next forward pass.

        Args:
            slots (`Sequence[int]`): Whose rows it brings, in packed order; a slot appears once.
            counts (`Sequence[int]`): Rows of each, which have queries, keys and values.
            context_counts (`Sequence[int]`, *optional*):
                Rows of each that have keys and values only. They are packed ahead of all rows with queries.
        """
        raise NotImplementedError

    @property
    def num_slots(self) -> int:
        """Open slots."""
        raise NotImplementedError

    @property
    def memory_bytes(self) -> int:
        """Bytes of all buffers, used or not."""
        raise NotImplementedError

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one more token of a slot takes in layers that keep everything."""
        raise NotImplementedError

    def bytes_for(self, num_tokens: int) -> int:
        """Bytes that a slot of `num_tokens` tokens takes, rounding included."""
        raise NotImplementedError
