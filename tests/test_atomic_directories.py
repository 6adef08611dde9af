from __future__ import annotations

import os
import signal
import stat
from pathlib import Path

import pytest
from tiny_trajectories import run_until_killed

from adaflash_hf.atomic_directories import (
    directory_written_aside,
    files_written_aside,
    remove_directory,
    remove_leftovers,
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_appears_only_when_the_block_ends(tmp_path):
    out = tmp_path / "deep" / "out"
    with directory_written_aside(out) as partial:
        (partial / "a").write_text("1")
        assert not out.exists()
        assert partial.parent == out.parent, "renaming works within one file system only"
    assert (out / "a").read_text() == "1"
    assert names(out.parent) == ["out"]


def test_a_failure_leaves_what_was_there(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").write_text("old")
    with pytest.raises(ZeroDivisionError), directory_written_aside(out) as partial:
        (partial / "new").write_text("new")
        raise ZeroDivisionError
    assert names(tmp_path) == ["out"]
    assert names(out) == ["old"]


def test_replaces_the_whole_directory(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").write_text("old")
    with directory_written_aside(out) as partial:
        (partial / "new").write_text("new")
    assert names(tmp_path) == ["out"]
    assert names(out) == ["new"]


def test_the_old_directory_returns_if_the_new_one_cannot_take_its_name(tmp_path, monkeypatch):
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").write_text("old")
    rename = os.rename

    def fail_for_the_new_one(source, target):
        if str(source).endswith(".partial"):
            raise OSError("no")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail_for_the_new_one)
    with pytest.raises(OSError, match="no"), directory_written_aside(out) as partial:
        (partial / "new").write_text("new")
    assert names(tmp_path) == ["out"]
    assert names(out) == ["old"]


def test_what_killed_processes_left_goes(tmp_path, monkeypatch):
    for name in ("out-1", "out-2", "other-1"):
        (tmp_path / name).mkdir()
    with monkeypatch.context() as killed:
        killed.setattr("shutil.rmtree", lambda *args, **kwargs: None)
        remove_directory(tmp_path / "out-1")
        remove_directory(tmp_path / "other-1")
        with pytest.raises(KeyboardInterrupt), directory_written_aside(tmp_path / "out-3"):
            raise KeyboardInterrupt
        with directory_written_aside(tmp_path / "out-2"):
            pass  # leaves the one that was replaced
    assert len(names(tmp_path)) == 5
    remove_leftovers(tmp_path, "out-*")
    assert [name.rpartition(".")[2] for name in names(tmp_path)] == ["removed", "out-2"]


def test_what_made_room_for_nothing_comes_back(tmp_path, monkeypatch):
    out = tmp_path / "out-1.5"
    with monkeypatch.context() as killed:
        killed.setattr("shutil.rmtree", lambda *args, **kwargs: None)
        for content in ("first", "second"):  # of which the first stays behind when it has been replaced
            with directory_written_aside(out) as partial:
                (partial / content).touch()
    rename = os.rename

    def killed_between_the_renames():
        monkeypatch.setattr(
            os, "rename", lambda a, b: os.kill(os.getpid(), signal.SIGKILL) if b == out else rename(a, b)
        )
        with directory_written_aside(out) as partial:
            (partial / "third").touch()

    run_until_killed(killed_between_the_renames)
    assert not out.exists() and len(names(tmp_path)) == 3
    remove_leftovers(tmp_path, "out-*")
    assert names(tmp_path) == ["out-1.5"] and names(out) == ["second"]


def test_others_may_read_it(tmp_path):
    (tmp_path / "plain").mkdir()
    with directory_written_aside(tmp_path / "out") as partial:
        (partial / "a").write_text("1")
    mode = stat.S_IMODE((tmp_path / "out").stat().st_mode)
    assert mode == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


def test_files_take_their_places_together_beside_others(tmp_path: Path) -> None:
    for name in ("other", "one", "below/two"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("old")
    with pytest.raises(OSError, match="no"), files_written_aside(tmp_path) as partial:
        (partial / "one").write_text("half")
        raise OSError("no")
    assert {path.name: path.read_text() for path in tmp_path.rglob("*") if path.is_file()} == {
        "other": "old", "one": "old", "two": "old"
    }  # fmt: skip
    with files_written_aside(tmp_path) as partial:
        (partial / "below").mkdir()
        for name in ("one", "below/two", "below/three"):
            (partial / name).write_text("new")
        assert (tmp_path / "one").read_text() == "old"
    texts = {path.relative_to(tmp_path).as_posix(): path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    assert texts == {"other": "old", "one": "new", "below/two": "new", "below/three": "new"}
