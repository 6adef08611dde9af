from __future__ import annotations

import pytest
import torch

from adaflash_hf.training.metrics import DraftMetrics, hindsight_acceptance
from adaflash_hf.training.objectives import IGNORED_LABEL as NONE


def judge(predicted, labels, finished=False):
    verdict = hindsight_acceptance(torch.tensor(predicted), torch.tensor(labels), torch.tensor(finished))
    return tuple(value.tolist() for value in verdict)


@pytest.mark.parametrize(
    ("predicted", "labels", "finished", "expected"),
    [
        ([7, 8, 9], [1, 8, 9], False, (0, True, True)),  # later hits do not count
        ([7, 8, 9], [7, 1, 9], False, (1, True, True)),
        ([7, 8, 9], [7, 8, 9], False, (3, True, True)),
        ([7, 8, 9], [7, 8, NONE], False, (2, False, False)),  # cut off: who knows
        ([7, 8, 9], [7, 8, NONE], True, (2, False, True)),  # the response ended there
        ([7, 8, 9], [7, 1, NONE], False, (1, False, True)),  # wrong before the end
    ],
)
def test_verdicts_by_hand(predicted, labels, finished, expected):
    assert judge(predicted, labels, finished) == expected


def filled_metrics(rows=slice(None)):
    predicted = torch.tensor([[[1, 2], [1, 2]], [[1, 2], [1, 2]]])
    labels = torch.tensor([[[1, 2], [1, 9]], [[9, 9], [1, NONE]]])
    verdict = hindsight_acceptance(predicted, labels, torch.tensor([[False], [False]]))
    metrics = DraftMetrics(["code", "math", "unseen"], draft_length=2)
    valid = torch.tensor([[True, True], [True, True]])
    metrics.add_blocks(type(verdict)(*(part[rows] for part in verdict)), torch.tensor([0, 1])[rows], valid[rows])
    return metrics


def test_metrics_by_hand():
    metrics = filled_metrics()
    metrics.add_losses(
        [torch.tensor(2.0), torch.tensor(1.0), torch.tensor(0.5), torch.tensor(0.25)], torch.tensor(3.0)
    )
    metrics.add_losses(
        [torch.tensor(4.0), torch.tensor(1.0), torch.tensor(0.5), torch.tensor(0.25)], torch.tensor(1.0)
    )
    metrics.add_head(torch.tensor([0.5, 0.25]), torch.tensor([0.25, 0.75]))
    values = metrics.compute("eval")
    # Accepted 2, 1 and 0; the fourth block is cut off and does not count.
    assert values["eval_blocks"] == 3 and values["eval_acceptance_length"] == 2
    assert values["eval_acceptance_length_code"] == 2.5 and values["eval_acceptance_length_math"] == 1
    assert values["eval_acceptance_length_spread"] == 1.5 and "eval_acceptance_length_unseen" not in values
    assert values["eval_acceptance_position_1"] == pytest.approx(2 / 3)
    assert values["eval_acceptance_position_2"] == pytest.approx(1 / 3)
    assert values["eval_loss"] == 2.5 and values["eval_hard_loss"] == 1
    assert values["eval_length_head_error"] == 0.375
    assert values["eval_length_head_bias"] == -0.125  # a quarter too much, a half too little
    assert values["eval_length_head_loss"] == pytest.approx((0.0625 + 0.25) / 2)


def test_parts_of_two_processes_add_up_before_the_division():
    whole, parts = filled_metrics(), [filled_metrics(slice(0, 1)), filled_metrics(slice(1, 2))]
    other = iter([value for value in vars(parts[1]).values() if isinstance(value, torch.Tensor)])
    parts[0].reduce(lambda value: value + next(other))
    assert parts[0].compute("x") == whole.compute("x")


def test_metrics_of_a_confidence_head_by_hand():
    metrics = DraftMetrics(["math"], draft_length=3)
    prefix = torch.tensor([[0.5, 0.25, 0.25], [1.0, 1.0, 1.0]])
    verdicts = torch.tensor([[1, 0, -1], [1, 1, -1]])
    metrics.add_confidence(torch.tensor(2.0), prefix, verdicts, torch.tensor([True, False]))
    metrics.add_confidence(torch.tensor(1.0), prefix[:1], torch.tensor([[0, -1, -1]]), torch.tensor([True]))
    values = metrics.compute("eval")
    # Four slots with a verdict at 2 nats, one at 1; one draft expected where one and where none was accepted.
    assert values["eval_confidence_head_loss"] == pytest.approx(9 / 5)
    assert values["eval_confidence_head_error"] == pytest.approx((0 + 1) / 2 / 4)


def test_nothing_counted_gives_no_ratios():
    assert DraftMetrics(["a"], 2).compute("eval") == {"eval_blocks": 0.0}
