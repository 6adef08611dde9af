"""The SQLite file behind a replay buffer: schema, connections, and errors that say what to do.

One connection per process, opened when first needed and again after a fork or when the file was replaced. Not covered:
network file systems, on which SQLite's write-ahead log does not work across machines.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import ReplayBufferError


__all__ = ["APPLICATION_ID", "HELD_OUT", "SCHEMA_VERSION", "TRAINED", "WAITING", "BufferDatabase"]

APPLICATION_ID = 0x41644146  # "AdAF"
SCHEMA_VERSION = 2
WAITING, TRAINED, HELD_OUT = range(3)  # states of a trajectory

_SCHEMA = """
CREATE TABLE settings (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE trajectories (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    created_s REAL NOT NULL,
    domain TEXT NOT NULL,
    state INTEGER NOT NULL,  -- 0 waits for training, 1 was trained on, 2 is held out
    times_trained INTEGER NOT NULL DEFAULT 0,
    drafter_version INTEGER NOT NULL,
    num_rounds INTEGER NOT NULL,
    num_accepted INTEGER NOT NULL,
    num_bytes INTEGER NOT NULL,
    prompt_length INTEGER NOT NULL,
    finished INTEGER NOT NULL,
    request_id TEXT UNIQUE,
    rounds BLOB NOT NULL,  -- pairs of uint16: rows verified, drafts accepted
    token_ids BLOB NOT NULL,  -- int32
    text TEXT,
    version_spans TEXT  -- JSON; null if one version drafted all
);
CREATE INDEX by_state ON trajectories (state, id);
CREATE INDEX by_domain ON trajectories (domain, state, id);

-- Kept up to date by triggers, so that no writer scans the table to know whether the buffer is full.
CREATE TABLE usage (domain TEXT PRIMARY KEY, num_rows INTEGER NOT NULL, num_bytes INTEGER NOT NULL);
CREATE TRIGGER count_insert AFTER INSERT ON trajectories BEGIN
    INSERT INTO usage VALUES (new.domain, 1, new.num_bytes) ON CONFLICT (domain) DO UPDATE
    SET num_rows = num_rows + 1, num_bytes = num_bytes + new.num_bytes;
END;
CREATE TRIGGER count_delete AFTER DELETE ON trajectories BEGIN
    UPDATE usage SET num_rows = num_rows - 1, num_bytes = num_bytes - old.num_bytes WHERE domain = old.domain;
    DELETE FROM usage WHERE domain = old.domain AND num_rows = 0;
END;

CREATE TABLE rounds (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    state TEXT NOT NULL CHECK (state IN ('open', 'done', 'abandoned')),
    created_s REAL NOT NULL,
    finished_s REAL,
    num_trajectories INTEGER NOT NULL
);
CREATE UNIQUE INDEX one_open_round ON rounds (state) WHERE state = 'open';
-- What the open round trains on; empty while there is none.
CREATE TABLE members (
    trajectory_id INTEGER PRIMARY KEY REFERENCES trajectories (id),
    round_id INTEGER NOT NULL REFERENCES rounds (id)
);
"""

# What makes a file of an earlier version one of the next.
_UPGRADES = {1: "ALTER TABLE trajectories ADD COLUMN version_spans TEXT"}

_ADVICE = {
    "SQLITE_FULL": "the disk (or its quota) is full; free some space, writing then goes on by itself",
    "SQLITE_IOERR": "the disk refuses reads or writes (full, a quota, or damaged); free some space or check it",
    "SQLITE_READONLY": "the place is read-only; make file and directory writable, or give another path",
    "SQLITE_PERM": "the place is read-only; make file and directory writable, or give another path",
    "SQLITE_CANTOPEN": "the file cannot be opened or created; check that the directory exists and is writable",
    "SQLITE_NOTADB": "it is not an SQLite file; move it away (a new one is then made), or give another path",
    "SQLITE_CORRUPT": "the file is damaged; move it and its -wal and -shm files away, a new one is then made",
    "SQLITE_BUSY": "other processes kept it locked for longer than `busy_timeout_s`; try again",
}


class BufferDatabase:
    """
    Transactions on a buffer's file.

    Args:
        path (`str` or `Path`):
            The file; made if it is not there.
        busy_timeout_s (`float`, *optional*, defaults to 30.0):
            How long to wait for other writers.
        is_durable (`bool`, *optional*, defaults to `False`):
            Whether a transaction survives a power failure, not only the end of the process.
    """

    def __init__(self, path: str | Path, *, busy_timeout_s: float = 30.0, is_durable: bool = False) -> None:
        self.path = Path(path)
        self._busy_timeout_s = busy_timeout_s
        self._is_durable = is_durable
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._opened_as: tuple[int, int, int] | None = None  # process, device and inode
        self._inherited: list[sqlite3.Connection] = []
        _DATABASES.add(self)

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """A transaction that holds the write lock from its beginning, and leaves no trace if its block fails."""
        with self._transaction("BEGIN IMMEDIATE") as connection:
            yield connection

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """A transaction that sees one state of the file throughout, whatever others write meanwhile."""
        with self._transaction("BEGIN") as connection:
            yield connection

    def check(self) -> None:
        """
        Look whether the file is whole, all of it.

        Raises:
            ReplayBufferError: it is damaged, or not a buffer.
        """
        with self.reading() as connection:
            (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            problem = " ".join(found.split())
            raise ReplayBufferError(
                f"`buffer` is {str(self.path)!r}: {problem} (SQLITE_CORRUPT): {_ADVICE['SQLITE_CORRUPT']}."
            )

    def close(self) -> None:
        """Close the connection; the next transaction opens a new one."""
        with self._lock:
            self._forget_connection()

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                connection = self._open()
                connection.execute(begin)
                try:
                    yield connection
                    connection.execute("COMMIT")
                except BaseException:
                    _roll_back(connection)
                    raise
            except sqlite3.Error as error:
                # A damaged or vanished file may have been replaced by the time of the next transaction.
                self._forget_connection()
                raise self._explained(error) from error

    def _open(self) -> sqlite3.Connection:
        if self._connection is not None and self._identity() != self._opened_as:
            self._forget_connection()
        if self._connection is None:
            connection = sqlite3.connect(
                self.path, timeout=self._busy_timeout_s, isolation_level=None, check_same_thread=False
            )
            try:
                self._prepare(connection)
            except BaseException:
                connection.close()
                raise
            self._connection, self._opened_as = connection, self._identity()
        return self._connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        # Counted first: tables and application id appear together, so whoever has seen the ones will see the other.
        is_empty = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
        application = connection.execute("PRAGMA application_id").fetchone()[0]
        is_new = is_empty and application == 0
        if not is_new and application != APPLICATION_ID:
            raise ReplayBufferError(
                f"`buffer` is {str(self.path)!r}, another program's SQLite file (application id {application:#x}); "
                "give another path."
            )
        mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        if mode != "wal":
            raise ReplayBufferError(
                f"`buffer` is {str(self.path)!r}, where SQLite's journal mode is {mode!r} instead of 'wal'; several "
                "processes need a local, writable disk. Give another path."
            )
        connection.execute(f"PRAGMA synchronous = {'FULL' if self._is_durable else 'NORMAL'}")
        connection.execute("PRAGMA foreign_keys = ON")
        if is_new:
            _create_schema(connection)
        version = _upgrade_schema(connection)
        if version != SCHEMA_VERSION:
            raise ReplayBufferError(
                f"`buffer` is {str(self.path)!r}, whose schema version is {version}; this adaflash_hf reads "
                f"{SCHEMA_VERSION}. {'Update the package' if version > SCHEMA_VERSION else 'Move the file away'}, or "
                "give another path."
            )

    def _identity(self) -> tuple[int, int, int] | None:
        try:
            stat = os.stat(self.path)
        except OSError:
            return None
        return os.getpid(), stat.st_dev, stat.st_ino

    def _forget_connection(self) -> None:
        connection, opened_as = self._connection, self._opened_as
        self._connection = self._opened_as = None
        if connection is None:
            return
        if opened_as is not None and opened_as[0] != os.getpid():
            # Closing what a fork inherited would drop the parent's locks; it is kept unused instead.
            self._inherited.append(connection)
            return
        connection.close()

    def _explained(self, error: sqlite3.Error) -> ReplayBufferError:
        name = getattr(error, "sqlite_errorname", "")
        advice = next((text for code, text in _ADVICE.items() if name.startswith(code)), "see the message")
        return ReplayBufferError(
            f"`buffer` is {str(self.path)!r}: {error} ({name or type(error).__name__}): {advice}."
        )


_DATABASES: weakref.WeakSet[BufferDatabase] = weakref.WeakSet()


def _renew_locks() -> None:
    """A thread that was in a transaction at the fork is not here to give its lock back."""
    for database in _DATABASES:
        database._lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_locks)


def _create_schema(connection: sqlite3.Connection) -> None:
    connection.execute("BEGIN IMMEDIATE")
    try:
        # Another process may have been first.
        if connection.execute("PRAGMA application_id").fetchone()[0] == 0:
            for statement in _statements(_SCHEMA):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute("COMMIT")
    except BaseException:
        _roll_back(connection)
        raise


def _upgrade_schema(connection: sqlite3.Connection) -> int:
    """Brings a file of an earlier version to this one's, and returns the version it then has."""
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    if version not in _UPGRADES:
        return version
    connection.execute("BEGIN IMMEDIATE")
    try:
        # Another process may have been first.
        while (version := connection.execute("PRAGMA user_version").fetchone()[0]) in _UPGRADES:
            connection.execute(_UPGRADES[version])
            connection.execute(f"PRAGMA user_version = {version + 1}")
        connection.execute("COMMIT")
    except BaseException:
        _roll_back(connection)
        raise
    return version


def _statements(script: str) -> Iterator[str]:
    """`executescript` would commit the open transaction first."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


def _roll_back(connection: sqlite3.Connection) -> None:
    if connection.in_transaction:
        connection.execute("ROLLBACK")
