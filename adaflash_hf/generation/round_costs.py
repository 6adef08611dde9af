"""What rounds cost here and now: a measured table, and what the rounds that were timed since say about it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .cost_table import CostCorrection, CostTable


__all__ = ["RoundCosts", "magnitude", "num_padded_rows"]


class RoundCosts:
    """
    Seconds of rounds with and without drafts.

    Args:
        table (`CostTable`): What was measured once.
    """

    def __init__(self, table: CostTable):
        self.table = table
        self._correction = CostCorrection()

    def plain_seconds(self, num_active: int) -> float:
        """
        Args:
            num_active (`int`): Requests of the round.

        Returns:
            `float`: Seconds of a round without drafts.
        """
        factor = self._correction.factor("plain", magnitude(num_active))
        return float(self.table.target_seconds(num_active, 1.0)) * factor

    def has_timed_plain(self, num_active: int) -> bool:
        """Whether a round without drafts of about so many requests was timed."""
        return self._correction.has_seen("plain", magnitude(num_active))

    def drafted_seconds(
        self,
        num_active: int,
        num_drafted: int,
        draft_length: int,
        is_packed: bool,
        longest: int | None = None,
        is_prefilling: bool = False,
    ) -> np.ndarray:
        """
        Args:
            num_active (`int`): Requests of the round.
            num_drafted (`int`): Requests that are drafted for.
            draft_length (`int`): Slots of a block that draft.
            is_packed (`bool`): Whether rows cost one by one.
            longest (`int`, *optional*): Verify length that blocks are cut to.
            is_prefilling (`bool`, defaults to `False`): Whether a prompt is read beside.

        Returns:
            `np.ndarray`: Seconds by the number of drafts that are verified, from none: in all if packed, else of each
            request. Padding comes on top.
        """
        drafts = np.arange(num_drafted * draft_length + 1) if is_packed else np.arange(draft_length + 1)
        mean_length = 1 + drafts / num_active if is_packed else 1.0 + drafts
        target_s = self.table.target_seconds(num_active, mean_length)
        if is_prefilling:
            # Beside a prompt, which is read in any case, no row comes cheap because few are there.
            target_s = np.maximum(target_s, target_s[0] + drafts * self.table.row_seconds)
        tabulated = self.table.draft_seconds(num_drafted, longest) + target_s
        # Only a handful of different corrections, so they are looked up by cell and spread.
        cells = np.round(mean_length).astype(int)
        factors = {
            cell: self._correction.factor("draft", magnitude(num_active), cell) for cell in np.unique(cells).tolist()
        }
        # One more row is never cheaper, whatever the corrections of neighbouring cells say.
        return np.maximum.accumulate(tabulated * np.array([factors[cell] for cell in cells.tolist()]))

    def observe_plain(self, num_active: int, round_s: float) -> None:
        """
        Args:
            num_active (`int`): Requests of a round without drafts.
            round_s (`float`): What it took, in seconds.
        """
        tabulated = float(self.table.target_seconds(num_active, 1.0))
        self._correction.observe(round_s / tabulated, "plain", magnitude(num_active))

    def observe_drafted(
        self,
        num_active: int,
        verify_lengths: Sequence[int],
        is_packed: bool,
        longest: int | None,
        padding_s: float,
        round_s: float,
    ) -> None:
        """
        Args:
            num_active (`int`): Requests of a round with drafts.
            verify_lengths (`Sequence[int]`): Rows of those that were drafted for; 0 of one that had ended before.
            is_packed (`bool`): Whether rows cost one by one.
            longest (`int`, *optional*): Verify length that blocks were cut to.
            padding_s (`float`): What the attention spends on a row of padding, in seconds.
            round_s (`float`): What the round took, in seconds.
        """
        mean_length = float(max(verify_lengths))
        if is_packed:
            mean_length = 1 + sum(length - 1 for length in verify_lengths if length > 0) / num_active
        tabulated = self.table.draft_seconds(len(verify_lengths), longest)
        tabulated += float(self.table.target_seconds(num_active, mean_length))
        tabulated += padding_s * num_padded_rows(verify_lengths)
        self._correction.observe(round_s / tabulated, "draft", magnitude(num_active), round(mean_length))


def magnitude(count: int) -> int:
    """Counts that share a correction: 1, 2, 3 to 4, 5 to 8, and so on."""
    return (count - 1).bit_length()


def num_padded_rows(verify_lengths: Sequence[int]) -> int:
    """Rows that these verify lengths have fewer than the longest of them."""
    return len(verify_lengths) * max(verify_lengths) - sum(verify_lengths)
