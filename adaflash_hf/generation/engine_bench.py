"""Single target steps and drafts of any size on scratch requests, for policies that weigh costs."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Sequence

import torch
import transformers
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from .acceptance import greedy_tokens
from .compatibility import unwrap_model
from .draft_head import LikeliestTokens
from .packed_drafter import PackedDrafter
from .packed_target import PackedTarget
from .prepacking import PrepackedLinear


__all__ = ["EngineRoundBench", "cost_fingerprint"]

# Contexts of the scratch requests, in turn. Those of real ones differ too, and then attention pads and masks.
CONTEXTS = (128, 96, 192, 160)
# Tokens of each request that are new to the drafter when it drafts, as after a round with some drafts accepted.
NEW_TOKENS = 2


def _describe(model: PreTrainedModel) -> str:
    """Name and shape of a model: equal for two that cost the same."""
    config = unwrap_model(model).config
    shape = json.dumps(config.to_dict(), sort_keys=True, default=str)
    digest = hashlib.blake2b(shape.encode(), digest_size=8).hexdigest()
    layers = sorted({_kind(module) for module in model.modules()})
    kinds = hashlib.blake2b(",".join(layers).encode(), digest_size=4).hexdigest()
    return f"{type(unwrap_model(model)).__name__}-{digest}-{kinds}"


def _kind(module: nn.Module) -> str:
    """What a layer's speed depends on besides its shape: whether it is prepacked and how, quantised, adapted."""
    layout = f":{module.layout}" if isinstance(module, PrepackedLinear) else ""
    return type(module).__name__ + layout


def cost_fingerprint(target: PreTrainedModel, drafter: PreTrainedModel, reads_likeliest: bool) -> dict[str, str]:
    """What the costs of an engine's rounds depend on.

    Args:
        target (`PreTrainedModel`): The target.
        drafter (`PreTrainedModel`): The drafter.
        reads_likeliest (`bool`): Whether all that is drafted is projected before a policy chooses, see [`RoundBench`].

    Returns:
        `dict[str, str]`: Names the table that costs are kept in.
    """
    base = unwrap_model(target)
    is_cuda = base.device.type == "cuda"
    return {
        "loop": "engine",
        "projected": "all that is drafted" if reads_likeliest else "what is verified",
        "target": _describe(target),
        "drafter": _describe(drafter),
        "dtype": str(base.dtype),
        "device": torch.cuda.get_device_name(base.device) if is_cuda else platform.processor() or platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


class EngineRoundBench:
    """A [`RoundBench`] for the engine's packed rounds, on caches of its own.

    Args:
        target (`PreTrainedModel`): The target.
        drafter (`PreTrainedModel`): The drafter.
        max_requests (`int`): Most requests that can ever be active at once.
        memory_limit_bytes (`int`, *optional*): Most bytes of the scratch caches.
    """

    is_packed = True

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: PreTrainedModel,
        max_requests: int,
        memory_limit_bytes: int | None = None,
    ):
        self.max_requests = max_requests
        self._models = target, drafter
        self._target = PackedTarget(target)
        self._drafter = PackedDrafter(drafter, target)
        self._memory_limit_bytes = memory_limit_bytes
        self.longest_verify_length = self._drafter.longest_verify_length
        self.can_cut_blocks = self._drafter.config.is_block_causal
        self.drafter = self._drafter.base_drafter
        self.reads_likeliest = False
        self._slots: list[tuple[int, int]] = []
        self._new_features: torch.Tensor | None = None
        self._hidden_states: torch.Tensor | None = None
        self._likeliest: LikeliestTokens | None = None
        self._layer_ids = self._drafter.config.target_layer_ids
        self._token_id = min(self._target.base_model.get_input_embeddings().weight.shape[0] - 1, 5)

    def fingerprint(self) -> dict[str, str]:
        """What the costs depend on; names the cached table."""
        return cost_fingerprint(*self._models, self.reads_likeliest)

    def _open(self, num_requests: int) -> None:
        """Prefills scratch requests until there are enough."""
        while len(self._slots) < num_requests:
            length = self._context_tokens(CONTEXTS[len(self._slots) % len(CONTEXTS)])
            # Side by side, as requests of a like size are.
            room = self._context_tokens(max(CONTEXTS)) + 64
            slot, drafter_slot = self._target.allocate(room), self._drafter.allocate(room)
            outputs = self._target.forward(
                [slot], [[self._token_id] * length], layer_ids=self._layer_ids, logits_for="none"
            )
            assert outputs.features is not None
            self._drafter.extend(drafter_slot, outputs.features)
            self._new_features = outputs.features[:NEW_TOKENS].clone()
            self._slots.append((slot, drafter_slot))

    def _context_tokens(self, length: int) -> int:
        """This many, or fewer where memory is limited."""
        if self._memory_limit_bytes is not None:
            bound = self._memory_limit_bytes / (2 * max(self.max_requests, 1))
            while length > 16 and self._target.bytes_for(length) + self._drafter.bytes_for(length) > bound:
                length //= 2
        return length

    def run_target(self, verify_lengths: Sequence[int]) -> None:
        """Verifies drafts of these lengths, one per request, and projects them before if that is still to be done;
        rolled back, waited for."""
        count = len(verify_lengths)
        if self._hidden_states is None or self._hidden_states.shape[0] < count:
            self.run_draft(count)
        assert self._hidden_states is not None
        likeliest = None if self._likeliest is None else LikeliestTokens(*(part[:count] for part in self._likeliest))
        drafts = self._drafter.project(self._hidden_states[:count], verify_lengths, likeliest=likeliest)
        slots = [slot for slot, _ in self._slots[:count]]
        anchor = drafts.token_ids.new_tensor([self._token_id])
        ids = [torch.cat([anchor, piece]) for piece in drafts.token_ids.split(drafts.counts)]
        lengths = [self._target.length(slot) for slot in slots]
        outputs = self._target.forward(
            slots, [piece.to(self._target.device) for piece in ids], layer_ids=self._layer_ids
        )
        greedy_tokens(outputs.logits).tolist()
        for slot, length in zip(slots, lengths, strict=True):
            self._target.truncate(slot, length)

    def run_draft(self, num_requests: int, longest: int | None = None) -> None:
        """Drafts for verify lengths up to `longest` or whole blocks, up to the hidden states unless `reads_likeliest`,
        and waits for them."""
        self._open(num_requests)
        slots = [drafter_slot for _, drafter_slot in self._slots[:num_requests]]
        assert self._new_features is not None
        lengths = [self._drafter.length(slot) for slot in slots]
        for slot in slots:
            self._drafter.extend(slot, self._new_features)
        hidden_states = self._drafter.draft(slots, [self._token_id] * num_requests, longest)
        likeliest = self._drafter.likeliest(hidden_states) if self.reads_likeliest else None
        hidden_states[0, 0, 0].item()
        if likeliest is not None:
            likeliest.probabilities.tolist()
        for slot, length in zip(slots, lengths, strict=True):
            self._drafter.cache.truncate(slot, length)
        if self._drafter.longest_in(hidden_states) == self.longest_verify_length:
            self._hidden_states, self._likeliest = hidden_states, likeliest

    def close(self) -> None:
        """Frees the scratch state."""
        for slot, drafter_slot in self._slots:
            self._target.release(slot)
            self._drafter.release(drafter_slot)
        self._slots.clear()
        self._hidden_states = self._likeliest = None
