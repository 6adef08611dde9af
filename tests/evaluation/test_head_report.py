from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_drafter, tiny_target
from tiny_trajectories import make_trajectories

from adaflash_hf.errors import InvalidInputError
from adaflash_hf.evaluation.head_report import (
    JudgedBlocks,
    collect_blocks,
    confidence_estimates,
    constant_estimate,
    estimate_quality,
    fixed_choices,
    head_report,
    head_sections,
    length_head_estimate,
    oracle_choice,
)
from adaflash_hf.training.collator import DrafterDataCollator
from adaflash_hf.training.draft_step import DraftStep
from adaflash_hf.training.initialization import attach_length_head, new_confidence_head
from adaflash_hf.training.objectives import DraftObjective
from adaflash_hf.training.trajectory_dataset import TrajectoryDataset


def blocks_with(accepted, block_size=4, hidden_size=32):
    torch.manual_seed(0)
    hidden = torch.randn(len(accepted), block_size, hidden_size)
    return JudgedBlocks(hidden, torch.tensor(accepted), torch.zeros(len(accepted), dtype=torch.long), block_size)


def test_quality_of_an_estimate_by_hand():
    # Committed 1, 2 and 4 tokens; errors 1, 0 and 2.
    quality = estimate_quality(torch.tensor([2.0, 2.0, 2.0]), blocks_with([0, 1, 3]))
    assert quality.mean_absolute_error_tokens == pytest.approx(1.0)
    assert quality.mean_absolute_error == pytest.approx(0.25) and quality.correlation is None
    assert quality.bias_tokens == pytest.approx(-1 / 3)
    assert estimate_quality(torch.tensor([1.0, 2.0, 4.0]), blocks_with([0, 1, 3])).correlation == pytest.approx(1.0)
    assert estimate_quality(torch.tensor([3.0, 2.0, 0.0]), blocks_with([0, 1, 3])).correlation == pytest.approx(-1.0)


def test_fixed_lengths_by_hand():
    two, three, four = fixed_choices(blocks_with([0, 1, 3]))
    assert (two.setting, two.mean_rows, two.rows_saved) == ("2", 2, 0.5)
    # One draft of each block is verified: 0, 1 and 1 of 4 accepted ones are kept.
    assert two.tokens_kept == two.tokens_kept_fixed == 0.5 and two.acceptance_length == pytest.approx(1 + 2 / 3)
    assert three.tokens_kept == 0.75
    assert four.tokens_kept == 1 and four.rows_saved == 0 and four.acceptance_length == pytest.approx(1 + 4 / 3)


def test_the_oracle_keeps_everything_with_the_fewest_rows():
    oracle = oracle_choice(blocks_with([0, 1, 3]))
    # Two rows at least: 2, 2 and 4. A fixed length of 2 2/3 rows keeps 1/3 of 0.5 and 2/3 of 0.75.
    assert oracle.tokens_kept == 1 and oracle.mean_rows == pytest.approx(8 / 3)
    assert oracle.tokens_kept_fixed == pytest.approx(0.5 / 3 + 0.75 * 2 / 3)


def test_the_constant_comes_from_other_blocks():
    assert constant_estimate(blocks_with([0, 3]), blocks_with([1, 1, 1])).tolist() == [2.5, 2.5, 2.5]


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama")


def test_a_head_that_says_half_a_block(target):
    blocks = blocks_with([0, 1, 3])
    drafter = tiny_drafter(target)
    length_head, confidence_head = attach_length_head(drafter), new_confidence_head(drafter)
    for parameter in (*length_head.parameters(), *confidence_head.parameters()):
        torch.nn.init.zeros_(parameter)
    assert length_head_estimate(length_head, blocks).tolist() == [2, 2, 2]
    # Each slot with probability 1/2: 1/2 + 1/4 + 1/8 drafts are expected.
    assert confidence_estimates(confidence_head, blocks)[0].tolist() == [0.5, 0.25, 0.125]
    report = head_report(
        blocks, blocks_with([0, 3]), {"length": length_head}, {"confidence": confidence_head},
        scales=[1.0, 1.5], thresholds=[0.94, 0.25],
    )  # fmt: skip
    assert report["blocks"] == 3 and report["acceptance_length"] == pytest.approx(1 + 4 / 3)
    assert report["estimates"]["confidence"]["mean_absolute_error_tokens"] == pytest.approx(
        (0.875 + 0.125 + 2.125) / 3
    )
    assert report["estimates"]["constant"]["mean_absolute_error_tokens"] == pytest.approx((1.5 + 0.5 + 1.5) / 3)
    rows = {name: [choice["mean_rows"] for choice in choices] for name, choices in report["choices"].items()}
    # Of the confidence head 1.875 rows are 2, and 2.8125 are 3; down to 0.25 two drafts are verified.
    assert rows["length, scale"] == [2, 3] and rows["confidence, scale"] == [2, 3]
    assert rows["confidence, threshold"] == [2, 3] and rows["fixed length"] == [2, 3, 4]
    text = "\n".join(head_sections(report))
    assert "| length, scale 1.5 | 3.000 | 0.250 | 0.750 | 0.750 | 2.000 |" in text
    assert "| constant | 1.167 | 0.292 | 0.167 | - |" in text


def test_blocks_are_those_of_training(target, tmp_path):
    directory = make_trajectories(tmp_path, target, count=4)
    dataset, drafter = TrajectoryDataset(directory), tiny_drafter(target)
    blocks = collect_blocks(drafter, target, dataset, anchors_per_trajectory=6, batch_size=2)
    step = DraftStep(drafter, target, DraftObjective(1.0, labels="trajectory"))
    batch = DrafterDataCollator(drafter.config.draft_length, 6)([dataset[i] for i in range(4)])
    with torch.no_grad():
        outcome = step.run(drafter, batch)
    known = outcome.acceptance.is_known & outcome.valid
    assert blocks.accepted.tolist() == outcome.acceptance.accepted[known].tolist()
    torch.testing.assert_close(blocks.hidden_states, outcome.hidden_states[known])
    assert blocks.domain_ids.unique().tolist() == [0, 1]


def test_no_block_with_a_verdict_is_an_error(target, tmp_path, monkeypatch):
    directory = make_trajectories(tmp_path, target, count=2)
    dataset, drafter = TrajectoryDataset(directory), tiny_drafter(target)
    original = DraftStep.judge

    def unknown(self, *args, **kwargs):
        judged = original(self, *args, **kwargs)
        return judged._replace(valid=torch.zeros_like(judged.valid))

    monkeypatch.setattr(DraftStep, "judge", unknown)
    with pytest.raises(InvalidInputError, match="verdict"):
        collect_blocks(drafter, target, dataset)
