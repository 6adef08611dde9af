"""Ablation runs: one budget, kept one by one, judged on the same blocks, and reported within a seed."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from tiny_models import tiny_drafter, tiny_target
from tiny_trajectories import make_trajectories
from torch.utils.data import Subset

from adaflash_hf.errors import InvalidInputError
from adaflash_hf.evaluation.ablation_tables import ablation_results, ablation_sections
from adaflash_hf.evaluation.ablation_variants import Variant, ablation_variants
from adaflash_hf.evaluation.ablations import (
    HEAD,
    AblationData,
    AblationSettings,
    FinishedRun,
    planned_runs,
    run_ablations,
)
from adaflash_hf.training.trajectory_dataset import TrajectoryDataset


COMMON = AblationSettings(
    target="tiny", start="tiny", start_sha256=None, trained="tiny", trained_sha256=None,
    trajectories=["somewhere"], trajectories_sha256="",
    train_trajectories=9, held_out_trajectories=3, steps=2,
    head_steps=2, batch_size=2, anchors=4, eval_anchors=6, learning_rate=1e-2, head_learning_rate=1e-2,
    warmup_steps=1, decay_fraction=0.5, position_decay=2.0, vocabulary_size=60, bf16=False,
)  # fmt: skip


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama")


@pytest.fixture(scope="module")
def data(target, tmp_path_factory):
    directory = make_trajectories(tmp_path_factory.mktemp("trajectories"), target, teacher_top_k=8)
    dataset = TrajectoryDataset(directory)
    return AblationData(Subset(dataset, range(9)), Subset(dataset, range(9, 12)))


def run(target, data, directory, runs, common=COMMON, made=None):
    seen = []

    def new_drafter(seed):
        if made is not None:
            made.append(seed)
        return tiny_drafter(target, seed=seed)

    finished = run_ablations(
        runs, new_drafter, tiny_drafter(target, seed=9), target, data, common, directory,
        lambda run, was_done: seen.append((run.key, run.seed, was_done)),
    )  # fmt: skip
    return finished, seen


def test_finished_runs_are_kept_and_the_rest_is_done(target, data, tmp_path):
    comparisons = ablation_variants(["objective"], [60], 60)
    chosen = {"objective": dict(list(comparisons["objective"].items())[:3])}
    runs = planned_runs(chosen, [3, 4])
    assert [(variant.key, seed) for variant, seed in runs] == [
        (key, seed) for seed in (3, 4) for key in ("start", "cross_entropy-v60", "forward_kl-v60")
    ]
    made = []
    first, _ = run(target, data, tmp_path, runs[:2], made=made)
    again, seen = run(target, data, tmp_path, runs, made=made)
    assert [was_done for _, _, was_done in seen] == [True, True, False, False, False, False]
    assert again[:2] == first and made == [3, 3, 3, 4, 4, 4]
    assert len(list(tmp_path.glob("*.json"))) == 6
    # Trained runs differ from the start, and what was not trained is the start itself.
    start, cross_entropy = again[0].metrics, again[1].metrics
    assert start["hard_loss"] != cross_entropy["hard_loss"] and again[0].train_s < again[1].train_s
    assert start["blocks"] == cross_entropy["blocks"] > 0


def test_the_same_run_gives_the_same_numbers(target, data, tmp_path):
    runs = [(Variant("mixture", settings={"objective": "mixture"}), 3)]
    one, _ = run(target, data, tmp_path / "one", runs)
    two, _ = run(target, data, tmp_path / "two", runs)
    assert one[0].metrics["hard_loss"] == two[0].metrics["hard_loss"]


def test_runs_of_another_budget_are_refused(target, data, tmp_path):
    runs = [(Variant("start", "nothing"), 3)]
    run(target, data, tmp_path, runs)
    with pytest.raises(InvalidInputError, match="`steps` 2, now it is 5"):
        run(target, data, tmp_path, runs, dataclasses.replace(COMMON, steps=5))
    # Also where none of the runs there is asked for, since they share the results file.
    with pytest.raises(InvalidInputError, match="`anchors` 4, now it is 8"):
        run(target, data, tmp_path, [(Variant("other"), 0)], dataclasses.replace(COMMON, anchors=8))
    run(target, data, tmp_path, runs, dataclasses.replace(COMMON, head_steps=7))
    with pytest.raises(InvalidInputError, match="`clip`"):
        run(target, data, tmp_path, [(Variant("start", "nothing", {"clip": "sum"}), 3)])


def test_heads_learn_on_copies_of_a_trained_drafter(target, data, tmp_path):
    comparisons = ablation_variants(["heads"], [], 0)
    runs = planned_runs(comparisons, [3])
    with pytest.raises(InvalidInputError, match="trained_drafter"):
        run_ablations(runs, lambda seed: None, None, target, data, COMMON, tmp_path)
    finished, _ = run(target, data, tmp_path, runs)
    # The drafter is the same in all of them, and so are the blocks its heads are judged on.
    assert len({run.metrics["acceptance_length"] for run in finished}) == 1
    assert len({(run.head["blocks"], run.head["acceptance_length"]) for run in finished}) == 1
    errors = {run.key: run.head["estimates"][HEAD]["mean_absolute_error_tokens"] for run in finished}
    assert len(errors) == 5
    # Both shapes and the confidence head; two labels are the same where hardly anything is accepted.
    assert len({errors[key] for key in ("head-hindsight", "head-hindsight-residual", "head-confidence")}) == 3
    assert all(json.loads(path.read_text())["head"] for path in tmp_path.glob("head-*.json"))


def finished_run(key, seed, tau, head=None):
    metrics = {
        "acceptance_length": tau,
        "acceptance_length_math": tau + 1,
        "acceptance_length_spread": 0.5,
        "hard_loss": 2.0,
    }
    return FinishedRun(key, seed, {}, {}, metrics, head, 7.0)


def test_differences_are_taken_within_a_seed():
    comparisons = ablation_variants(["clip"], [], 0)
    keys = {row: variant.key for row, variant in comparisons["clip"].items()}
    runs = [
        finished_run(keys["each entry (paper)"], 0, 2.0),
        finished_run(keys["each entry (paper)"], 1, 4.0),
        finished_run(keys["nothing"], 0, 2.5),
        finished_run(keys["nothing"], 1, 4.5),
        finished_run(keys["nothing"], 2, 9.0),
    ]
    common = dataclasses.replace(COMMON, trained=None)
    sections = ablation_sections(comparisons, runs, common, [0, 1, 2])
    assert "2 steps of 2 trajectories with up to 4 blocks each (at most 16 blocks)" in sections[0]
    assert "Heads" not in sections[0]
    paper, by_sum, nothing = sections[2].splitlines()[2:]
    measured = "3.000 ± 1.414 | - | 4.000 ± 1.414 | 0.500 ± 0.000 | 2.000 ± 0.000"
    assert paper == f"| each entry (paper) | {measured} | - | 2 | 7 |"
    # The third seed has nothing to be compared with.
    assert nothing.startswith("| nothing | 5.333 ± 3.329 | 0.500 ± 0.000 |") and "| 3 | 7 |" in nothing
    assert by_sum == "| sum of a slot (authors' code) | - | - | - | - | - | - | 0 | - |"
    results = ablation_results(comparisons, runs, common, [0, 1, 2])
    assert json.loads(json.dumps(results))["runs"][0]["metrics"]["acceptance_length"] == 2.0


def test_the_table_of_heads_by_hand():
    def report(error):
        choice = {"setting": "1.3", "mean_rows": 3.0, "rows_saved": 0.25, "tokens_kept": 0.9, "tokens_kept_fixed": 0.8}
        estimates = {
            "constant": {"mean_absolute_error_tokens": 1.5, "correlation": None},
            HEAD: {"mean_absolute_error_tokens": error, "correlation": 0.5},
        }
        return {"estimates": estimates, "choices": {f"{HEAD}, scale": [choice]}}

    comparisons = ablation_variants(["heads"], [], 0)
    runs = [finished_run("head-hindsight", 0, 2.0, report(1.0)), finished_run("head-truncated", 0, 2.0, report(1.2))]
    table = ablation_sections(comparisons, runs, COMMON, [0])[2].splitlines()
    assert table[2] == "| hindsight labels | 1.000 | - | 0.500 | 3.00 | 0.250 | 0.900 | 0.800 | 1 |"
    assert table[3].startswith("| truncated labels | 1.200 | 0.200 |")
    assert table[-1] == "| a constant | 1.500 | - | - | - | - | - | - | - |"


def test_seeds_decide_the_weights_of_new_heads(target, data, tmp_path):
    variant = ablation_variants(["heads"], [], 0)["heads"]["confidence head"]
    one, two = run(target, data, tmp_path, [(variant, 0), (variant, 1)])[0]
    assert one.metrics["confidence_head_loss"] != two.metrics["confidence_head_loss"]
    assert torch.isfinite(torch.tensor(one.metrics["confidence_head_loss"]))
