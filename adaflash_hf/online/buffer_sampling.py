"""Which rows of a replay buffer are chosen: for a round of training, for evaluation, or to go."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping

from .buffer_database import HELD_OUT, TRAINED, WAITING


__all__ = ["choose_balanced", "domain_quotas", "newest_held_out", "newest_waiting", "oldest_dispensable"]


def domain_quotas(available: Mapping[str, int], total: int) -> dict[str, int]:
    """
    Equal shares of `total`; what a domain cannot fill goes to the others.

    Args:
        available (`Mapping[str, int]`):
            Rows of each domain.
        total (`int`):
            Rows to choose.
    """
    quotas: dict[str, int] = {}
    left = total
    # The scarcest domain first: whatever it leaves is shared by all that come after.
    order = sorted(available, key=lambda domain: (available[domain], domain))
    for place, domain in enumerate(order):
        quotas[domain] = min(available[domain], -(-left // (len(order) - place)))
        left -= quotas[domain]
    return quotas


def newest_held_out(db: sqlite3.Connection, limit: int, *, balanced: bool) -> list[int]:
    """The newest rows that are never trained on, of all domains alike if asked."""
    if not balanced:
        query = "SELECT id FROM trajectories WHERE state = ? ORDER BY id DESC LIMIT ?"
        return [i for (i,) in db.execute(query, (HELD_OUT, limit))]
    quotas = domain_quotas(_counts_by_domain(db, (HELD_OUT,)), limit)
    return [i for domain, quota in quotas.items() for i in _newest_of_domain(db, domain, HELD_OUT, quota)]


def newest_waiting(db: sqlite3.Connection, count: int) -> list[int]:
    """The newest rows that no round has trained on."""
    query = "SELECT id FROM trajectories WHERE state = ? ORDER BY id DESC LIMIT ?"
    return [i for (i,) in db.execute(query, (WAITING, count))]


def _newest_of_domain(db: sqlite3.Connection, domain: str, state: int, count: int) -> list[int]:
    query = "SELECT id FROM trajectories WHERE domain = ? AND state = ? ORDER BY id DESC LIMIT ?"
    return [i for (i,) in db.execute(query, (domain, state, count))]


def choose_balanced(db: sqlite3.Connection, count: int) -> list[int]:
    """Equal shares of all domains: waiting rows first, newest first, then those trained on least often."""
    chosen: list[int] = []
    for domain, quota in domain_quotas(_counts_by_domain(db, (WAITING, TRAINED)), count).items():
        waiting = _newest_of_domain(db, domain, WAITING, quota)
        query = "SELECT id FROM trajectories WHERE domain = ? AND state = ? ORDER BY times_trained, id DESC LIMIT ?"
        trained = db.execute(query, (domain, TRAINED, quota - len(waiting))).fetchall()
        chosen += waiting + [i for (i,) in trained]
    return chosen


def _counts_by_domain(db: sqlite3.Connection, states: tuple[int, ...]) -> dict[str, int]:
    marks = ", ".join("?" * len(states))
    query = f"SELECT domain, count(*) FROM trajectories WHERE state IN ({marks}) GROUP BY domain"
    return dict(db.execute(query, states).fetchall())


def oldest_dispensable(db: sqlite3.Connection, domain: str) -> int | None:
    """What a domain gives up first: the oldest row already used, else the oldest that waits."""
    query = (
        "SELECT min(id) FROM (SELECT id FROM trajectories WHERE domain = ? AND state = ? "
        "AND id NOT IN (SELECT trajectory_id FROM members) ORDER BY id LIMIT 1)"
    )
    used, held_out, waiting = (
        db.execute(query, (domain, state)).fetchone()[0] for state in (TRAINED, HELD_OUT, WAITING)
    )
    return min((i for i in (used, held_out) if i is not None), default=waiting)
