from __future__ import annotations

import sys

import pytest

from adaflash_hf.errors import MissingDependencyError
from adaflash_hf.evaluation.pictures import matplotlib_figure, save_pictures


def test_figures_are_saved_by_kind_and_empty_ones_left_out(tmp_path):
    figure = matplotlib_figure()(figsize=(1, 1))
    written = save_pictures({"tau": figure, "speedup": None}, tmp_path / "bench")
    assert written == [tmp_path / "bench-tau.png"]
    assert written[0].read_bytes().startswith(b"\x89PNG")


def test_the_extra_is_named_where_matplotlib_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependencyError, match=r"adaflash-hf\[bench\]"):
        matplotlib_figure()


def test_one_that_cannot_be_loaded_is_told_too(monkeypatch, tmp_path):
    (tmp_path / "matplotlib").mkdir()
    (tmp_path / "matplotlib" / "__init__.py").write_text("raise RuntimeError('built for another numpy')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(MissingDependencyError, match=r"cannot be loaded \(built for another numpy\).*--no-plots"):
        matplotlib_figure()
