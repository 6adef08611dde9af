"""How acceptance went over time in the traffic that a replay buffer still holds."""

from __future__ import annotations

from typing import NamedTuple

from .replay_buffer import ReplayBuffer


__all__ = ["AcceptanceHistory", "acceptance_history"]


class AcceptanceHistory(NamedTuple):
    """
    Acceptance length of served traffic in equal pieces of time.

    Attributes:
        first_s: Beginning of the first piece, in seconds since the epoch.
        piece_s: Length of a piece.
        domains: For each domain one value per piece; None where it had no traffic.
    """

    first_s: float
    piece_s: float
    domains: dict[str, list[float | None]]


def acceptance_history(buffer: ReplayBuffer, pieces: int = 10) -> AcceptanceHistory:
    """
    From the oldest trajectory in the buffer to the newest.

    Args:
        buffer (`ReplayBuffer`):
            The buffer.
        pieces (`int`, *optional*, defaults to 10):
            Pieces of time.
    """
    with buffer.database.reading() as db:
        first_s, last_s = db.execute("SELECT min(created_s), max(created_s) FROM trajectories").fetchone()
        if first_s is None:
            return AcceptanceHistory(0.0, 0.0, {})
        piece_s = max((last_s - first_s) / pieces, 1.0)
        query = (
            "SELECT domain, min(cast((created_s - ?) / ? AS INTEGER), ?) AS piece, sum(num_rounds), sum(num_accepted) "
            "FROM trajectories GROUP BY domain, piece ORDER BY domain"
        )
        rows = db.execute(query, (first_s, piece_s, pieces - 1)).fetchall()
    domains: dict[str, list[float | None]] = {}
    for domain, piece, rounds, accepted in rows:
        values = domains.setdefault(domain, [None] * pieces)
        if rounds:
            values[piece] = 1 + accepted / rounds
    return AcceptanceHistory(first_s, piece_s, domains)
