"""What trials may cost, worked out by hand."""

from __future__ import annotations

import pytest

from adaflash_hf.generation.trial_budget import TrialBudget


def test_it_grows_by_a_share_of_all_time_and_shrinks_by_what_trials_lose() -> None:
    budget = TrialBudget()
    for _ in range(10):
        budget.book("few", 2.0, 0.01)
    assert budget.seconds == pytest.approx(0.2)
    budget.book("few", 2.0, 0.01, trial_lost_s=0.15)  # less than a tenth of the round: nothing is confirmed
    assert budget.seconds == pytest.approx(0.2 + 0.02 - 0.15)


def test_what_clear_trials_find_halves_the_share_twice_at_most() -> None:
    budget = TrialBudget()
    for earned in (0.005, 0.0025, 0.0025):
        before = budget.seconds
        budget.book("few", 1.0, 0.01, trial_lost_s=0.5)
        assert budget.seconds == pytest.approx(before + earned - 0.5)
    before = budget.seconds
    budget.book("many", 1.0, 0.01)  # of another kind
    assert budget.seconds == pytest.approx(before + 0.01)
    budget.book("few", 1.0, 0.01, trial_lost_s=0.0)  # not what was expected
    budget.book("few", 1.0, 0.01)
    assert budget.seconds == pytest.approx(before + 0.03)
    budget.book("few", 1.0, 0.01, trial_lost_s=0.5)
    budget.forget_confirmations()
    before = budget.seconds
    budget.book("few", 1.0, 0.01)
    assert budget.seconds == pytest.approx(before + 0.01)


def test_wins_make_good_for_losses_and_save_nothing_up() -> None:
    budget = TrialBudget()
    budget.book("few", 1.0, 0.01, trial_lost_s=-3.0)
    assert budget.seconds == pytest.approx(0.01)
    budget.book("few", 1.0, 0.01, trial_lost_s=0.05)
    budget.book("few", 1.0, 0.01, trial_lost_s=-3.0)
    assert budget.seconds == pytest.approx(0.01)
