"""Costs between and beyond the measured ones, their correction, and the file they are kept in."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path

import numpy as np
import pytest

from adaflash_hf import InvalidInputError
from adaflash_hf.generation.cost_table import (
    CostCorrection,
    CostTable,
    cost_table_path,
    load_cost_table,
    save_cost_table,
)


FINGERPRINT = {"target": "a", "device": "b"}


def small_table() -> CostTable:
    return CostTable((1, 2, 4), (1, 2, 4), np.array([[1.0, 2, 4], [2, 3, 5], [4, 6, 8]]), np.array([0.5, 0.6, 1.0]))


def test_interpolation() -> None:
    table = small_table()
    assert table.target_seconds(1, 1.0) == 1.0
    assert table.target_seconds(1, 3.0) == 3.0  # between 2 and 4
    assert table.target_seconds(3, 1.0) == 3.0  # between two and four requests
    assert table.target_seconds(3, 1.5) == pytest.approx((3.0 + 4.5) / 2)
    assert table.draft_seconds(3) == pytest.approx(0.8)
    # Beyond the grid the last slopes go on.
    assert table.target_seconds(1, 6.0) == 6.0
    assert table.target_seconds(6, 1.0) == pytest.approx(6.0)
    assert table.draft_seconds(6) == pytest.approx(1.4)
    np.testing.assert_allclose(table.target_seconds(2, np.array([1.0, 2.0, 3.0])), [2, 3, 4])
    assert table.covers(4) and not table.covers(5)
    flat = CostTable((1,), (1,), np.array([[1.0]]), np.array([0.5]))
    assert flat.target_seconds(7, 3.0) == 1.0


def test_drafts_of_cut_blocks(tmp_path: Path) -> None:
    cut = np.array([[0.2, 0.3, 0.6], [0.4, 0.3, 0.6]])
    table = CostTable.fit((1, 2), (1, 2, 4), np.ones((2, 3)), np.array([0.5, 0.6]), cut)
    # The second row is made 0.35, 0.35, 0.6; nothing is dearer than the whole block.
    assert table.draft_seconds(1, 2) == pytest.approx(0.3)
    assert table.draft_seconds(1, 3) == pytest.approx(0.4)  # between 0.3 and 0.5
    assert table.draft_seconds(1, 4) == table.draft_seconds(1) == pytest.approx(0.5)
    assert table.draft_seconds(2, 2) == pytest.approx(0.35)
    assert small_table().draft_seconds(1, 2) == small_table().draft_seconds(1)
    save_cost_table(tmp_path / "costs.json", table, FINGERPRINT)
    loaded = load_cost_table(tmp_path / "costs.json", FINGERPRINT)
    assert loaded is not None and loaded.cut_draft_s is not None
    np.testing.assert_array_equal(loaded.cut_draft_s, table.cut_draft_s)
    with pytest.raises(InvalidInputError, match="shapes"):
        CostTable((1, 2), (1, 2, 4), np.ones((2, 3)), np.ones(2), np.ones((2, 2)))


def test_measurements_are_made_monotone() -> None:
    noisy = np.array([[1.0, 0.8, 2.0], [0.9, 3.0, 2.0]])
    table = CostTable.fit((1, 2), (1, 2, 4), noisy, np.array([0.4, 0.2]))
    assert (np.diff(table.target_s, axis=0) >= 0).all() and (np.diff(table.target_s, axis=1) >= 0).all()
    np.testing.assert_allclose(table.draft_s, [0.3, 0.3])
    # First row: 1.0 and 0.8 become 0.9; second: 3.0 and 2.0 become 2.5; the first column is 0.9 in both.
    np.testing.assert_allclose(table.target_s, [[0.9, 0.9, 2.0], [0.9, 2.5, 2.5]])


@pytest.mark.parametrize("seed", range(5))
def test_monotone_fit_of_noise(seed: int) -> None:
    rng = np.random.default_rng(seed)
    table = CostTable.fit((1, 2, 4, 8), (1, 2, 3, 4), rng.uniform(1, 2, (4, 4)), rng.uniform(1, 2, 4))
    for axis in (0, 1):
        assert (np.diff(table.target_s, axis=axis) >= -1e-12).all()


@pytest.mark.parametrize(
    ("axes", "target", "message"),
    [
        (((2, 1), (1, 2)), np.ones((2, 2)), "ascending"),
        (((1, 2), (2, 3)), np.ones((2, 2)), "begin with 1"),
        (((1, 2), (1, 2)), np.ones((2, 3)), "shapes"),
        (((1, 2), (1, 2)), np.array([[1, 2], [np.nan, 2]]), "positive"),
        (((1, 2), (1, 2)), np.array([[1, 2], [0.0, 2]]), "positive"),
    ],
)
def test_nonsense_is_refused(axes: tuple, target: np.ndarray, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        CostTable(*axes, target, np.ones(2))


def test_correction_finds_the_ratio() -> None:
    rng = np.random.default_rng(0)
    correction = CostCorrection()
    for _ in range(300):
        correction.observe(1.5 * math.exp(0.1 * rng.standard_normal()), "plain", 3)
    assert correction.factor("plain", 3) == pytest.approx(1.5, rel=0.08)
    # Most of it is taken for the whole machine's, so other rounds are expected to be slower too.
    assert 1.2 < correction.factor("draft", 3, 2) < 1.6


def test_correction_tells_kinds_apart() -> None:
    correction = CostCorrection()
    for _ in range(300):
        correction.observe(1.2, "plain", 3)
        correction.observe(0.8, "draft", 3, 2)
    assert correction.factor("plain", 3) == pytest.approx(1.2, rel=0.03)
    assert correction.factor("draft", 3, 2) == pytest.approx(0.8, rel=0.03)


def test_rare_rounds_are_soon_known() -> None:
    """Four of one kind in between are enough to come within 6 %, where the table is 30 % off for them alone."""
    correction = CostCorrection()
    for number in range(40):
        correction.observe(1.0, "draft", 3, 2)
        if number % 10 == 9:
            correction.observe(1 / 1.3, "plain", 3)
    assert correction.factor("plain", 3) == pytest.approx(1 / 1.3, rel=0.06)
    assert correction.factor("draft", 3, 2) == pytest.approx(1, rel=0.05)


def test_an_outlier_is_no_news() -> None:
    correction = CostCorrection()
    for _ in range(20):
        correction.observe(1.0, "plain", 0)
    correction.observe(1000.0, "plain", 0)
    assert correction.factor("plain", 0) < 1.1
    for _ in range(100):  # but a change that stays is
        correction.observe(1000.0, "plain", 0)
    assert correction.factor("plain", 0) > 100


def test_file_round_trip(tmp_path: Path) -> None:
    path = cost_table_path(tmp_path / "new", FINGERPRINT)
    assert load_cost_table(path, FINGERPRINT) is None
    save_cost_table(path, small_table(), FINGERPRINT)
    loaded = load_cost_table(path, FINGERPRINT)
    assert loaded is not None and loaded.requests == (1, 2, 4)
    np.testing.assert_array_equal(loaded.target_s, small_table().target_s)
    assert [file.name for file in path.parent.iterdir()] == [path.name]  # nothing half-written beside it
    assert cost_table_path(tmp_path, {**FINGERPRINT, "device": "c"}) != cost_table_path(tmp_path, FINGERPRINT)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:20],
        lambda text: "[]",
        lambda text: json.dumps({**json.loads(text), "format": 1}),
        lambda text: text.replace('"b"', '"another device"'),
        lambda text: json.dumps({**json.loads(text), "target_s": [[1, 2], [3]]}),
        lambda text: json.dumps({**json.loads(text), "draft_s": [-1, 1, 1]}),
        lambda text: json.dumps({**json.loads(text), "requests": None}),
    ],
)
def test_a_damaged_file_is_a_warning(damage, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "costs.json"
    save_cost_table(path, small_table(), FINGERPRINT)
    path.write_text(damage(path.read_text()))
    with caplog.at_level(logging.WARNING):
        assert load_cost_table(path, FINGERPRINT) is None
    assert "measured again" in caplog.text


def test_a_cache_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        save_cost_table(tmp_path / "file" / "costs.json", small_table(), FINGERPRINT)
    assert "could not be kept" in caplog.text
