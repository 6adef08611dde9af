"""A file written aside appears whole, or what was there before stays."""

import pytest

from adaflash_hf.atomic_files import sync_tree, written_aside


def test_appears_under_its_name(tmp_path):
    path = tmp_path / "record.json"
    with written_aside(path) as partial:
        partial.write_text("new")
        assert not path.exists()
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "record.json"
    path.write_text("old")
    with pytest.raises(RuntimeError), written_aside(path) as partial:
        partial.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_tree_can_be_flushed(tmp_path):
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "file").write_text("content")
    sync_tree(tmp_path)
    assert (tmp_path / "below" / "file").read_text() == "content"
