"""Measures what target steps and drafts cost, once per combination of models, device and versions."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from ..embedded_target import target_cache_directory
from .cost_table import CostTable, cost_table_path, load_cost_table, save_cost_table


if TYPE_CHECKING:
    from ..modeling_dflash_drafter import DFlashDrafterModel


__all__ = ["RoundBench", "calibrate", "calibrated_table", "cost_table_directory"]

logger = logging.getLogger(__name__)

# Timed walks over the grid that took longer than this in all are enough once there are some, or if one alone did:
# steps of seconds vary little.
_ENOUGH_S = 5.0
_ENOUGH_PASSES = 3
# Rows of every other request where padding is measured: about what is verified of many requests at once.
_UNEVEN_LENGTH = 4
_LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
# What does not fit into memory is not to be chosen.
_OUT_OF_MEMORY_FACTOR = 1e3


class RoundBench(Protocol):
    """
    Runs single steps of the models on scratch state, so that they can be timed.

    Attributes:
        is_packed (`bool`): Whether a target step sees the sum of the verify lengths, or a rectangle of the longest.
        max_requests (`int`): Most requests that can ever be active at once.
        longest_verify_length (`int`): Rows of a whole block, the anchor included.
        can_cut_blocks (`bool`): Whether `run_draft` drafts fewer rows where it is asked for fewer.
        drafter (`DFlashDrafterModel`): The unwrapped drafter.
        reads_likeliest (`bool`):
            Whether the policy reads the likeliest tokens of all drafted slots: then a draft has them projected, and a
            target step projects nothing. False until a policy says otherwise.
    """

    is_packed: bool
    max_requests: int
    longest_verify_length: int
    can_cut_blocks: bool
    drafter: DFlashDrafterModel
    reads_likeliest: bool

    def fingerprint(self) -> dict[str, str]:
        """What the costs depend on: target, drafter, device, dtype, threads, versions. Names the cached table."""

    def run_target(self, verify_lengths: Sequence[int]) -> None:
        """Verifies drafts of these lengths, one per request, and projects them before if that is still to be done;
        rolled back, waited for."""

    def run_draft(self, num_requests: int, longest: int | None = None) -> None:
        """Drafts for verify lengths up to `longest` or whole blocks, up to the hidden states unless `reads_likeliest`,
        and waits for them."""

    def close(self) -> None:
        """Frees the scratch state."""


def cost_table_directory() -> Path:
    """The directory that keeps measured costs, beside converted targets; `$ADAFLASH_CACHE` moves it."""
    return target_cache_directory() / "costs"


def calibrate(bench: RoundBench, num_passes: int = 5, clock: Callable[[], float] = time.perf_counter) -> CostTable:
    """
    Times steps on a grid: powers of two of requests, and verify lengths up to a whole block.

    The grid is walked several times, so that a machine that changes its speed meanwhile does so for all points, and
    the first walk, which pays for kernel selection and allocations, is not counted.

    Args:
        bench (`RoundBench`): Runs the steps.
        num_passes (`int`, defaults to 5):
            Timed walks, fewer where they are long. The fastest of a point counts: whatever else the machine does only
            adds to it.
        clock (`Callable[[], float]`, *optional*): Seconds.

    Returns:
        `CostTable`: Monotone costs.
    """
    requests = [1]
    while requests[-1] < bench.max_requests:
        requests.append(2 * requests[-1])
    lengths = [length for length in _LENGTHS if length < bench.longest_verify_length]
    lengths.append(bench.longest_verify_length)

    def timed(step: Callable[[], None]) -> float:
        begin_s = clock()
        try:
            step()
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return np.inf
        return clock() - begin_s

    target_s = np.zeros((num_passes + 1, len(requests), len(lengths)))
    draft_s = np.zeros((num_passes + 1, len(requests)))
    cut_draft_s = np.zeros(target_s.shape) if bench.can_cut_blocks else None
    # Every other request has one row, where attention pads them to the rows of the others.
    uneven = [1, lengths[min(_UNEVEN_LENGTH, len(lengths)) - 1]] * (requests[-1] // 2) if bench.is_packed else []
    uneven_s = np.zeros((num_passes + 1, 1))
    num_timed, spent_s = 0, 0.0
    try:
        for number in range(num_passes + 1):
            begin_s = clock()
            for i, count in enumerate(requests):
                draft_s[number, i] = timed(lambda count=count: bench.run_draft(count))  # type: ignore[misc]
                for j, length in enumerate(lengths):
                    steps = [length] * count
                    target_s[number, i, j] = timed(lambda steps=steps: bench.run_target(steps))  # type: ignore[misc]
                    # After a target step, as in a round: one draft after the other finds its weights in the cache.
                    if cut_draft_s is not None:
                        cut_draft_s[number, i, j] = timed(
                            lambda count=count, length=length: bench.run_draft(count, length)  # type: ignore[misc]
                        )
            if uneven:
                uneven_s[number] = timed(lambda: bench.run_target(uneven))
            if number > 0:
                num_timed, spent_s = number, spent_s + clock() - begin_s
            if spent_s > _ENOUGH_S * (num_timed if num_timed < _ENOUGH_PASSES else 1):
                break
    finally:
        bench.close()
    timed_walks = slice(1, num_timed + 1)
    table = CostTable.fit(
        requests,
        lengths,
        _fastest(target_s[timed_walks]),
        _fastest(draft_s[timed_walks]),
        None if cut_draft_s is None else _fastest(cut_draft_s[timed_walks]),
    )
    return replace(table, padding_s=_padding_seconds(table, uneven, float(_fastest(uneven_s[timed_walks])[0])))


def _padding_seconds(table: CostTable, uneven: Sequence[int], uneven_s: float) -> float:
    """What a row of padding costs, from a step of uneven lengths beside even ones with as many rows in all."""
    num_padded = len(uneven) * max(uneven, default=0) - sum(uneven)
    if not num_padded:
        return 0.0
    even_s = float(table.target_seconds(len(uneven), sum(uneven) / len(uneven)))
    return min(max(uneven_s - even_s, 0.0) / num_padded, table.row_seconds)


def _fastest(passes: np.ndarray) -> np.ndarray:
    fastest = passes.min(axis=0)
    finite = fastest[np.isfinite(fastest)]
    return np.where(np.isfinite(fastest), fastest, _OUT_OF_MEMORY_FACTOR * finite.max(initial=1.0))


def calibrated_table(bench: RoundBench, directory: Path | None = None, refresh: bool = False) -> CostTable:
    """
    The costs of a bench: those on disk if they were measured for as many requests, else measured now and kept.

    Args:
        bench (`RoundBench`): Runs the steps; untouched when a table is found.
        directory (`Path`, *optional*): Where tables are kept; see [`cost_table_directory`].
        refresh (`bool`, defaults to `False`): Measure in any case.

    Returns:
        `CostTable`: Monotone costs.
    """
    fingerprint = bench.fingerprint()
    path = cost_table_path(directory or cost_table_directory(), fingerprint)
    table = None if refresh else load_cost_table(path, fingerprint)
    if table is not None and table.covers(bench.max_requests) and table.lengths[-1] >= bench.longest_verify_length:
        return table
    begin_s = time.perf_counter()
    # A warning, for it is shown by default, and the first call takes seconds longer than those that follow.
    logger.warning(
        "Measuring once what target steps and drafts cost on this machine, for up to %d requests at once ...",
        bench.max_requests,
    )
    table = calibrate(bench)
    logger.info("Measured in %.1f s; kept in %s.", time.perf_counter() - begin_s, path)
    save_cost_table(path, table, fingerprint)
    return table
