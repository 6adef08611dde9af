"""Which training settings are compared with which; a variant that several comparisons share is trained once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ..errors import InvalidInputError


__all__ = ["COMPARISONS", "REFERENCE", "Variant", "ablation_variants"]

# Order of the tables in a report, and the row that the others of a table are compared with.
COMPARISONS = (
    "objective",
    "hard_label_weight",
    "clip_threshold",
    "clip",
    "position_decay",
    "vocabulary",
    "block",
    "start",
    "heads",
)
REFERENCE = {
    "objective": "mixture, entries clipped (AdaFlash)",
    "hard_label_weight": "α = 0.8",
    "clip_threshold": "δ = 0.01",
    "clip": "each entry (paper)",
    "position_decay": "the default",
    "block": "both ways (DFlash)",
    "start": "the target's layers",
    "heads": "hindsight labels",
}

_HARD_LABEL_WEIGHTS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
_CLIP_THRESHOLDS = (0.05, 0.01, 0.005)
# The paper's.
_WEIGHT, _THRESHOLD = 0.8, 0.01


@dataclass(frozen=True)
class Variant:
    """
    One way to train, whatever the seed.

    Attributes:
        key: Short, unique, fit for a file name.
        trains: The drafter, a head on a frozen one, or nothing: the drafter as it was.
        settings: Fields of `DrafterTrainingArguments` in which variants differ.
        head_type: Shape of a new length head.
        config: Fields of `DFlashDrafterConfig` in which its drafter differs from that of the others.
        is_random: Whether its drafter starts from random weights, whatever the others start from.
    """

    key: str
    trains: Literal["drafter", "length_head", "confidence_head", "nothing"] = "drafter"
    settings: Mapping[str, Any] = field(default_factory=dict)
    head_type: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    is_random: bool = False

    @property
    def head_of_trained(self) -> bool:
        """Whether a head is trained, on a drafter that is trained already."""
        return self.trains in ("length_head", "confidence_head")


def ablation_variants(
    comparisons: Sequence[str], vocabulary_sizes: Sequence[int], vocabulary_size: int, length_scale: float = 1.3
) -> dict[str, dict[str, Variant]]:
    """
    All variants of some comparisons.

    Args:
        comparisons (`Sequence[str]`):
            Of [`COMPARISONS`].
        vocabulary_sizes (`Sequence[int]`):
            Sizes of the training softmax to compare; 0 stands for all tokens.
        vocabulary_size (`int`):
            Size in all other comparisons.
        length_scale (`float`, *optional*, defaults to 1.3):
            Of the decoding that truncated length labels imitate.

    Returns:
        `dict[str, dict[str, Variant]]`: by comparison and by the name of a row in it; equal variants have equal keys
    """
    builders = {
        "objective": _objectives,
        "hard_label_weight": _hard_label_weights,
        "clip_threshold": _clip_thresholds,
        "clip": _clips,
        "position_decay": _position_decays,
        "vocabulary": lambda: {
            f"{size} tokens" if size else "all tokens": _with_vocabulary(_mixture(), size) for size in vocabulary_sizes
        },
        "block": _blocks,
        "start": _starts,
        "heads": lambda: _heads(length_scale),
    }
    unknown = [name for name in comparisons if name not in builders]
    if unknown:
        raise InvalidInputError(f"`comparisons` has {unknown[0]!r}; choose from {', '.join(map(repr, COMPARISONS))}.")
    chosen = {name: builders[name]() for name in COMPARISONS if name in comparisons}
    for name in chosen.keys() - {"vocabulary", "heads"}:
        chosen[name] = {row: _with_vocabulary(variant, vocabulary_size) for row, variant in chosen[name].items()}
    return chosen


def _objectives() -> dict[str, Variant]:
    return {
        "before training": Variant("start", "nothing"),
        "cross-entropy (DFlash)": Variant("cross_entropy", settings={"objective": "cross_entropy"}),
        "forward KL": Variant("forward_kl", settings={"objective": "forward_kl"}),
        "reverse KL": _reverse_kl("none", None),
        "reverse KL, entries clipped": _reverse_kl("entry", _THRESHOLD),
        "mixture, entries clipped (AdaFlash)": _mixture(),
        "half hard label, half forward KL": Variant(
            "half_forward_kl",
            settings={"objective": "mixture", "hard_label_weight": 0.5, "divergence": "forward_kl", "clip": "none"},
        ),
        # Later slots already count only as far as they are reached.
        "expected acceptance": Variant("acceptance", settings={"objective": "acceptance", "position_decay": None}),
        "half hard label, half acceptance": Variant(
            "half_acceptance",
            settings={"objective": "mixture", "hard_label_weight": 0.5, "divergence": "acceptance", "clip": "none"},
        ),
    }


def _hard_label_weights() -> dict[str, Variant]:
    return {f"α = {weight:g}": _mixture(weight) for weight in _HARD_LABEL_WEIGHTS}


def _clip_thresholds() -> dict[str, Variant]:
    rows = {"no clipping": _mixture(clip="none")}
    return rows | {f"δ = {threshold:g}": _mixture(threshold=threshold) for threshold in _CLIP_THRESHOLDS}


def _clips() -> dict[str, Variant]:
    return {
        "each entry (paper)": _mixture(),
        "sum of a slot (authors' code)": _mixture(clip="sum"),
        "nothing": _mixture(clip="none"),
    }


def _position_decays() -> dict[str, Variant]:
    mixture = _mixture()
    return {
        "the default": mixture,
        **{
            row: replace(
                mixture, key=f"{mixture.key}-decay-{decay}", settings={**mixture.settings, "position_decay": decay}
            )
            for row, decay in {"no decay": None, "2 slots": 2.0, "1 slot": 1.0}.items()
        },
    }


def _blocks() -> dict[str, Variant]:
    mixture = _mixture()
    causal = replace(mixture, key=f"{mixture.key}-causal", config={"is_causal": True})
    both = replace(mixture, key=f"{mixture.key}-both", config={"is_causal": False})
    return {"both ways (DFlash)": both, "causal": causal}


def _starts() -> dict[str, Variant]:
    mixture, hard = _mixture(), _objectives()["cross-entropy (DFlash)"]
    return {
        "the target's layers": mixture,
        "the target's layers, cross-entropy": hard,
        "at random": replace(mixture, key=f"{mixture.key}-random", is_random=True),
        "at random, cross-entropy": replace(hard, key=f"{hard.key}-random", is_random=True),
    }


def _heads(length_scale: float) -> dict[str, Variant]:
    truncated = {"length_labels": "truncated", "length_scale": length_scale}
    return {
        "hindsight labels": Variant("head-hindsight", "length_head", {"length_labels": "hindsight"}, "mean_linear"),
        "truncated labels": Variant("head-truncated", "length_head", truncated, "mean_linear"),
        "hindsight labels, authors' shape": Variant(
            "head-hindsight-residual", "length_head", {"length_labels": "hindsight"}, "mean_last_residual"
        ),
        "truncated labels, authors' shape": Variant(
            "head-truncated-residual", "length_head", truncated, "mean_last_residual"
        ),
        "confidence head": Variant("head-confidence", "confidence_head"),
    }


def _mixture(weight: float = _WEIGHT, clip: str = "entry", threshold: float = _THRESHOLD) -> Variant:
    # The ends are what other names stand for: greedy trajectories follow the teacher's likeliest token.
    if weight == 1:
        return _objectives()["cross-entropy (DFlash)"]
    if weight == 0:
        return _reverse_kl(clip, None if clip == "none" else threshold)
    settings = {"objective": "mixture", "hard_label_weight": weight, "divergence": "reverse_kl"}
    key, clipping = _clipping(clip, None if clip == "none" else threshold)
    return Variant(f"mixture-{weight:g}-{key}", settings={**settings, **clipping})


def _reverse_kl(clip: str, threshold: float | None) -> Variant:
    key, clipping = _clipping(clip, threshold)
    return Variant(f"reverse_kl-{key}", settings={"objective": "reverse_kl", **clipping})


def _clipping(clip: str, threshold: float | None) -> tuple[str, dict[str, Any]]:
    if threshold is None:
        return clip, {"clip": clip}
    return f"{clip}-{threshold:g}", {"clip": clip, "clip_threshold": threshold}


def _with_vocabulary(variant: Variant, size: int) -> Variant:
    if variant.trains != "drafter":
        return variant
    settings = {**variant.settings, "vocabulary_size": size or None}
    return replace(variant, key=f"{variant.key}-v{size or 'all'}", settings=settings)
