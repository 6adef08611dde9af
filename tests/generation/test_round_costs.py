"""Costs of whole rounds: the table, padding, prompts beside, and what timed rounds say."""

from __future__ import annotations

import numpy as np
import pytest

from adaflash_hf.generation.cost_table import CostTable
from adaflash_hf.generation.round_costs import RoundCosts, magnitude, num_padded_rows


def costs() -> RoundCosts:
    # Target: 1 s, and 0.1 s a row beyond the first of each; drafts 0.5 s, or 0.2 s for two rows.
    target_s = np.array([[1.0, 1.1, 1.2], [1.0, 1.2, 1.4], [1.0, 1.4, 1.8]])
    cut_s = np.array([[0.2, 0.2, 0.3]] * 3)
    return RoundCosts(CostTable((1, 2, 4), (1, 2, 3), target_s, np.array([0.5] * 3), cut_s, padding_s=0.05))


def test_what_the_table_says() -> None:
    known = costs()
    assert known.plain_seconds(2) == 1.0
    np.testing.assert_allclose(known.drafted_seconds(2, 2, 2, True), 0.5 + np.array([1.0, 1.1, 1.2, 1.3, 1.4]))
    # Padded, one more draft is one more row of both.
    np.testing.assert_allclose(known.drafted_seconds(2, 2, 2, False), 0.5 + np.array([1.0, 1.2, 1.4]))
    np.testing.assert_allclose(known.drafted_seconds(2, 2, 2, False, 2), 0.2 + np.array([1.0, 1.2, 1.4]))


def test_rows_beside_a_prompt_cost_what_they_cost_in_the_largest_step() -> None:
    flat = RoundCosts(CostTable((1, 2), (1, 2, 3), np.array([[1.0, 1.0, 1.0], [1.0, 1.0, 1.4]]), np.array([0.5, 0.5])))
    np.testing.assert_allclose(flat.drafted_seconds(2, 1, 2, True), [1.5, 1.5, 1.5])
    # 0.4 s for two rows
    np.testing.assert_allclose(flat.drafted_seconds(2, 1, 2, True, is_prefilling=True), [1.5, 1.7, 1.9])


def test_timed_rounds_correct_both_sides() -> None:
    known = costs()
    assert not known.has_timed_plain(2)
    for _ in range(60):
        known.observe_plain(2, 2.0)  # everything takes twice as long
    assert known.has_timed_plain(2) and not known.has_timed_plain(4)
    assert known.plain_seconds(2) == pytest.approx(2.0, rel=0.02)
    assert known.drafted_seconds(2, 2, 2, True)[0] > 1.3 * 1.5
    for _ in range(200):
        known.observe_drafted(2, [3, 1], True, None, 0.05, 5.0)
    # 0.5 + 1.2 + two rows of padding at 0.05
    assert known.drafted_seconds(2, 2, 2, True)[2] == pytest.approx(5.0 * 1.7 / 1.8, rel=0.05)


def test_padding_and_magnitudes() -> None:
    assert num_padded_rows([1, 4, 2]) == 5 and num_padded_rows([3, 3]) == 0
    assert [magnitude(count) for count in (1, 2, 3, 4, 5, 8, 9)] == [0, 1, 2, 2, 3, 3, 4]
