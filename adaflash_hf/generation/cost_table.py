"""What a round costs: measured once on a grid, made monotone, kept on disk, corrected by the rounds that follow."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import tempfile
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InvalidInputError


__all__ = ["CostCorrection", "CostTable", "cost_table_path", "load_cost_table", "save_cost_table"]

logger = logging.getLogger(__name__)

# Raise when the meaning of a stored number changes.
_FORMAT = 5


@dataclass(frozen=True)
class CostTable:
    """
    Seconds of target steps and of drafts.

    Attributes:
        requests (`tuple[int, ...]`): Ascending numbers of requests, the first axis.
        lengths (`tuple[int, ...]`): Ascending verify lengths that all of them had, from 1; the second axis.
        target_s (`np.ndarray` of shape `(len(requests), len(lengths))`): Seconds of a target step.
        draft_s (`np.ndarray` of shape `(len(requests),)`): Seconds of a draft of whole blocks.
        cut_draft_s (`np.ndarray` of shape `(len(requests), len(lengths))`, *optional*):
            Seconds of a draft of the rows that a verify length needs; None if blocks cannot be cut.
        padding_s (`float`):
            Seconds more that a target step takes for each row that a request has fewer than the longest of them.
    """

    requests: tuple[int, ...]
    lengths: tuple[int, ...]
    target_s: np.ndarray
    draft_s: np.ndarray
    cut_draft_s: np.ndarray | None = None
    padding_s: float = 0.0

    def __post_init__(self) -> None:
        ascending = all(list(axis) == sorted(set(axis)) for axis in (self.requests, self.lengths))
        if not self.requests or not self.lengths or self.requests[0] < 1 or self.lengths[0] != 1 or not ascending:
            raise InvalidInputError(
                f"A cost table has `requests` {self.requests} and `lengths` {self.lengths}; expected ascending "
                "positive numbers, and lengths that begin with 1. Measure it again."
            )
        shape = (len(self.requests), len(self.lengths))
        tables = [self.target_s] if self.cut_draft_s is None else [self.target_s, self.cut_draft_s]
        if any(table.shape != shape for table in tables) or self.draft_s.shape != shape[:1]:
            raise InvalidInputError(
                f"A cost table has times of shapes {', '.join(str(table.shape) for table in tables)} and "
                f"{self.draft_s.shape}; expected {shape} and {shape[:1]}. Measure it again."
            )
        times = np.concatenate([*(table.ravel() for table in tables), self.draft_s])
        is_padding_wrong = not np.isfinite(self.padding_s) or self.padding_s < 0
        if not np.isfinite(times).all() or (times <= 0).any() or is_padding_wrong:
            raise InvalidInputError("A cost table holds times that are not positive numbers. Measure it again.")

    @classmethod
    def fit(
        cls,
        requests: Sequence[int],
        lengths: Sequence[int],
        target_s: np.ndarray,
        draft_s: np.ndarray,
        cut_draft_s: np.ndarray | None = None,
    ) -> CostTable:
        """
        Makes measured times monotone, since no step becomes faster by more rows or more requests.

        Args:
            requests (`Sequence[int]`): Numbers of requests.
            lengths (`Sequence[int]`): Verify lengths.
            target_s (`np.ndarray` of shape `(len(requests), len(lengths))`): Measured seconds of target steps.
            draft_s (`np.ndarray` of shape `(len(requests),)`): Measured seconds of drafts.
            cut_draft_s (`np.ndarray` of shape `(len(requests), len(lengths))`, *optional*): Those of cut blocks.
        """
        whole = _isotonic(np.asarray(draft_s, dtype=float))
        # A cut block is never dearer than a whole one.
        cut = None if cut_draft_s is None else np.minimum(_isotonic_both(cut_draft_s), whole[:, None])
        return cls(tuple(requests), tuple(lengths), _isotonic_both(target_s), whole, cut)

    def covers(self, num_requests: int) -> bool:
        """Whether this many requests lie within the grid."""
        return num_requests <= self.requests[-1]

    def draft_seconds(self, num_requests: int, longest: int | None = None) -> float:
        """
        Seconds of a draft.

        Args:
            num_requests (`int`): Requests drafted for; beyond the grid the last slope goes on.
            longest (`int`, *optional*): Largest verify length that is drafted; by default whole blocks are.
        """
        if longest is None or self.cut_draft_s is None:
            return float(_interpolate(num_requests, self.requests, self.draft_s[:, None])[0])
        return float(np.interp(longest, self.lengths, _interpolate(num_requests, self.requests, self.cut_draft_s)))

    def target_seconds(self, num_requests: int, mean_length: np.ndarray | float) -> np.ndarray:
        """
        Seconds of a target step.

        Args:
            num_requests (`int`): Requests in it.
            mean_length (`np.ndarray` or `float`): Rows over requests, from 1.

        Returns:
            `np.ndarray` of the shape of `mean_length`.
        """
        row = _interpolate(num_requests, self.requests, self.target_s)
        inside = np.interp(mean_length, self.lengths, row)
        if len(row) == 1:
            return inside
        slope = (row[-1] - row[-2]) / (self.lengths[-1] - self.lengths[-2])
        return inside + slope * np.maximum(np.asarray(mean_length) - self.lengths[-1], 0)

    @property
    def row_seconds(self) -> float:
        """Seconds of one more row in the largest target step."""
        if len(self.lengths) == 1:
            return float(self.target_s[-1, 0]) / self.requests[-1]
        return float(self.target_s[-1, -1] - self.target_s[-1, -2]) / (
            self.requests[-1] * (self.lengths[-1] - self.lengths[-2])
        )


def _interpolate(value: int, grid: Sequence[int], rows: np.ndarray) -> np.ndarray:
    """A row between those of the two neighbours of `value` in the grid, or beyond its end by the last slope."""
    if len(grid) == 1 or value <= grid[0]:
        return rows[0]
    upper = min(int(np.searchsorted(grid, value)), len(grid) - 1)
    share = (value - grid[upper - 1]) / (grid[upper] - grid[upper - 1])
    return rows[upper - 1] + share * (rows[upper] - rows[upper - 1])


def _isotonic_both(values: np.ndarray) -> np.ndarray:
    """Neither a row nor a column falls."""
    # Row means of ordered columns stay ordered, so the second pass does not undo the first.
    by_row = np.array([_isotonic(row) for row in np.asarray(values, dtype=float)])
    return np.array([_isotonic(column) for column in by_row.T]).T


def _isotonic(values: np.ndarray) -> np.ndarray:
    """The closest sequence that never falls (pool adjacent violators)."""
    blocks: list[tuple[float, int]] = []
    for value in values.tolist():
        blocks.append((value, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (left, n_left), (right, n_right) = blocks[-2:]
            blocks[-2:] = [((left * n_left + right * n_right) / (n_left + n_right), n_left + n_right)]
    return np.repeat([mean for mean, _ in blocks], [count for _, count in blocks])


class CostCorrection:
    """
    Learns how much slower or faster real rounds are than the table says.

    A correction is the product of factors from coarse to fine: one for everything (the machine is busy, contexts have
    grown), and ever narrower ones for what is special about some rounds. Every round moves all factors of its own a
    little towards what was measured, the coarse one fastest, so that a change of the whole machine is noticed for
    rounds that are not being run too. An outlier moves them no further than a moderate surprise does.
    """

    _RATES = (0.2, 0.06, 0.06, 0.06)
    # The first observations of a narrow factor count more: rounds of the side that is thought slower are rare.
    _FIRST_RATE = 0.15
    _LARGEST_SURPRISE = 0.25

    def __init__(self) -> None:
        self._logs: dict[Hashable, float] = {}
        self._counts: dict[Hashable, int] = {}

    def factor(self, *path: Hashable) -> float:
        """
        Args:
            path (`Hashable`): From coarse to fine what describes a round; at most three.

        Returns:
            `float`: Real over tabulated seconds.
        """
        return math.exp(sum(self._logs.get(path[:depth], 0.0) for depth in range(len(path) + 1)))

    def has_seen(self, *path: Hashable) -> bool:
        """Whether a round of this description was ever observed."""
        return path in self._counts

    def observe(self, ratio: float, *path: Hashable) -> None:
        """
        Args:
            ratio (`float`): Real over tabulated seconds of one round.
            path (`Hashable`): What describes it.
        """
        surprise = math.log(ratio) - math.log(self.factor(*path))
        surprise = max(-self._LARGEST_SURPRISE, min(self._LARGEST_SURPRISE, surprise))
        for depth, rate in zip(range(len(path) + 1), self._RATES, strict=False):
            part, count = path[:depth], self._counts.get(path[:depth], 0)
            self._counts[part] = count + 1
            self._logs[part] = self._logs.get(part, 0.0) + max(rate, self._FIRST_RATE / (1 + count / 4)) * surprise


def cost_table_path(directory: Path, fingerprint: Mapping[str, str]) -> Path:
    """Where the table of one combination of models, device and versions is kept."""
    digest = hashlib.sha256(json.dumps(dict(fingerprint), sort_keys=True).encode()).hexdigest()
    return directory / f"costs-{digest[:24]}.json"


def load_cost_table(path: Path, fingerprint: Mapping[str, str]) -> CostTable | None:
    """
    Reads a table.

    Args:
        path (`Path`): File.
        fingerprint (`Mapping[str, str]`): What the table must have been measured on.

    Returns:
        `CostTable` or `None`: None if there is none; also, with a warning, if the file cannot be used.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != _FORMAT or content["fingerprint"] != dict(fingerprint):
            raise InvalidInputError("it was measured on something else or by another version")
        return CostTable(
            tuple(int(number) for number in content["requests"]),
            tuple(int(number) for number in content["lengths"]),
            np.asarray(content["target_s"], dtype=float),
            np.asarray(content["draft_s"], dtype=float),
            None if content["cut_draft_s"] is None else np.asarray(content["cut_draft_s"], dtype=float),
            float(content["padding_s"]),
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        logger.warning("The cost table %s cannot be used (%s); costs are measured again.", path, error)
        return None


def save_cost_table(path: Path, table: CostTable, fingerprint: Mapping[str, str]) -> None:
    """
    Writes a table aside and renames it, so that a reader finds it whole or not at all. A cache that cannot be written
    is a warning, not an error.

    Args:
        path (`Path`): File.
        table (`CostTable`): What to keep.
        fingerprint (`Mapping[str, str]`): What it was measured on.
    """
    content: dict[str, Any] = {
        "format": _FORMAT,
        "fingerprint": dict(fingerprint),
        "requests": list(table.requests),
        "lengths": list(table.lengths),
        "target_s": table.target_s.tolist(),
        "draft_s": table.draft_s.tolist(),
        "cut_draft_s": None if table.cut_draft_s is None else table.cut_draft_s.tolist(),
        "padding_s": table.padding_s,
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A name of its own: two processes may measure at once, and the last one's table stays.
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, suffix=".partial", delete=False) as f:
            json.dump(content, f, indent=1)
        os.replace(f.name, path)
    except OSError as error:
        logger.warning("The cost table could not be kept at %s (%s); the next process measures again.", path, error)
