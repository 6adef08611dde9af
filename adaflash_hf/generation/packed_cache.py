"""Keys and values of many requests, each in its own rows, for forward passes that carry rows of several at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from transformers.cache_utils import Cache

from ..errors import InvalidInputError
from .packed_plan import GroupPlan, Segment, plan_group
from .packed_storage import LayerGroup
from .visibility import Visibility


__all__ = ["PackedCache", "PackedStep"]

# Room of the smallest arena, in tokens. Flash attention's paged kernels want pages of 256.
SMALLEST_ROOM = {"cpu": 64}
SMALLEST_ROOM_OF_ACCELERATORS = 256


class PackedStep:
    """One forward pass: whose rows it brings, and what each group of layers does with them.

    Attributes:
        cache (`PackedCache`): The cache.
        segments (`list[Segment]`): Rows per slot, in packed order.
        num_attended (`int`): Layers that have attended so far.
        mask_layer (`int`): The layer whose mask a model asked about last.
    """

    def __init__(self, cache: PackedCache, segments: list[Segment]):
        self.cache = cache
        self.segments = segments
        self.num_attended = 0
        self.mask_layer = 0
        self._plans: dict[int, GroupPlan] = {}

    def plan(self, layer: int) -> GroupPlan:
        """The plan of the group that a layer belongs to."""
        index = self.cache.group_of_layer[layer]
        plan = self._plans.get(index)
        if plan is None:
            group = self.cache.groups[index]
            key_bytes = self.cache.bytes_of_layer(layer)
            plan = self._plans[index] = plan_group(group, self.segments, self.cache.device_type, key_bytes)
        return plan


class PackedCache(Cache):
    """A cache whose rows belong to requests ("slots"), read by the attention of [`packed_attention`].

    Args:
        visibilities (`Sequence[Visibility]`): Which keys a row sees, for each layer.
        device_type (`str`): `"cpu"` or the accelerator that the model runs on.
        layer_bytes_per_token (`int`): Estimate, used until the first forward pass has shown it.
    """

    def __init__(self, visibilities: Sequence[Visibility], device_type: str = "cpu", layer_bytes_per_token: int = 0):
        super().__init__(layers=[])
        self.device_type = device_type
        self._visibilities = list(visibilities)
        room = SMALLEST_ROOM.get(device_type, SMALLEST_ROOM_OF_ACCELERATORS)
        rules = list(dict.fromkeys(self._visibilities))
        self.group_of_layer = [rules.index(visibility) for visibility in self._visibilities]
        self.groups = [
            LayerGroup(rule, [i for i, group in enumerate(self.group_of_layer) if group == index], room)
            for index, rule in enumerate(rules)
        ]
        self.step: PackedStep | None = None
        self.checked_groups: set[int] = set()  # whose rule was compared with the model's
        self.checked_layers: set[int] = set()  # that attend to what they cache
        self._estimate = layer_bytes_per_token
        self._lengths: dict[int, int] = {}
        self._next_slot = 0
        self._layer_bytes: dict[int, int] = {}

    # Slots

    def allocate(self, expected_tokens: int = 0) -> int:
        """Opens a slot. `expected_tokens`, if known, saves moving the slot as it grows."""
        slot = self._next_slot
        self._next_slot += 1
        self._lengths[slot] = 0
        for group in self.groups:
            group.open(slot, expected_tokens)
        return slot

    def release(self, slot: int) -> None:
        """Closes a slot; its memory is used again or given back."""
        self._check_open(slot)
        for group in self.groups:
            group.close(slot, self._lengths)
        del self._lengths[slot]

    def length(self, slot: int) -> int:
        """Tokens that a slot holds."""
        self._check_open(slot)
        return self._lengths[slot]

    def truncate(self, slot: int, length: int) -> None:
        """Forgets the tokens of a slot beyond the first `length`.

        Raises:
            InvalidInputError: If the slot is shorter, or a layer with a sliding window has dropped what the next
                token would see. Going back by the rows of the last forward pass is always possible.
        """
        current = self.length(slot)
        if not 0 <= length <= current:
            raise InvalidInputError(
                f"`length` is {length}, but slot {slot} holds {current} tokens; pass a number from 0 to {current}."
            )
        if not self.can_truncate(slot, length):
            windows = sorted({group.visibility.window for group in self.groups if group.visibility.window is not None})
            raise InvalidInputError(
                f"Slot {slot} cannot go back from {current} to `length` = {length} tokens: layers with a window of "
                f"{' or '.join(map(str, windows))} do not hold what the next token would see. Release the slot and "
                "run the tokens again."
            )
        self._lengths[slot] = length

    def can_truncate(self, slot: int, length: int) -> bool:
        """Whether all layers still hold what a token behind the first `length` sees."""
        windows = [(group.visibility.window, group.places[slot].start) for group in self.groups]
        return all(window is None or start <= max(0, length - window + 1) for window, start in windows)

    def _check_open(self, slot: int) -> None:
        if slot not in self._lengths:
            raise InvalidInputError(f"`slot` is {slot}, which is not open; open are {sorted(self._lengths)}.")

    @property
    def num_slots(self) -> int:
        """Open slots."""
        return len(self._lengths)

    # One forward pass

    def begin(
        self, slots: Sequence[int], counts: Sequence[int], context_counts: Sequence[int] | None = None
    ) -> PackedStep:
        """Announces the next forward pass; [`finish`] or [`abandon`] ends it.

        Args:
            slots (`Sequence[int]`): Whose rows it brings, in packed order; a slot appears once.
            counts (`Sequence[int]`): Rows of each, which have queries, keys and values.
            context_counts (`Sequence[int]`, *optional*):
                Rows of each that have keys and values only. They are packed ahead of all rows with queries.

        Returns:
            `PackedStep`: What the attention needs to know.
        """
        for slot in slots:
            self._check_open(slot)
        contexts = [0] * len(slots) if context_counts is None else context_counts
        if len(set(slots)) < len(slots) or not len(slots) == len(counts) == len(contexts):
            raise InvalidInputError(
                f"`slots` is {list(slots)} with counts {list(counts)} and {list(contexts)}; pass different slots and "
                "as many counts."
            )
        segments = [
            Segment(slot, self._lengths[slot], context, rows)
            for slot, context, rows in zip(slots, contexts, counts, strict=True)
        ]
        for group in self.groups:
            for segment in segments:
                group.reserve(segment.slot, segment.context + segment.rows, self._lengths)
        self.step = PackedStep(self, segments)
        return self.step

    def finish(self, keep_rows: bool = True) -> None:
        """Ends a forward pass: its context rows, and with `keep_rows` its other rows, now belong to their slots."""
        assert self.step is not None
        for segment in self.step.segments:
            self._lengths[segment.slot] = segment.end if keep_rows else segment.first
        self.step = None

    def abandon(self) -> None:
        """Ends a forward pass that failed: slots are as long as before."""
        self.step = None

    @torch.compiler.disable
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores the new states of a layer.

        Args:
            key_states, value_states (`torch.Tensor` of shape `(1, num_heads, num_rows, head_dim)`): All packed rows.
            layer_idx (`int`): The layer.

        Returns:
            `tuple`: The states as they came; the attention reads the rest from the buffers.
        """
        assert self.step is not None, "`begin` announces each forward pass"
        keys, values = key_states[0].transpose(0, 1), value_states[0].transpose(0, 1)
        rows = keys.shape[0]
        flat_keys, flat_values = keys.reshape(rows, -1), values.reshape(rows, -1)
        device = keys.device
        if layer_idx not in self._layer_bytes:
            self._layer_bytes[layer_idx] = (flat_keys.nbytes + flat_values.nbytes) // rows
        for write in self.step.plan(layer_idx).writes:
            buffer = write.arena.buffer(layer_idx, keys, values)
            target = write.target.on(device)
            if write.source is None:
                buffer.flat_keys.index_copy_(0, target, flat_keys)
                buffer.flat_values.index_copy_(0, target, flat_values)
            else:
                source = write.source.on(device)
                buffer.flat_keys.index_copy_(0, target, flat_keys.index_select(0, source))
                buffer.flat_values.index_copy_(0, target, flat_values.index_select(0, source))
        return key_states, value_states

    # Memory

    def bytes_of_layer(self, layer: int) -> int:
        """Bytes of one token's key and value."""
        return self._layer_bytes.get(layer, self._estimate)

    @property
    def memory_bytes(self) -> int:
        """Bytes of all buffers, used or not."""
        return sum(group.memory_bytes for group in self.groups)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one more token takes in the layers that keep everything."""
        groups = [group for group in self.groups if group.visibility.window is None]
        return sum(self.bytes_of_layer(layer) for group in groups for layer in group.layers)

    def bytes_for(self, num_tokens: int) -> int:
        """Bytes that a slot of `num_tokens` tokens takes, rounding included."""
        return sum(
            group.room_of_slot(num_tokens) * sum(self.bytes_of_layer(layer) for layer in group.layers)
            for group in self.groups
        )

    def forecast_bytes(self, lengths: Mapping[int, int], new_rows: int, opening: Sequence[int] = ()) -> int:
        """Bytes that the buffers will take, at most, while slots grow and others are opened.

        Buffers grow before those that slots leave are given back, so this may be more than is taken in the end.

        Args:
            lengths (`Mapping[int, int]`): Tokens of slots after they have grown.
            new_rows (`int`): By how many rows each grows at most in one forward pass.
            opening (`Sequence[int]`): Tokens of each slot to be opened.
        """
        return sum(
            group.forecast_tokens(lengths, new_rows, opening)
            * sum(self.bytes_of_layer(layer) for layer in group.layers)
            for group in self.groups
        )

    # What models and transformers' mask functions ask a cache. Positions are always given, so that the answers decide
    # nothing; only the layer asked about is of interest.

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Zero: rows of one forward pass have different lengths before them."""
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Zero, as `get_seq_length`."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """The new rows alone; the packed attention takes no mask."""
        if self.step is not None:
            self.step.mask_layer = layer_idx
        return query_length, 0

    @property
    def is_compileable(self) -> bool:
        """Buffers grow."""
        return False

    @property
    def is_sliding(self) -> list[bool]:
        """Per layer, whether it has a window."""
        return [visibility.window is not None for visibility in self._visibilities]

    @property
    def is_linear(self) -> list[bool]:
        """Per layer; none is."""
        return [False] * len(self._visibilities)

    @property
    def is_dummy(self) -> list[bool]:
        """Per layer; none is."""
        return [False] * len(self._visibilities)

    def __len__(self) -> int:
        return len(self._visibilities)

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError("A `PackedCache` holds requests of their own lengths; use its slots.")

    crop = reorder_cache = batch_repeat_interleave = batch_select_indices = reset = _refuse
