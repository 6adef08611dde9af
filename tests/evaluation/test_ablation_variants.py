from __future__ import annotations

import pytest

from adaflash_hf.errors import InvalidInputError
from adaflash_hf.evaluation.ablation_variants import COMPARISONS, REFERENCE, ablation_variants
from adaflash_hf.training.training_arguments import DrafterTrainingArguments


def all_variants():
    return ablation_variants(COMPARISONS, [2048, 8192, 0], 8192)


def test_the_issue_asks_for_these():
    comparisons = all_variants()
    assert list(comparisons) == list(COMPARISONS)
    weights = [row.removeprefix("α = ") for row in comparisons["hard_label_weight"]]
    assert weights == ["0", "0.2", "0.4", "0.6", "0.8", "1"]
    assert list(comparisons["clip_threshold"]) == ["no clipping", "δ = 0.05", "δ = 0.01", "δ = 0.005"]
    assert {variant.settings.get("clip") for variant in comparisons["clip"].values()} == {"entry", "sum", "none"}
    assert [variant.settings["vocabulary_size"] for variant in comparisons["vocabulary"].values()] == [
        2048,
        8192,
        None,
    ]
    decays = [variant.settings.get("position_decay", "default") for variant in comparisons["position_decay"].values()]
    assert decays == ["default", None, 2.0, 1.0]
    objectives = {variant.settings.get("objective") for variant in comparisons["objective"].values()}
    assert objectives == {None, "cross_entropy", "forward_kl", "reverse_kl", "mixture", "acceptance"}
    assert {variant.settings.get("length_labels") for variant in comparisons["heads"].values()} == {
        "hindsight", "truncated", None
    }  # fmt: skip
    assert all(REFERENCE[name] in comparisons[name] for name in REFERENCE)


def test_equal_variants_are_trained_once_and_different_ones_never_mixed_up():
    by_key = {}
    for rows in all_variants().values():
        for variant in rows.values():
            assert by_key.setdefault(variant.key, variant) == variant
    settings = [
        (
            variant.trains,
            variant.head_type,
            variant.is_random,
            str([*variant.settings.items(), *variant.config.items()]),
        )
        for variant in by_key.values()
    ]
    assert len(set(settings)) == len(settings)
    comparisons = all_variants()
    paper = comparisons["objective"]["mixture, entries clipped (AdaFlash)"]
    assert paper == comparisons["hard_label_weight"]["α = 0.8"] == comparisons["clip"]["each entry (paper)"]
    assert paper == comparisons["vocabulary"]["8192 tokens"]
    assert comparisons["hard_label_weight"]["α = 1"] == comparisons["objective"]["cross-entropy (DFlash)"]
    assert comparisons["hard_label_weight"]["α = 0"] == comparisons["objective"]["reverse KL, entries clipped"]


def test_every_variant_is_a_valid_training(tmp_path):
    for rows in all_variants().values():
        for variant in rows.values():
            DrafterTrainingArguments(output_dir=str(tmp_path), use_cpu=True, **variant.settings)


def test_an_unknown_comparison_is_refused():
    with pytest.raises(InvalidInputError, match="'optimizer'"):
        ablation_variants(["optimizer"], [0], 0)
