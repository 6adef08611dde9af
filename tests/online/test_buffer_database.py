from __future__ import annotations

import functools
import os
import random
import resource
import shutil
import sqlite3
import tempfile
import threading
from pathlib import Path

import pytest
from online_traffic import in_fork, recorded

from adaflash_hf.errors import ReplayBufferError
from adaflash_hf.online.buffer_database import SCHEMA_VERSION
from adaflash_hf.online.replay_buffer import BufferSettings, ReplayBuffer


NOBODY = 65534


@pytest.fixture
def open_place():
    """A directory that a process without root's privileges can reach too."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o755)
    yield path
    path.chmod(0o755)
    shutil.rmtree(path)


def in_another_process(function, *args):
    """Runs a check in a fork, which may give up privileges or disk space that the test still needs."""
    with in_fork(function, *args) as process:
        process.join(600)
        assert process.exitcode == 0


def test_a_newer_schema_is_refused(tmp_path):
    ReplayBuffer(tmp_path / "buffer").close()
    connection = sqlite3.connect(tmp_path / "buffer")
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    connection.close()
    with pytest.raises(ReplayBufferError, match=f"schema version is {SCHEMA_VERSION + 1}.*Update the package"):
        ReplayBuffer(tmp_path / "buffer")


def test_a_file_of_the_first_schema_is_taken_over(tmp_path):
    path = tmp_path / "buffer"
    old = ReplayBuffer(path)
    old.append([recorded(1)])
    old.close()
    connection = sqlite3.connect(path)
    connection.execute("ALTER TABLE trajectories DROP COLUMN version_spans")
    connection.execute("PRAGMA user_version = 1")
    connection.close()
    buffer = ReplayBuffer(path)
    buffer.append([recorded(2, drafter_version=1, version_spans=((1, 0, 4), (2, 4, 10)))])
    assert [one.version_spans for one in buffer.newest(2)] == [(), ((1, 0, 4), (2, 4, 10))]


@pytest.mark.parametrize("nth", range(6))
def test_another_process_may_make_the_file_at_the_same_time(tmp_path, monkeypatch, nth):
    path, statements = tmp_path / "buffer", []

    class Overtaken(sqlite3.Connection):
        def execute(self, statement, *args):
            statements.append(statement)
            if len(statements) == nth + 1:
                connection = sqlite3.Connection(path, isolation_level=None)
                monkeypatch.setattr(sqlite3, "connect", lambda *args, **kwargs: connection)
                ReplayBuffer(path, BufferSettings(target="theirs")).close()
            return super().execute(statement, *args)

    monkeypatch.setattr(sqlite3, "connect", functools.partial(sqlite3.connect, factory=Overtaken))
    assert ReplayBuffer(path).settings.target == "theirs"
    assert not any(statement.startswith("BEGIN") for statement in statements[:nth])


def test_other_files_are_left_alone(tmp_path):
    (tmp_path / "text").write_text("a novel, not a database\n" * 100)
    with pytest.raises(ReplayBufferError, match="not an SQLite file"):
        ReplayBuffer(tmp_path / "text")
    connection = sqlite3.connect(tmp_path / "foreign")
    connection.execute("CREATE TABLE novels (title)")
    connection.commit()
    connection.close()
    with pytest.raises(ReplayBufferError, match="another program"):
        ReplayBuffer(tmp_path / "foreign")
    with pytest.raises(ReplayBufferError, match="directory exists"):
        ReplayBuffer(tmp_path / "nowhere" / "buffer")


def test_a_damaged_file_is_reported_and_a_new_one_made_once_it_is_gone(tmp_path):
    buffer = ReplayBuffer(tmp_path / "buffer")
    buffer.append([recorded(seed) for seed in range(200)])
    buffer.close()
    with (tmp_path / "buffer").open("r+b") as file:
        file.seek(4096)
        file.write(random.Random(0).randbytes(30 * 4096))
    with pytest.raises(ReplayBufferError, match="damaged"):
        for seed in range(20):
            buffer.append([recorded(seed)])
            buffer.newest(1000)
    # Even while the object lives: what a recorder does when someone moves the file away.
    for path in tmp_path.glob("buffer*"):
        path.rename(tmp_path / f"old-{path.name}")
    assert buffer.append([recorded()]) == 1
    assert buffer.depth().rows == 1


def test_a_replaced_file_is_noticed_without_an_error(tmp_path):
    buffer = ReplayBuffer(tmp_path / "buffer")
    buffer.append([recorded()])
    for path in tmp_path.glob("buffer*"):
        path.unlink()
    buffer.append([recorded(1), recorded(2)])
    assert ReplayBuffer(tmp_path / "buffer").depth().rows == 2


def write_until_full(path):
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
    buffer = ReplayBuffer(path)
    with pytest.raises(ReplayBufferError, match="free some space"):
        for seed in range(10_000):
            buffer.append([recorded(seed, response=500)])
    before = buffer.depth().rows
    with pytest.raises(ReplayBufferError, match="free some space"):
        buffer.append([recorded(1, response=500)] * 400)
    assert buffer.depth().rows == before


def test_a_full_disk_is_reported_and_nothing_is_half_written(tmp_path):
    path = tmp_path / "buffer"
    in_another_process(write_until_full, path)
    buffer = ReplayBuffer(path)
    rows = buffer.depth().rows
    assert 0 < rows < 200
    assert len(buffer.newest(1000)) == rows
    assert buffer.append([recorded(9, response=500)]) == 1  # there is room again


def try_read_only(path, make_read_only):
    buffer = ReplayBuffer(path)
    make_read_only()
    if os.geteuid() == 0:
        os.setegid(NOBODY)
        os.seteuid(NOBODY)
    buffer.close()
    with pytest.raises(ReplayBufferError, match="writable"):
        buffer.append([recorded()])
    with pytest.raises(ReplayBufferError, match="writable"):
        ReplayBuffer(path.with_name("another"))


def test_a_read_only_place_is_reported(open_place):
    path = open_place / "buffer"
    ReplayBuffer(path).close()

    def make_read_only():
        path.chmod(0o444)
        open_place.chmod(0o555)

    in_another_process(try_read_only, path, make_read_only)


def test_a_lock_held_too_long_is_reported(tmp_path):
    ReplayBuffer(tmp_path / "buffer").close()
    other = sqlite3.connect(tmp_path / "buffer", isolation_level=None)
    impatient = ReplayBuffer(tmp_path / "buffer", busy_timeout_s=0.05)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(ReplayBufferError, match="busy_timeout_s"):
        impatient.append([recorded()])
    other.execute("ROLLBACK")
    assert impatient.append([recorded()]) == 1


def append_as_child(buffer):
    buffer.append([recorded(2)])


def test_a_fork_gets_a_connection_of_its_own(tmp_path):
    buffer = ReplayBuffer(tmp_path / "buffer")
    buffer.append([recorded(1)])
    in_another_process(append_as_child, buffer)
    buffer.append([recorded(3)])
    assert buffer.depth().rows == 3


def test_a_fork_in_the_midst_of_another_threads_transaction(tmp_path):
    buffer, is_reading, may_end = ReplayBuffer(tmp_path / "buffer"), threading.Event(), threading.Event()

    def read():
        with buffer.database.reading():
            is_reading.set()
            may_end.wait(900)

    thread = threading.Thread(target=read)
    thread.start()
    assert is_reading.wait(600)
    try:
        in_another_process(append_as_child, buffer)
    finally:
        may_end.set()
        thread.join()
    assert buffer.depth().rows == 1


def test_a_failed_block_leaves_no_trace(tmp_path):
    buffer = ReplayBuffer(tmp_path / "buffer", BufferSettings())
    with pytest.raises(ZeroDivisionError), buffer.database.writing() as db:
        db.execute("DELETE FROM settings")
        raise ZeroDivisionError
    with buffer.database.reading() as db:
        assert db.execute("SELECT count(*) FROM settings").fetchone()[0] > 0
