"""Which drafted tokens the target accepts: token equality, or rejection sampling."""

from __future__ import annotations

from collections.abc import Sequence

import torch


__all__ = ["count_leading_matches", "rejection_sample", "sample_tokens"]


def count_leading_matches(candidate_ids: Sequence[int], target_ids: Sequence[int]) -> int:
    """Counts the leading drafts that equal the target's own choice.

    Because the token kept is always the target's own choice (its argmax, or its own sample), this rule never changes
    the output, whatever deterministic way the drafts were chosen. The ids are needed on the host anyway, so this is
    plain Python: a handful of tensor operations fewer per round.

    Args:
        candidate_ids (`Sequence[int]`): Drafted tokens of one sequence.
        target_ids (`Sequence[int]`): The target's choice at each position, at least as many.

    Returns:
        `int`: Number of accepted drafts, bonus excluded.
    """
    for position, candidate in enumerate(candidate_ids):
        if candidate != target_ids[position]:
            return position
    return len(candidate_ids)


def sample_tokens(probs: torch.Tensor) -> torch.Tensor:
    """Draws one token from each distribution.

    Args:
        probs (`torch.Tensor` of shape `(..., vocab_size)`): Probabilities.

    Returns:
        `torch.Tensor` of shape `(...)`: Drawn token ids.
    """
    flat = probs.reshape(-1, probs.shape[-1])
    return torch.multinomial(flat, num_samples=1).reshape(probs.shape[:-1])


def rejection_sample(
    candidate_ids: torch.Tensor, candidate_probs: torch.Tensor, target_probs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Speculative rejection sampling (Leviathan et al. 2023, Chen et al. 2023), one chain per row.

    Draft i is kept with probability `min(1, p_i(x_i) / q_i(x_i))`; at the first rejection a token is drawn from
    `max(p_i - q_i, 0)` normalised; if all are kept, a bonus token is drawn from the last `p`.

    Args:
        candidate_ids (`torch.Tensor` of shape `(batch_size, num_drafts)`): Tokens drawn from `candidate_probs`.
        candidate_probs (`torch.Tensor` of shape `(batch_size, num_drafts, vocab_size)`): The drafter's q.
        target_probs (`torch.Tensor` of shape `(batch_size, num_drafts + 1, vocab_size)`): The target's p.

    Returns:
        `tuple`: Number of accepted drafts `(batch_size,)`, and the token that follows them `(batch_size,)`.
    """
    num_drafts = candidate_ids.shape[1]
    p = target_probs[:, :num_drafts].gather(-1, candidate_ids[..., None])[..., 0]  # (batch_size, num_drafts)
    q = candidate_probs.gather(-1, candidate_ids[..., None])[..., 0]
    # u * q < p rather than u < p / q: no division by a q that underflowed
    accepted = torch.rand_like(p) * q < p
    num_matches = accepted.long().cumprod(dim=-1).sum(dim=-1)

    rows = torch.arange(candidate_ids.shape[0], device=candidate_ids.device)
    p_next = target_probs[rows, num_matches]  # (batch_size, vocab_size)
    padded_q = torch.nn.functional.pad(candidate_probs, (0, 0, 0, 1))  # after the last draft nothing was proposed
    residual = (p_next - padded_q[rows, num_matches]).clamp(min=0)
    # A residual of zero mass means p == q up to rounding, where a rejection has probability zero: p itself is exact.
    mass = residual.sum(dim=-1, keepdim=True)
    next_probs = torch.where(mass > 0, residual, p_next)
    return num_matches, sample_tokens(next_probs)
