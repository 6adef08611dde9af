"""Recent traffic on disk: bounded, with many writing processes and one that trains.

A row waits until a training round has taken it and has been confirmed, or is held out for ever by the hash of its
prompt. When the buffer is full the domain that holds most gives up its oldest row, those already trained on first, so
that a busy domain cannot push a quiet one out.
"""

from __future__ import annotations

import json
import sqlite3
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from ..errors import InvalidInputError, ReplayBufferError
from .buffer_database import HELD_OUT, TRAINED, WAITING, BufferDatabase
from .buffer_sampling import choose_balanced, newest_held_out, newest_waiting, oldest_dispensable
from .recorded_trajectory import RecordedTrajectory


__all__ = ["OTHER_DOMAIN", "BufferDepth", "BufferSettings", "DomainAcceptance", "ReplayBuffer", "TrainingRound"]

# Tags come from clients; a client that makes one up per request must not make as many domains.
MAX_DOMAINS = 64
OTHER_DOMAIN = "other"
_KEPT_ROUNDS = 1000
_IDENTITY = "identity"
_ROW = (
    "id, created_s, domain, drafter_version, prompt_length, finished, request_id, rounds, token_ids, text, "
    "version_spans"
)


@dataclass(frozen=True)
class BufferSettings:
    """
    What a buffer is made with. Whoever opens it later may move the limits, but nothing else.

    Attributes:
        max_rows: Most trajectories kept.
        max_bytes: Most payload kept; the file is about a tenth larger.
        held_out_share: Share of the prompts whose trajectories are never trained on.
        target: Name of the target all trajectories come from; None takes any.
    """

    max_rows: int = 20_000
    max_bytes: int = 2**30
    held_out_share: float = 0.125
    target: str | None = None

    def __post_init__(self) -> None:
        for name in ("max_rows", "max_bytes"):
            if getattr(self, name) < 1:
                raise InvalidInputError(f"`{name}` is {getattr(self, name)}; it must be at least 1.")
        if not 0 <= self.held_out_share < 1:
            raise InvalidInputError(f"`held_out_share` is {self.held_out_share}; it must be from 0 to below 1.")


class BufferDepth(NamedTuple):
    """
    How full a buffer is.

    Attributes:
        rows: Trajectories in it.
        bytes: Their payload.
        waiting: Trajectories no round has trained on yet.
        held_out: Trajectories kept for evaluation.
        by_domain: Rows of each domain.
        appended: Trajectories that ever came in.
    """

    rows: int
    bytes: int
    waiting: int
    held_out: int
    by_domain: dict[str, int]
    appended: int


