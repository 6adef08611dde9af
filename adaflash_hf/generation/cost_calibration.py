"""Measures what a target step and a draft cost, as a function of rows and requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


__all__ = ["RoundBench"]


class RoundBench(Protocol):
    """
    Runs single steps of the models on scratch state, so that they can be timed.

    Attributes:
        is_packed (`bool`): Whether a target step sees the sum of the verify lengths, or a rectangle of the longest.
        max_requests (`int`): Most requests that can ever be active at once.
        longest_verify_length (`int`): Rows of a whole block, the anchor included.
    """

    is_packed: bool
    max_requests: int
    longest_verify_length: int

    def fingerprint(self) -> dict[str, str]:
        """What the costs depend on: target, drafter, device, dtype, threads, versions. Names the cached table."""

    def run_target(self, verify_lengths: Sequence[int]) -> None:
        """Projects the drafts of these lengths and verifies them, one length per request; rolled back, waited for."""

    def run_draft(self, num_requests: int) -> None:
        """Drafts whole blocks up to their hidden states, and waits for them."""
