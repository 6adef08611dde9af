"""What libraries say of a full or read-only disk is one error with what to do, if possible before the work."""

from __future__ import annotations

import errno
import os

import pytest
import torch
from full_disk import full_disk
from safetensors.torch import save_file

from adaflash_hf.errors import InvalidInputError, OutputError
from adaflash_hf.output_places import check_room, check_writable, disk_error, is_disk_trouble, writing_to


WEIGHTS = {"weight": torch.zeros(100_000)}


def test_a_place_that_can_be_written_is_left_as_it_was(tmp_path):
    for path in (tmp_path, tmp_path / "below" / "and" / "below"):
        check_writable(path)
    assert not list(tmp_path.iterdir())


def test_a_place_behind_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OutputError, match=f"`out` is '{path}'.*Not a directory.*Pass another place"):
            check_writable(path)


def test_a_full_disk_is_noticed_before_the_work(tmp_path):
    with full_disk(100), pytest.raises(OutputError, match="`trajectories` is .*Make room.*nothing was done yet"):
        check_writable(tmp_path / "out", "trajectories")


def test_room_is_compared_with_what_is_needed(tmp_path):
    check_room(tmp_path / "out", 1)
    with pytest.raises(OutputError, match=f"{2**40} MB are needed there and .* MB are free. Make room"):
        check_room(tmp_path / "out", 2**60)


@pytest.mark.parametrize("save", [save_file, torch.save, lambda weights, path: path.write_bytes(bytes(400_000))])
def test_every_way_to_write_is_understood(save, tmp_path):
    with full_disk(50_000), pytest.raises(OutputError, match="Make room.*; the rest is there.$") as caught:
        with writing_to(tmp_path, kept="the rest is there"):
            save(WEIGHTS, tmp_path / "weights")
    assert is_disk_trouble(disk_error(caught.value.__cause__))
    with pytest.raises(OutputError, match="No such file or directory.*Pass another place"), writing_to(tmp_path):
        save(WEIGHTS, tmp_path / "absent" / "weights")


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_missing_rights_are_told_apart(number):
    with pytest.raises(OutputError, match="Give the right to write there, or pass"), writing_to("out"):
        raise OSError(number, os.strerror(number), "out/file")


def test_other_errors_are_left_alone():
    for error in (InvalidInputError("no"), ZeroDivisionError(), RuntimeError("shapes differ")):
        with pytest.raises(type(error)), writing_to("out"):
            raise error
    assert disk_error(RuntimeError("shapes differ")) is None
    assert not is_disk_trouble(FileNotFoundError(errno.ENOENT, "No such file or directory"))