class DomainAcceptance(NamedTuple):
    """
    How drafting fared in the traffic that is still in the buffer.

    Attributes:
        domain: Its tag.
        drafter_version: Version that drafted.
        rounds: Draft-and-verify rounds.
        accepted: Drafts accepted in them.
    """

    domain: str
    drafter_version: int
    rounds: int
    accepted: int

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per round, bonus included."""
        return 1 + self.accepted / self.rounds if self.rounds else 0.0


class TrainingRound(NamedTuple):
    """
    Trajectories that are trained on together.

    Attributes:
        id: Number of the round; grows.
        trajectory_ids: Numbers of its trajectories, in ascending order.
    """

    id: int
    trajectory_ids: tuple[int, ...]


class ReplayBuffer:
    """
    A buffer in one SQLite file.

    Any number of processes may append and read. Rounds are for one process at a time, see [`consumer_lock`].

    Args:
        path (`str` or `Path`):
            The file; made if it is not there.
        settings (`BufferSettings`, *optional*):
            Limits and target; by default those the file has, or the defaults for a new one. Those of a new one are
            settled by the first who gives some, or who appends.
        busy_timeout_s (`float`, *optional*, defaults to 30.0):
            How long to wait for other writers.
        is_durable (`bool`, *optional*, defaults to `False`):
            Whether transactions of this object survive a power failure.
        takes_existing (`bool`, *optional*, defaults to `False`):
            Whether `settings` are for a new buffer only: one that has others keeps them.

    Raises:
        ReplayBufferError: The file cannot be used; the message says why.
        InvalidInputError: It was made for another target or with another held-out share.
    """

    def __init__(
        self,
        path: str | Path,
        settings: BufferSettings | None = None,
        *,
        busy_timeout_s: float = 30.0,
        is_durable: bool = False,
        takes_existing: bool = False,
    ) -> None:
        self.database = BufferDatabase(path, busy_timeout_s=busy_timeout_s, is_durable=is_durable)
        self._wanted, self._takes_existing = settings, takes_existing
        with self.database.writing() as db:
            self.settings = self._agree_on_settings(db)

    def identity(self) -> str:
        """A name that another buffer in the same place would not have: numbers of rounds mean nothing across them."""
        with self.database.writing() as db:
            db.execute("INSERT OR IGNORE INTO settings VALUES (?, ?)", (_IDENTITY, json.dumps(uuid.uuid4().hex)))
            return json.loads(db.execute("SELECT value FROM settings WHERE name = ?", (_IDENTITY,)).fetchone()[0])

    @property
    def path(self) -> Path:
        """The file."""
        return self.database.path

    def append(self, trajectories: Sequence[RecordedTrajectory]) -> int:
        """
        Store trajectories, all or none of them, and make room for them.

        Args:
            trajectories (`Sequence[RecordedTrajectory]`):
                What was served.

        Returns:
            `int`: how many were new.
        """
        for trajectory in trajectories:
            trajectory.check()
            if trajectory.num_bytes > self.settings.max_bytes:
                raise InvalidInputError(
                    f"`trajectories` holds one of {trajectory.num_bytes} bytes; the buffer's `max_bytes` is "
                    f"{self.settings.max_bytes}. Cut it, or make the buffer larger."
                )
        with self.database.writing() as db:
            # Again each time: the file may have been replaced, and another process may have moved the limits.
            self.settings = self._agree_on_settings(db, is_appending=True)
            known = {name for (name,) in db.execute("SELECT domain FROM usage")}
            stored = 0
            for trajectory in trajectories:
                is_new_domain = trajectory.domain not in known and len(known) >= MAX_DOMAINS
                domain = OTHER_DOMAIN if is_new_domain else trajectory.domain
                known.add(domain)
                stored += self._insert(db, trajectory, domain)
            self._evict(db)
        return stored

    def read(self, ids: Iterable[int]) -> list[RecordedTrajectory]:
        """
        Trajectories by their numbers; those no longer there are left out.

        Args:
            ids (`Iterable[int]`):
                Numbers.
        """
        with self.database.reading() as db:
            rows = [db.execute(f"SELECT {_ROW} FROM trajectories WHERE id = ?", (i,)).fetchone() for i in ids]
        return [_trajectory_of(row) for row in rows if row is not None]

    def held_out(self, limit: int, *, balanced: bool = False) -> list[RecordedTrajectory]:
        """
        The newest trajectories that are never trained on.

        Args:
            limit (`int`):
                At most this many.
            balanced (`bool`, *optional*, defaults to `False`):
                Whether each domain gets an equal share of them, as far as it has them.
        """
        with self.database.reading() as db:
            ids = newest_held_out(db, limit, balanced=balanced)
        return self.read(sorted(ids))

    def newest(self, limit: int) -> list[RecordedTrajectory]:
        """
        The newest trajectories of any kind, oldest of them first.

        Args:
            limit (`int`):
                At most this many.
        """
        with self.database.reading() as db:
            rows = db.execute("SELECT id FROM trajectories ORDER BY id DESC LIMIT ?", (limit,)).fetchall()
        return self.read(sorted(i for (i,) in rows))

    def depth(self) -> BufferDepth:
        """How full it is now."""
        with self.database.reading() as db:
            usage = db.execute("SELECT domain, num_rows, num_bytes FROM usage ORDER BY domain").fetchall()
            states = dict(db.execute("SELECT state, count(*) FROM trajectories GROUP BY state").fetchall())
            last = db.execute("SELECT seq FROM sqlite_sequence WHERE name = 'trajectories'").fetchone()
        return BufferDepth(
            rows=sum(row[1] for row in usage),
            bytes=sum(row[2] for row in usage),
            waiting=states.get(WAITING, 0),
            held_out=states.get(HELD_OUT, 0),
            by_domain={domain: count for domain, count, _ in usage},
            appended=last[0] if last else 0,
        )

    def acceptance(self, since_s: float = 0.0) -> list[DomainAcceptance]:
        """
        How drafting fared, by domain and drafter version.

        Args:
            since_s (`float`, *optional*, defaults to 0.0):
                Only requests that ended later than this many seconds after the epoch.
        """
        query = (
            "SELECT domain, drafter_version, sum(num_rounds), sum(num_accepted) FROM trajectories "
            "WHERE created_s > ? GROUP BY domain, drafter_version ORDER BY domain, drafter_version"
        )
        with self.database.reading() as db:
            return [DomainAcceptance(*row) for row in db.execute(query, (since_s,))]

    # Rounds of training

    @contextmanager
    def consumer_lock(self) -> Iterator[None]:
        """Be the one process that trains; the system gives the lock back when the process ends in any way."""
        lock = FileLock(f"{self.path}.consumer-lock", timeout=0)
        try:
            lock.acquire()
        except Timeout:
            raise ReplayBufferError(
                f"`buffer` is {str(self.path)!r}, which another trainer is attached to; stop that one first, or give "
                "this one a buffer of its own."
            ) from None
        except OSError as error:
            raise ReplayBufferError(
                f"`buffer` is {str(self.path)!r}, where no lock can be made ({error}); make the directory writable."
            ) from error
        try:
            yield
        finally:
            lock.release()

    def open_round(self) -> TrainingRound | None:
        """The round that was claimed and neither confirmed nor abandoned."""
        with self.database.reading() as db:
            return _open_round(db)

    def claim(self, count: int, *, balanced: bool = False) -> TrainingRound:
        """
        Begin a round, or return the open one: what a killed trainer had claimed is trained on again.

        Without balancing it takes the newest waiting trajectories. With it, each domain in the buffer gets an equal
        share as far as it has rows: waiting ones first, newest first, then those trained on least often.

        Args:
            count (`int`):
                Trajectories of a round.
            balanced (`bool`, *optional*, defaults to `False`):
                Whether to balance over domains, with trajectories of earlier rounds where a domain has no new ones.
        """
        with self.database.writing() as db:
            found = _open_round(db)
            if found is not None:
                return found
            ids = choose_balanced(db, count) if balanced else newest_waiting(db, count)
            if not ids:
                raise InvalidInputError(
                    "`claim` found no trajectory to train on; wait until `depth().waiting` is above 0."
                )
            cursor = db.execute(
                "INSERT INTO rounds (state, created_s, num_trajectories) VALUES ('open', ?, ?)",
                (time.time(), len(ids)),
            )
            assert cursor.lastrowid is not None
            db.executemany("INSERT INTO members VALUES (?, ?)", [(i, cursor.lastrowid) for i in ids])
            return TrainingRound(cursor.lastrowid, tuple(sorted(ids)))

    def confirm(self, round_id: int) -> bool:
        """
        End a round: its trajectories have been trained on. Confirming twice changes nothing.

        Args:
            round_id (`int`):
                Number of the round.

        Returns:
            `bool`: whether the round was still open.
        """
        return self._close_round(round_id, "done")

    def abandon(self, round_id: int) -> bool:
        """
        Give a round's trajectories back untrained.

        Args:
            round_id (`int`):
                Number of the round.

        Returns:
            `bool`: whether the round was still open.
        """
        return self._close_round(round_id, "abandoned")

    def close(self) -> None:
        """Close the file; using the buffer again opens it again."""
        self.database.close()

    def _close_round(self, round_id: int, state: str) -> bool:
        with self.database.writing() as db:
            cursor = db.execute(
                "UPDATE rounds SET state = ?, finished_s = ? WHERE id = ? AND state = 'open'",
                (state, time.time(), round_id),
            )
            if cursor.rowcount == 0:
                return False
            if state == "done":
                db.execute(
                    "UPDATE trajectories SET state = ?, times_trained = times_trained + 1 "
                    "WHERE id IN (SELECT trajectory_id FROM members WHERE round_id = ?)",
                    (TRAINED, round_id),
                )
            db.execute("DELETE FROM members WHERE round_id = ?", (round_id,))
            db.execute("DELETE FROM rounds WHERE id <= ?", (round_id - _KEPT_ROUNDS,))
            # Rows that only the open round had kept, within limits that another process may have moved.
            self.settings = self._agree_on_settings(db, is_appending=True)
            self._evict(db)
        return True

    def _agree_on_settings(self, db: sqlite3.Connection, *, is_appending: bool = False) -> BufferSettings:
        query = "SELECT name, value FROM settings WHERE name != ?"
        stored = {name: json.loads(value) for name, value in db.execute(query, (_IDENTITY,))}
        wanted = self._wanted
        if not stored:
            # Whoever only looks leaves them to those who know what the buffer is for, and may be making it now.
            if wanted is None and not is_appending:
                return BufferSettings()
            stored = asdict(wanted or BufferSettings())
        elif wanted is not None and not self._takes_existing:
            if stored["target"] is None:
                stored["target"] = wanted.target
            for name in ("held_out_share", "target"):
                if getattr(wanted, name) not in (stored[name], None):
                    raise InvalidInputError(
                        f"`{name}` is {getattr(wanted, name)!r}, but the buffer {str(self.path)!r} was made with "
                        f"{stored[name]!r}. Use that, or give another file."
                    )
            if not is_appending:
                stored |= {"max_rows": wanted.max_rows, "max_bytes": wanted.max_bytes}
        else:
            return BufferSettings(**stored)
        values = [(name, json.dumps(value)) for name, value in stored.items()]
        db.executemany("INSERT OR REPLACE INTO settings VALUES (?, ?)", values)
        return BufferSettings(**stored)

    def _insert(self, db: sqlite3.Connection, trajectory: RecordedTrajectory, domain: str) -> int:
        is_held_out = trajectory.prompt_hash < self.settings.held_out_share
        cursor = db.execute(
            "INSERT INTO trajectories (created_s, domain, state, drafter_version, num_rounds, num_accepted, "
            "num_bytes, prompt_length, finished, request_id, rounds, token_ids, text, version_spans) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (request_id) DO NOTHING",
            (
                trajectory.created_s,
                domain,
                HELD_OUT if is_held_out else WAITING,
                trajectory.drafter_version,
                len(trajectory.rounds),
                int(trajectory.rounds[:, 1].sum()),
                trajectory.num_bytes,
                trajectory.prompt_length,
                trajectory.finished,
                trajectory.request_id,
                trajectory.rounds.astype("<u2").tobytes(),
                trajectory.token_ids.astype("<i4").tobytes(),
                trajectory.text,
                json.dumps(trajectory.version_spans) if trajectory.version_spans else None,
            ),
        )
        return max(cursor.rowcount, 0)

    def _evict(self, db: sqlite3.Connection) -> None:
        limits = self.settings
        while True:
            rows, size = db.execute("SELECT total(num_rows), total(num_bytes) FROM usage").fetchone()
            if rows <= limits.max_rows and size <= limits.max_bytes:
                return
            domains = db.execute("SELECT domain FROM usage ORDER BY num_bytes DESC, domain").fetchall()
            victim = next((i for (domain,) in domains if (i := oldest_dispensable(db, domain)) is not None), None)
            if victim is None:
                return  # all that is left belongs to the open round
            db.execute("DELETE FROM trajectories WHERE id = ?", (victim,))


def _trajectory_of(row: tuple[Any, ...]) -> RecordedTrajectory:
    fields = dict(zip(_ROW.split(", "), row, strict=True))
    try:
        return RecordedTrajectory.from_stored(fields)
    except ValueError as error:
        raise ReplayBufferError(
            f"Trajectory {fields['id']} of the buffer is damaged ({error}); move the file away, a new one is made."
        ) from error


def _open_round(db: sqlite3.Connection) -> TrainingRound | None:
    row = db.execute("SELECT id FROM rounds WHERE state = 'open'").fetchone()
    if row is None:
        return None
    members = db.execute("SELECT trajectory_id FROM members ORDER BY trajectory_id").fetchall()
    return TrainingRound(row[0], tuple(i for (i,) in members))
