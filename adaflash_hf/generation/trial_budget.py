"""How much time trying the side that is thought to be slower may cost."""

from __future__ import annotations

from collections.abc import Hashable


__all__ = ["TrialBudget"]

# Trials in a row that found what was expected halve the time that trials may cost, so many times at most.
_MOST_HALVINGS = 2
# A trial that lost less than this share of its time may have had bad luck.
_CLEAR_LOSS = 0.1


class TrialBudget:
    """
    Grows by a share of all time, and shrinks by what trials lose.

    Attributes:
        seconds (`float`): That the next trial may lose; below 0 after one that lost more than there was.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._confirmations: dict[Hashable, int] = {}

    def book(self, kind: Hashable, round_s: float, share: float, trial_lost_s: float | None = None) -> None:
        """
        Account for a round.

        Args:
            kind (`Hashable`):
                What kind of trial belongs to rounds like this one; each is confirmed for itself.
            round_s (`float`):
                Seconds of the round.
            share (`float`):
                Share of them that trials may cost, before any was confirmed.
            trial_lost_s (`float`, *optional*):
                Seconds that the round lost against the better side, below 0 if it won; None if it was no trial. A
                round on the better side may have bad luck, which nobody pays for.
        """
        lost_s = 0.0
        if trial_lost_s is not None:
            # Those that win make good for what others lost, and save nothing up.
            lost_s = max(trial_lost_s, min(self.seconds, 0.0))
            is_clear = lost_s > _CLEAR_LOSS * round_s
            self._confirmations[kind] = self._confirmations.get(kind, 0) + 1 if is_clear else 0
        halvings = min(self._confirmations.get(kind, 0), _MOST_HALVINGS)
        self.seconds += share / 2**halvings * round_s - lost_s

    def forget_confirmations(self) -> None:
        """What trials found holds no longer."""
        self._confirmations.clear()
