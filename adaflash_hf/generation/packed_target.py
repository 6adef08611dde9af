"""Runs the target on rows of many requests at once, packed into one sequence without padding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.modeling_utils import PreTrainedModel

from ..errors import InvalidInputError, UnsupportedGenerationError
from .compatibility import unwrap_model
from .context_features import concatenate_context_features, forward_with_features
from .packed_model import PackedModel
from .packed_plan import flat_ranges
from .target_runner import cache_argument_name
from .visibility import Visibility


__all__ = ["LogitsFor", "PackedOutputs", "PackedTarget"]

LogitsFor = Literal["all", "last", "none"]


@dataclass
class PackedOutputs:
    """What one packed forward returns, in the order in which the slots were given.

    Attributes:
        logits (`torch.Tensor` of shape `(sum(logits_counts), vocab_size)`): Rows that were asked for, in order.
        logits_counts (`list[int]`): Logit rows of each slot: all its rows, its last one, or none.
        features (`torch.Tensor` of shape `(num_rows, len(layer_ids) * hidden_size)`, *optional*):
            Outputs of the layers asked for, side by side; what [`PackedDrafter.extend`] takes.
        counts (`list[int]`): Rows of each slot.
    """

    logits: torch.Tensor
    logits_counts: list[int]
    features: torch.Tensor | None
    counts: list[int]

    def logits_by_slot(self) -> list[torch.Tensor]:
        """Views of `logits`, one per slot, of shape `(logits_counts[i], vocab_size)`."""
        return list(self.logits.split(self.logits_counts))

    def features_by_slot(self) -> list[torch.Tensor]:
        """Views of `features`, one per slot, of shape `(counts[i], len(layer_ids) * hidden_size)`."""
        if self.features is None:
            raise InvalidInputError("`features` is None; pass the drafter's `target_layer_ids` as `layer_ids`.")
        return list(self.features.split(self.counts))


class PackedTarget(PackedModel):
    """The target and the cache of all requests that it serves.

    Layers with a sliding window keep about twice their window per request; all others keep everything.

    Args:
        model (`PreTrainedModel`): The target, possibly wrapped by PEFT; not changed between forward passes.

    Raises:
        UnsupportedGenerationError: If the target is not a decoder of full and sliding-window attention layers only.
    """

    def __init__(self, model: PreTrainedModel):
        base = unwrap_model(model)
        config = base.config.get_text_config(decoder=True)
        visibilities = _layer_visibilities(base, config)
        _check_target(model, base)
        super().__init__(model, visibilities, config)
        self._cache_name = cache_argument_name(base)
        self._keeps_logits = "logits_to_keep" in self._forward_arguments
        # The last layer of a model on several devices may sit on any; indices on the CPU suit all of them.
        is_spread = len(set(getattr(base, "hf_device_map", {}).values())) > 1
        self._index_device = torch.device("cpu") if is_spread else self.device
        self._has_checked_layers = False

    def length(self, slot: int) -> int:
        """Tokens of the slot that are in the cache; the next row given has this position."""
        return self.cache.length(slot)

    def truncate(self, slot: int, length: int) -> None:
        """Rolls a slot back to its first `length` tokens: by the rows of its last forward pass, or further if no layer
        has dropped what the next token would see."""
        self.cache.truncate(slot, length)

    def can_truncate(self, slot: int, length: int) -> bool:
        """Whether [`truncate`] would go through."""
        return self.cache.can_truncate(slot, length)

    @torch.no_grad()
    def forward(
        self,
        slots: Sequence[int],
        token_ids: Sequence[Sequence[int] | torch.Tensor] | torch.Tensor,
        counts: Sequence[int] | None = None,
        layer_ids: Sequence[int] = (),
        logits_for: LogitsFor | Sequence[LogitsFor] = "all",
    ) -> PackedOutputs:
        """Runs new rows of some slots on top of what their slots hold, and keeps all of them in the cache.

        Decode steps (one row), verify steps and prefill chunks may be mixed. [`truncate`] what was rejected.

        Args:
            slots (`Sequence[int]`): Different slots.
            token_ids (`Sequence` or `torch.Tensor` of shape `(num_rows,)`):
                The new ids of each slot; or all of them packed, with `counts`.
            counts (`Sequence[int]`, *optional*): Rows of each slot when `token_ids` is packed.
            layer_ids (`Sequence[int]`): Zero-based layers whose outputs are wanted as `features`.
            logits_for (`str` or `Sequence[str]`):
                Which rows go through the vocabulary projection, `"all"`, `"last"` or `"none"`; one value for all
                slots or one for each.

        Returns:
            `PackedOutputs`: Logits and features.
        """
        ids, counts = self._pack_ids(token_ids, counts)
        logits_counts = _logits_counts(logits_for, counts)
        _check_rows(slots, ids, counts)
        positions = flat_ranges([self.cache.length(slot) for slot in slots], counts)
        kwargs: dict[str, Any] = {self._cache_name: self.cache, "use_cache": True}
        kept_rows = _kept_rows(counts, logits_counts) if self._keeps_logits else None
        if kept_rows is not None:
            # One row at least: not every layer, quantised ones for example, multiplies nothing.
            kwargs["logits_to_keep"] = torch.tensor(kept_rows or [0], device=self._index_device)
        with self._step(slots, counts) as step:
            position_ids = torch.tensor(positions, device=self.device)[None]
            outputs = forward_with_features(
                self.model, layer_ids, input_ids=ids[None], position_ids=position_ids, **kwargs
            )
            self._check_layers(step.num_attended)
        logits = self._select_logits(outputs.logits[0], counts, logits_counts)
        features = None
        if layer_ids:
            states, device = outputs.hidden_states, outputs.logits.device
            features = concatenate_context_features(states, layer_ids, self.num_layers, device=device)[0]
        return PackedOutputs(logits, logits_counts, features, counts)

    def _pack_ids(
        self, token_ids: Sequence[Sequence[int] | torch.Tensor] | torch.Tensor, counts: Sequence[int] | None
    ) -> tuple[torch.Tensor, list[int]]:
        """All ids in one row, and how many each slot has."""
        if isinstance(token_ids, torch.Tensor):
            if counts is None:
                raise InvalidInputError("`counts` is None although `token_ids` is packed; pass the rows of each slot.")
            return token_ids.to(self.device), list(counts)
        counts = [len(ids) for ids in token_ids]
        if any(isinstance(ids, torch.Tensor) for ids in token_ids):
            pieces = [torch.as_tensor(ids, dtype=torch.long, device=self.device) for ids in token_ids]
            return torch.cat(pieces), counts
        flat = [token for ids in token_ids for token in ids]
        return torch.tensor(flat, dtype=torch.long, device=self.device), counts

    def _select_logits(self, logits: torch.Tensor, counts: list[int], logits_counts: list[int]) -> torch.Tensor:
        """The rows asked for, where the model itself gave more."""
        wanted = sum(logits_counts)
        if logits.shape[0] == wanted:
            return logits
        if wanted == 0:
            return logits[:0]
        rows = _kept_rows(counts, logits_counts)
        return logits.index_select(0, torch.tensor(rows, device=logits.device))

    def _check_layers(self, num_attended: int) -> None:
        """After the first forward: every layer must have come to the packed attention."""
        if not self._has_checked_layers and num_attended != self.num_layers:
            raise UnsupportedGenerationError(
                f"Only {num_attended} of the target's {self.num_layers} layers attend through transformers' attention "
                f"interface. Use `generate()` with this {type(self.base_model).__name__}."
            )
        self._has_checked_layers = True


def _check_target(model: Any, base: Any) -> None:
    """Refuses what can be seen to be impossible before any work is done."""
    name = type(base).__name__
    if base.config.is_encoder_decoder or base.get_output_embeddings() is None:
        raise UnsupportedGenerationError(
            f"The target is a {name}; packed batches need a decoder-only model with an LM head. Use `generate()`."
        )
    if not getattr(base, "_supports_attention_backend", False):
        raise UnsupportedGenerationError(
            f"The target, a {name}, does not use transformers' attention interface, through which packed batches "
            "attend. Use `generate()` with this target."
        )
    peft_config = getattr(model, "active_peft_config", None)
    if getattr(peft_config, "is_prompt_learning", False):
        raise UnsupportedGenerationError(
            f"The target's PEFT adapter is a {type(peft_config).__name__}, which puts tokens of its own in front of "
            "each sequence; packed batches know no such tokens. Use `generate()` with this target."
        )


def _layer_visibilities(base: PreTrainedModel, config: PreTrainedConfig) -> list[Visibility]:
    """Reads the kinds of layers off the cache that transformers itself would make."""
    layers = DynamicCache(config=config).layers
    visibilities = []
    for index, layer in enumerate(layers):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) or _is_chunked(config, index):
            raise UnsupportedGenerationError(
                f"Layer {index} of the target, a {type(base).__name__}, keeps its state in a {type(layer).__name__}; "
                "packed batches serve decoders of full and sliding-window attention only. Use `generate()` with this "
                "target."
            )
        visibilities.append(Visibility(True, getattr(layer, "sliding_window", None)))
    return visibilities


def _is_chunked(config: PreTrainedConfig, layer: int) -> bool:
    """Chunked attention shares its cache layer with sliding windows but sees other keys."""
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        return getattr(config, "attention_chunk_size", None) is not None
    return layer_types[layer] == "chunked_attention"


def _check_rows(slots: Sequence[int], ids: torch.Tensor, counts: Sequence[int]) -> None:
    if ids.ndim != 1 or sum(counts) != ids.shape[0] or not counts or min(counts) < 1:
        raise InvalidInputError(
            f"`token_ids` holds ids of shape {tuple(ids.shape)} for `counts` = {list(counts)}; pass at least one id "
            "for each slot, and as many ids as the counts add up to."
        )
    if len(slots) != len(counts):
        raise InvalidInputError(f"There are {len(slots)} `slots` but ids for {len(counts)}; pass as many.")


def _logits_counts(logits_for: LogitsFor | Sequence[LogitsFor], counts: Sequence[int]) -> list[int]:
    wanted: Iterable[str] = [logits_for] * len(counts) if isinstance(logits_for, str) else logits_for
    rows = {"all": lambda count: count, "last": lambda count: 1, "none": lambda count: 0}
    try:
        return [rows[which](count) for which, count in zip(wanted, counts, strict=True)]
    except (KeyError, ValueError):
        raise InvalidInputError(
            f"`logits_for` is {logits_for!r}; expected 'all', 'last' or 'none', for all or for each of the "
            f"{len(counts)} slots."
        ) from None


def _kept_rows(counts: Sequence[int], logits_counts: Sequence[int]) -> list[int] | None:
    """Packed rows whose logits are wanted; None if all of them are."""
    if sum(logits_counts) == sum(counts):
        return None
    ends = accumulate(counts)
    return flat_ranges([end - wanted for end, wanted in zip(ends, logits_counts, strict=True)], logits_counts)
