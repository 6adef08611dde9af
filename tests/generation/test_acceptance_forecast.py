"""Forecasts start as what the head says and become what the target does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from simulated_rounds import stand_in_drafter

from adaflash_hf import ConfidenceHeadConfig, ConfidenceHeadModel, InvalidInputError
from adaflash_hf.generation.acceptance_forecast import AcceptanceForecaster, Forecast, geometric_rates
from adaflash_hf.generation.draft_head import LikeliestTokens


def states(ratios: list[float]) -> torch.Tensor:
    result = torch.zeros(len(ratios), 8, 2)
    result[:, 0, 0] = torch.tensor(ratios)
    return result


def test_geometric_rates() -> None:
    rates = geometric_rates(np.array([0.0, 0.75, 3.0, 99.0]), 3)
    # 0.4656 + 0.4656² + 0.4656³ = 0.783; a rate of one accepts all three
    np.testing.assert_allclose(rates, [0.0, 0.4534, 1.0, 1.0], atol=2e-3)
    for rate in rates[:3]:
        assert rate + rate**2 + rate**3 == pytest.approx([0.0, 0.75, 3.0][rates.tolist().index(rate)], abs=1e-3)


def test_untaught_forecast_is_the_heads() -> None:
    forecaster = AcceptanceForecaster(7, 8)
    survival = forecaster.survival(forecaster.forecast(stand_in_drafter(), states([0.25, 0.75])))
    # The head expects (accepted + 1) / 8 of the block.
    np.testing.assert_allclose(survival.sum(axis=1), [1.0, 5.0], atol=0.02)
    assert (np.diff(survival, axis=1) <= 0).all()


def test_without_a_head_history_speaks() -> None:
    forecaster = AcceptanceForecaster(7, 8)
    for _ in range(60):
        forecast = forecaster.forecast(stand_in_drafter(has_head=False), states([0.0]))
        forecaster.learn(forecast, [8], [2])
    survival = forecaster.survival(forecast)[0]
    np.testing.assert_allclose(survival[:3], [1, 1, 0], atol=0.15)


@pytest.mark.parametrize("verify_length", [8, 4, 2])
def test_bias_is_learned_from_however_few_rows(verify_length: int) -> None:
    """A head that expects 5 of 7 meets drafts whose slots are accepted with 0.3; censoring must not distort that."""
    rng = np.random.default_rng(0)
    forecaster = AcceptanceForecaster(7, 8)
    for _ in range(150):
        forecast = forecaster.forecast(stand_in_drafter(), states([0.75] * 8))
        hits = np.cumprod(rng.random((8, 7)) < 0.3, axis=1).sum(axis=1)
        forecaster.learn(forecast, [verify_length] * 8, np.minimum(hits, verify_length - 1).tolist())
    survival = forecaster.survival(forecast)[0]
    # Standard error of a share of 0.3 over the 400 observations that a bucket remembers: 0.023.
    assert survival[0] == pytest.approx(0.3, abs=0.08)
    if verify_length > 2:
        assert survival[1] / survival[0] == pytest.approx(0.3, abs=0.12)
    else:
        assert survival[1] / survival[0] > 0.8  # never verified, so still the head's word


def test_buckets_are_apart() -> None:
    forecaster = AcceptanceForecaster(7, 8)
    forecast = forecaster.forecast(stand_in_drafter(), states([0.2, 0.5, 0.8]))
    before = forecaster.survival(forecast)
    for _ in range(60):
        forecaster.learn(forecast, [8, 1, 8], [0, 0, 6])
    after = forecaster.survival(forecast)
    assert after[0, 0] < 0.1 and after[2, 5] > 0.85
    # Of what it was not seen to be wrong about, the head has the word.
    assert before[1, 0] * 0.7 < after[1, 0] < before[1, 0]


def test_a_few_blocks_show_how_sure_the_head_may_be() -> None:
    """It expects 3 of 7 where 1 is accepted; blocks that it says something else of are forecast better by that."""
    forecaster = AcceptanceForecaster(7, 8)
    other = forecaster.forecast(stand_in_drafter(), states([0.4]))
    before = forecaster.survival(other)[0]
    for ratio in (0.45, 0.52, 0.58, 0.65):
        forecast = forecaster.forecast(stand_in_drafter(), states([ratio] * 4))
        forecaster.learn(forecast, [4] * 4, [2, 1, 1, 0])
    after = forecaster.survival(other)[0]
    assert before[:3].sum() > 1.5 and after[:3].sum() < 1.3
    # Slots that were never verified keep what the head says of them, given those before.
    np.testing.assert_allclose(after[4:] / after[3:-1], before[4:] / before[3:-1])


def test_another_drafter_is_believed_soon() -> None:
    forecaster = AcceptanceForecaster(7, 8)
    forecast = forecaster.forecast(stand_in_drafter(), states([0.5] * 4))
    for _ in range(200):
        forecaster.learn(forecast, [8] * 4, [0] * 4)
    stubborn = forecaster.survival(forecast)[0, 0]
    forecaster.drafter_changed()
    for _ in range(4):
        forecaster.learn(forecast, [8] * 4, [7] * 4)
    assert stubborn < 0.05 and forecaster.survival(forecast)[0, 0] > 0.6


def test_a_request_that_ended_was_not_rejected() -> None:
    forecaster = AcceptanceForecaster(7, 8)
    forecast = forecaster.forecast(stand_in_drafter(), states([0.5]))
    before = forecaster.survival(forecast)
    forecaster.learn(forecast, [8], [2], ended=[True])
    after = forecaster.survival(forecast)
    assert (after[0, :2] > before[0, :2]).all()
    np.testing.assert_allclose(after[0, 2:] / after[0, 1:-1], before[0, 2:] / before[0, 1:-1])
    forecaster.learn(forecast, [8], [2], ended=[False])
    assert forecaster.survival(forecast)[0, 2] < after[0, 2]


def test_old_observations_fade() -> None:
    forecaster = AcceptanceForecaster(7, 8)
    forecast = forecaster.forecast(stand_in_drafter(), states([0.5]))
    for _ in range(3000):
        forecaster.learn(forecast, [2], [1])
    for _ in range(1000):
        forecaster.learn(forecast, [2], [0])
    assert forecaster.survival(forecast)[0, 0] < 0.15


def likeliest(*rows: list[float]) -> LikeliestTokens:
    probabilities = torch.tensor(rows)
    return LikeliestTokens(torch.zeros(probabilities.shape, dtype=torch.long), probabilities)


def test_probabilities_are_believed_until_the_target_contradicts() -> None:
    """The head is not asked. What they are wrong about is learned by slot and probability."""
    forecaster = AcceptanceForecaster(3, 4)
    sure, unsure = [0.9, 0.8, 0.7], [0.3, 0.2, 0.1]

    def forecast() -> Forecast:
        return forecaster.forecast(stand_in_drafter(), states([0.01, 0.99])[:, :4], likeliest(sure, unsure))

    np.testing.assert_allclose(forecaster.survival(forecast()), np.cumprod([sure, unsure], axis=1), rtol=1e-6)
    for _ in range(80):
        forecaster.learn(forecast(), [4, 4], [1, 3])
    survival = forecaster.survival(forecast())
    assert survival[0, 0] > 0.95 and survival[0, 1] < 0.1
    assert survival[1, 2] > 0.8


def test_slots_that_a_cut_block_lacks_are_as_usual() -> None:
    forecaster = AcceptanceForecaster(3, 4)
    for _ in range(3):
        forecaster.forecast(stand_in_drafter(), states([0.5, 0.5])[:, :4], likeliest([0.9, 0.6, 0.5], [0.7, 0.2, 0.1]))
    cut = forecaster.forecast(stand_in_drafter(), states([0.5])[:, :2], likeliest([0.8]))
    np.testing.assert_allclose(cut.rates, [[0.8, 0.4, 0.3]], rtol=1e-6)
    assert forecaster.can_forecast_cut


def test_confidence_head_comes_first() -> None:
    torch.manual_seed(0)
    head = ConfidenceHeadModel(ConfidenceHeadConfig(hidden_size=4, draft_length=3))
    hidden = torch.randn(2, 4, 4)
    expected = head(hidden).prefix_probabilities.detach().numpy()
    for forecaster, drafter in [
        (AcceptanceForecaster(3, 4, head), stand_in_drafter()),
        (AcceptanceForecaster(3, 4), SimpleNamespace(confidence_head=head, length_head=None)),
    ]:
        survival = forecaster.survival(forecaster.forecast(drafter, hidden))
        np.testing.assert_allclose(survival, expected, rtol=1e-5)
    wrong: Any = AcceptanceForecaster(5, 6, head)
    with pytest.raises(InvalidInputError, match="forecasts 3 slots, but the drafter drafts 5"):
        wrong.forecast(stand_in_drafter(), hidden)


def test_what_a_head_says_of_a_cut_block_is_remembered_apart() -> None:
    """The head expects five drafts of whole blocks, which are not accepted, and of cut ones, which are."""
    forecaster = AcceptanceForecaster(7, 8)
    for _ in range(60):
        whole = forecaster.forecast(stand_in_drafter(), states([0.75] * 4))
        forecaster.learn(whole, [8] * 4, [0] * 4)
        cut = forecaster.forecast(stand_in_drafter(), states([0.75] * 4)[:, :3])
        forecaster.learn(cut, [3] * 4, [2] * 4)
    assert forecaster.can_forecast_cut
    assert forecaster.survival(whole)[0, 0] < 0.1
    survival = forecaster.survival(cut)[0]
    assert survival.shape == (7,) and survival[1] > 0.9
    # The third slot was only ever seen in whole blocks, and never reached there.
    assert survival[2] == pytest.approx(
        survival[1] * forecaster.forecast(stand_in_drafter(), states([0.75])).rates[0, 2], abs=0.1
    )
