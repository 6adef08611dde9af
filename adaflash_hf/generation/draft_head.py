"""The projection from a drafter's hidden states to drafted tokens: the target's LM head, or its rows of a draft
vocabulary.

A small drafter spends about half of its time on the LM head. A draft vocabulary of the tokens that are ever likely
leaves most of those rows out; tokens outside of it are then never drafted, and still generated as the target likes.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import nn

from ..errors import DrafterCompatibilityError
from ..modeling_dflash_drafter import DFlashDrafterModel
from .acceptance import greedy_tokens
from .prepacking import PrepackedLinear, version_of


__all__ = ["DraftHead", "LikeliestTokens", "has_plain_rows", "select_head_rows"]

# Per LM head of a target: the draft vocabulary it was cut to, and the cut.
_CUTS: weakref.WeakKeyDictionary[nn.Module, tuple[tuple[Any, ...], nn.Linear]] = weakref.WeakKeyDictionary()

# Rows whose logits are held at once where nothing but the likeliest token of each is asked for.
_ROWS_AT_ONCE = 128


class LikeliestTokens(NamedTuple):
    """
    What a drafter thinks likeliest in each of some slots.

    Attributes:
        token_ids (`torch.Tensor`): Tokens.
        probabilities (`torch.Tensor` of the same shape, float32):
            What the drafter gives them, among the tokens it drafts; 0 where it overflowed.
    """

    token_ids: torch.Tensor
    probabilities: torch.Tensor


class DraftHead:
    """Turns hidden states of a drafter into tokens.

    Args:
        drafter (`DFlashDrafterModel`): Says which tokens it drafts and how logits are scaled.
        output_embeddings (`nn.Module`): The target's LM head.

    Raises:
        DrafterCompatibilityError: If the draft vocabulary has tokens that the target lacks.
    """

    def __init__(self, drafter: DFlashDrafterModel, output_embeddings: nn.Module):
        self._drafter = drafter
        self._head = output_embeddings
        self._token_ids: torch.Tensor | None = None
        # A quantised, offloaded or adapted head has no rows to take; the whole one does as well, only slower.
        if drafter.draft_token_ids is not None and has_plain_rows(output_embeddings):
            self._token_ids = drafter.draft_token_ids.to(output_embeddings.weight.device)
            self._head = _cut_head(output_embeddings, drafter.draft_token_ids)
            self._vocab_size = output_embeddings.weight.shape[0]

    def argmax(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """
        Args:
            hidden_states (`torch.Tensor` of shape `(..., hidden_size)`): Rows of the drafter's last hidden states.

        Returns:
            `torch.Tensor` of shape `(...)`: The likeliest token of each row.
        """
        places = greedy_tokens(self._drafter.compute_logits(hidden_states, self._head))
        return places if self._token_ids is None else self._token_ids[places]

    def likeliest(self, hidden_states: torch.Tensor) -> LikeliestTokens:
        """
        Args:
            hidden_states (`torch.Tensor` of shape `(..., hidden_size)`): Rows of the drafter's last hidden states.

        Returns:
            `LikeliestTokens` of shape `(...)`: Those of [`argmax`], and how sure the drafter is of them.
        """
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        if not rows.numel():  # nothing but anchors
            nothing = torch.zeros(hidden_states.shape[:-1], device=rows.device)
            return LikeliestTokens(nothing.long(), nothing)
        parts = [self._likeliest(part) for part in rows.split(_ROWS_AT_ONCE)]
        places, probabilities = (torch.cat(part).view(hidden_states.shape[:-1]) for part in zip(*parts, strict=True))
        return LikeliestTokens(places if self._token_ids is None else self._token_ids[places], probabilities)

    def _likeliest(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self._drafter.compute_logits(rows, self._head)
        places = greedy_tokens(logits)
        # The largest entry of the softmax, without the softmax.
        logits = logits.float()
        log_probs = logits.gather(-1, places[:, None])[:, 0] - logits.logsumexp(dim=-1)
        return places, log_probs.exp().nan_to_num(nan=0.0)

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """
        Args:
            hidden_states (`torch.Tensor` of shape `(..., hidden_size)`): Rows of the drafter's last hidden states.

        Returns:
            `torch.Tensor` of shape `(..., vocab_size)`: Of all tokens; minus infinity for those never drafted.
        """
        logits = self._drafter.compute_logits(hidden_states, self._head)
        if self._token_ids is None:
            return logits
        everything = logits.new_full((*logits.shape[:-1], self._vocab_size), float("-inf"))
        return everything.index_copy_(-1, self._token_ids, logits)


def has_plain_rows(output_embeddings: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether an LM head is an ordinary linear layer whose weight is at hand, so that rows can be taken from it."""
    # Subclasses store or compute something else than rows of a weight.
    if not isinstance(output_embeddings, nn.Linear) or type(output_embeddings) not in (nn.Linear, PrepackedLinear):
        return False
    weight = output_embeddings.weight
    return not weight.is_meta and weight.dtype.is_floating_point and weight.dtype.itemsize > 1


def select_head_rows(output_embeddings: nn.Linear, token_ids: torch.Tensor) -> nn.Linear:
    """
    Args:
        output_embeddings (`nn.Linear`): An LM head, see [`has_plain_rows`].
        token_ids (`torch.Tensor` of shape `(n,)`): Rows to take.

    Returns:
        `nn.Linear`: A copy with these rows alone, without gradient.
    """
    weight, bias = output_embeddings.weight, output_embeddings.bias
    # The skeleton takes its tensors from below; on "meta" it costs nothing to make.
    head = type(output_embeddings)(weight.shape[1], len(token_ids), bias=bias is not None, device="meta")
    ids = token_ids.to(weight.device)
    head.weight = nn.Parameter(weight.detach()[ids].contiguous(), requires_grad=False)
    if bias is not None:
        head.bias = nn.Parameter(bias.detach()[ids].contiguous(), requires_grad=False)
    return head


def _cut_head(output_embeddings: nn.Linear, token_ids: torch.Tensor) -> nn.Linear:
    """The rows of a draft vocabulary, cut once as long as head and vocabulary stay what they are."""
    weight = output_embeddings.weight
    stamp = (type(output_embeddings), *(part for t in (weight, token_ids) for part in (t.data_ptr(), version_of(t))))
    kept = _CUTS.get(output_embeddings)
    if kept is not None and kept[0] == stamp:
        return kept[1]
    smallest, largest = (int(bound) for bound in token_ids.aminmax())
    if smallest < 0 or largest >= weight.shape[0] or bool((token_ids.diff() <= 0).any()):
        raise DrafterCompatibilityError(
            f"`draft_token_ids` of the drafter runs from {smallest} to {largest}; expected ascending ids below the "
            f"{weight.shape[0]} rows of the target's LM head. Use the drafter's own target, or call "
            "`drafter.set_draft_vocabulary(None)` to draft from all tokens."
        )
    head = select_head_rows(output_embeddings, token_ids)
    if isinstance(head, PrepackedLinear):
        head.allows_rounding = True  # what is drafted need not be exact
    _CUTS[output_embeddings] = (stamp, head)
    return head
