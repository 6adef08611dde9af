from __future__ import annotations

import pytest

from adaflash_hf.serving.served_versions import VersionHistory, reported_spans, version_of_label, weight_label


@pytest.mark.parametrize("version", [0, 3, 12345])
def test_labels_come_back(version: int) -> None:
    assert version_of_label(weight_label(version)) == version


@pytest.mark.parametrize("label", [None, "", "default", "3", "adaflash-", "adaflash-3-x", "my-adaflash-3"])
def test_labels_of_others(label: str | None) -> None:
    assert version_of_label(label) is None


def test_spans_as_sglang_reports_them() -> None:
    spans = [{"version": "default", "start": 0, "end": 5}, {"version": "adaflash-2", "start": 5, "end": 9}]
    assert reported_spans({"weight_versions": spans}) == [(0, 0, 5), (2, 5, 9)]
    assert reported_spans({"weight_version": "adaflash-2"}) == reported_spans(None) == []


def test_who_drafted_what_by_the_time_it_came() -> None:
    history = VersionHistory(1)
    history.saw(2, at_s=10.0)
    history.saw(2, at_s=11.0)
    history.saw(4, at_s=20.0)
    arrivals = [(8.0, 3), (9.0, 5), (10.0, 8), (15.0, 8), (19.9, 10), (20.5, 12)]
    assert history.spans(arrivals) == [(1, 0, 5), (2, 5, 10), (4, 10, 12)]
    assert history.spans([]) == []
    assert history.current == 4


def test_old_changes_are_forgotten_and_new_ones_kept() -> None:
    history = VersionHistory()
    for number in range(1, 500):
        history.saw(number, at_s=float(number))
    assert history.spans([(498.5, 1), (499.5, 2)]) == [(498, 0, 1), (499, 1, 2)]
