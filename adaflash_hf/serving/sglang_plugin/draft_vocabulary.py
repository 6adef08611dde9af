"""The target's LM head cut to the tokens that the drafter drafts."""

from __future__ import annotations

from typing import Any

import torch


__all__ = ["VocabularyDraftSampler", "why_whole_vocabulary"]


class VocabularyDraftSampler:
    """
    The likeliest token of each drafted row, among a draft vocabulary.

    SGLang calls it on rows, and inside the CUDA graph of the drafter on whole blocks; there its buffers keep their
    addresses.

    Args:
        token_ids (`torch.Tensor` of shape `(n,)`): The draft vocabulary.
        lm_head_weight (`torch.Tensor` of shape `(vocab_size, hidden_size)`): The target's.
        block_size (`int`): Rows of a block, the anchor included.
    """

    def __init__(self, token_ids: torch.Tensor, lm_head_weight: torch.Tensor, block_size: int):
        self.token_ids = token_ids
        self.block_size = block_size
        self._rows = torch.empty(
            len(token_ids), lm_head_weight.shape[1], dtype=lm_head_weight.dtype, device=lm_head_weight.device
        )
        self.out = self._rows.new_empty(0, dtype=torch.int64)
        self.renew(lm_head_weight)

    def reserve(self, max_requests: int) -> None:
        """Makes `out` large enough for the drafts of so many requests; to be called before graphs are captured."""
        self.out = self._rows.new_zeros(max_requests * (self.block_size - 1), dtype=torch.int64)

    def renew(self, lm_head_weight: torch.Tensor) -> None:
        """Takes the rows again, in place, after an update of the drafter's list or of the target."""
        torch.index_select(lm_head_weight.detach(), 0, self.token_ids.detach(), out=self._rows)

    def argmax(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """
        Args:
            hidden_states (`torch.Tensor` of shape `(num_rows, hidden_size)`): The drafter's, after its final norm.

        Returns:
            `torch.Tensor` of shape `(num_rows,)`: Token ids of the target.
        """
        logits = torch.matmul(hidden_states.to(self._rows.dtype), self._rows.T)
        return self.token_ids[logits.argmax(dim=-1)]

    def __call__(self, hidden_states: torch.Tensor, input_ids: torch.Tensor | None = None) -> None:
        """
        Inside the graph: leaves the drafts of all blocks in `out`.

        Args:
            hidden_states (`torch.Tensor` of shape `(num_requests * block_size, hidden_size)`): Anchors' rows included.
            input_ids (`torch.Tensor`, *optional*): What SGLang passes to every sampler; not used.
        """
        width = hidden_states.shape[-1]
        rows = hidden_states.view(-1, self.block_size, width)[:, 1:].reshape(-1, width)
        self.out[: len(rows)].copy_(self.argmax(rows))


def why_whole_vocabulary(token_ids: torch.Tensor | None, lm_head: Any, num_ranks: int) -> str | None:
    """
    Why drafts are taken from the whole vocabulary after all, which costs time and not one token.

    Args:
        token_ids (`torch.Tensor`, *optional*): The draft vocabulary.
        lm_head (`nn.Module`): SGLang's.
        num_ranks (`int`): Ranks that share the head's rows.

    Returns:
        `str`, *optional*: The reason; None if the draft vocabulary is used.
    """
    weight = getattr(lm_head, "weight", None)
    if token_ids is None:
        return "the drafter has no draft vocabulary"
    if num_ranks > 1:
        return f"the rows of the target's LM head are split among {num_ranks} ranks"
    if weight is None or not weight.dtype.is_floating_point or weight.dtype.itemsize < 2:
        return "the target's LM head is quantised"
    if bool((token_ids < 0).any()) or int(token_ids.max()) >= weight.shape[0]:
        return f"it has tokens beyond the {weight.shape[0]} rows of the target's LM head"
    return None
