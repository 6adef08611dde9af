"""Defaults of a training run, each with the reason for it, from what is trained on which machine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ..errors import InvalidInputError


if TYPE_CHECKING:
    from .presets import DrafterPreset


__all__ = ["Decision", "ShapeDefaults", "Situation", "decide", "decide_shape", "schedule_arguments"]

Start = Literal["scratch", "init", "length_head", "confidence_head"]

GIVEN = "given"
# The drafter's configuration calls this otherwise.
CONFIG_FIELDS = {"layers": "num_hidden_layers"}
_FINAL_LEARNING_RATE = 0.02
_FAMILY = "what the DFlash family uses"
_GPU_TRAJECTORIES_PER_STEP = 8
# Numbers in one layer's hidden states of all blocks of a batch. Autograd keeps some twenty times that for each layer
# in two bytes each: about 13 GB for five layers.
_GPU_ACTIVATIONS = 1 << 26


class Decision(NamedTuple):
    """
    One setting of a run.

    Attributes:
        name: Name of the setting.
        value: What it is.
        reason: Why; `"given"` if the user said so.
    """

    name: str
    value: Any
    reason: str


@dataclass(frozen=True)
class Situation:
    """
    What the defaults depend on.

    Attributes:
        start: `"scratch"`: a new drafter; `"init"`: an existing one goes on learning; `"length_head"`: only its head;
            `"confidence_head"`: a separate one on it.
        on_cpu: Whether the run is on a CPU.
        has_stored_teacher: Whether the trajectories hold the target's likeliest tokens.
        block_size: Of the drafter.
        hidden_size: Of the drafter.
        has_draft_vocabulary: Whether the drafter drafts some of the tokens alone.
    """

    start: Start
    on_cpu: bool
    has_stored_teacher: bool
    block_size: int
    hidden_size: int = 1024
    has_draft_vocabulary: bool = False


@dataclass(frozen=True)
class ShapeDefaults:
    """
    What the shape of a new drafter depends on.

    Attributes:
        on_cpu: Whether it is trained on a CPU.
        num_target_layers: Layers of the target.
        target_layer_ids: Layers to read unless someone says otherwise.
        choose_mask_token_id: Finds a token to stand for a row to draft; called only if it is needed.
    """

    on_cpu: bool
    num_target_layers: int
    target_layer_ids: list[int]
    choose_mask_token_id: Callable[[], int]


def decide_shape(
    defaults: ShapeDefaults, given: Mapping[str, Any], preset: DrafterPreset | None = None
) -> list[Decision]:
    """
    Settle the shape of a new drafter.

    Args:
        defaults (`ShapeDefaults`):
            What it depends on.
        given (`Mapping[str, Any]`):
            `layers`, `block_size`, `target_layer_ids` and `mask_token_id` of the user; None stands for not given.
        preset (`DrafterPreset`, *optional*):
            Stands in for what is not given.
    """
    block_size = (8, "a small drafter learns no longer one in the time there is") if defaults.on_cpu else (16, _FAMILY)
    layers = min(5, defaults.num_target_layers)
    derived: dict[str, Callable[[], tuple[Any, str]]] = {
        "layers": lambda: (layers, _FAMILY if layers == 5 else "as many as the target has"),
        "block_size": lambda: block_size,
        "target_layer_ids": lambda: (defaults.target_layer_ids, "evenly spread, from the second to the third-last"),
        "mask_token_id": lambda: (defaults.choose_mask_token_id(), "the target never says it"),
    }
    decisions = []
    for name, derive in derived.items():
        if given.get(name) is not None:
            decisions.append(Decision(name, given[name], GIVEN))
        elif preset is not None:
            decisions.append(Decision(name, preset.fields[CONFIG_FIELDS.get(name, name)], f"preset {preset.name}"))
        else:
            decisions.append(Decision(name, *derive()))
    return decisions


def decide(situation: Situation, given: Mapping[str, Any], droppable: Collection[str] = ()) -> list[Decision]:
    """
    Settle all settings of a run.

    Args:
        situation (`Situation`):
            What the defaults depend on.
        given (`Mapping[str, Any]`):
            Settings of the user; None stands for not given.
        droppable (`Collection[str]`, *optional*):
            Settings that are left out if they would change nothing: those of a file made for another run.

    Returns:
        `list[Decision]`: one for each setting that applies, in the order to show them.

    Raises:
        InvalidInputError: a setting was given that would change nothing.
    """
    chosen = {name: value for name, value in given.items() if value is not None}
    defaults = _defaults(situation, chosen)
    without_effect = chosen.keys() - {default.name for default in defaults} - set(droppable)
    if without_effect:
        name = min(without_effect)
        raise InvalidInputError(
            f"`{name}` is {chosen[name]!r}, but has no effect on what this run trains (start {situation.start!r}, "
            f"objective {chosen.get('objective', 'by default')!r}); leave it out."
        )
    return [
        Decision(default.name, chosen[default.name], GIVEN) if default.name in chosen else default
        for default in defaults
    ]


def schedule_arguments(steps: int, warmup_steps: int, decay_fraction: float) -> dict[str, Any]:
    """
    Fields of `TrainingArguments` for the learning rate of a run: up, constant, and down to 2 % in a straight line.

    Args:
        steps (`int`):
            Optimizer steps of the run.
        warmup_steps (`int`):
            Steps up, at most half of the run.
        decay_fraction (`float`):
            Part of the run that goes down.
    """
    warmup_steps = min(warmup_steps, steps // 2)
    return {
        "warmup_steps": warmup_steps,
        "lr_scheduler_type": "warmup_stable_decay",
        "lr_scheduler_kwargs": {
            "num_decay_steps": min(int(steps * decay_fraction), steps - warmup_steps),
            "decay_type": "linear",
            "min_lr_ratio": _FINAL_LEARNING_RATE,
        },
    }


def _defaults(situation: Situation, chosen: Mapping[str, Any]) -> list[Decision]:
    batch = [*_batch(situation, chosen), _anchors(situation), _epochs(situation)]
    labels = Decision("length_labels", "hindsight", "what the full block would have committed is known afterwards")
    if situation.start == "length_head":
        rate = Decision("length_head_learning_rate", 2e-4, "the paper's, for a head on a frozen drafter")
        return [labels, rate, *batch, *_schedule()]
    if situation.start == "confidence_head":
        rate = Decision("length_head_learning_rate", 1e-3, "one linear layer on a frozen drafter")
        return [rate, *batch, *_schedule()]
    return [*_objective(situation, chosen), labels, *_optimization(situation, chosen), *batch, *_schedule()]


def _objective(situation: Situation, chosen: Mapping[str, Any]) -> list[Decision]:
    """What is learned. Settings that the objective does not use are left out."""
    if situation.start == "init":
        name = Decision("objective", "mixture", "the paper's objective for a drafter that already drafts")
    elif situation.has_stored_teacher:
        name = Decision("objective", "mixture", "soft targets are stored and teach more per token than hard ones")
    else:
        name = Decision("objective", "cross_entropy", "the trajectories hold no soft targets (--teacher-top-k)")
    decisions = [name]
    objective = chosen.get("objective", name.value)
    if objective == "mixture" and situation.start == "init":
        decisions += [
            Decision("hard_label_weight", 0.8, "the paper's α"),
            Decision("divergence", "reverse_kl", "the paper's: do not draft what the target would not say"),
        ]
    elif objective == "mixture":
        decisions += [
            Decision("hard_label_weight", 0.5, "half hard, half soft: best of the short runs tried"),
            Decision("divergence", "forward_kl", "has a gradient everywhere, also far from the target"),
        ]
    divergence = chosen.get("divergence", decisions[-1].value) if objective == "mixture" else objective
    if divergence == "reverse_kl":
        decisions += [
            Decision("clip", "entry", "the paper's: no single token may dominate a slot"),
            Decision("clip_threshold", 0.01, "the paper's δ, in nats"),
        ]
    elif objective == "mixture" and divergence == "forward_kl":
        decisions.append(Decision("clip", "none", "a forward KL needs no clipping"))
    decay = 7.0 if situation.block_size >= 16 else situation.block_size / 2
    if objective == "acceptance":
        decisions.append(Decision("position_decay", None, "acceptance counts later slots as far as they are reached"))
    else:
        decisions.append(Decision("position_decay", decay, "later slots count less: they are reached less often"))
    if situation.has_draft_vocabulary:
        vocabulary = Decision("vocabulary_size", 0, "the drafter has a draft vocabulary of its own")
    elif situation.on_cpu:
        vocabulary = Decision("vocabulary_size", 8192, "on a CPU the full softmax is most of the cost")
    else:
        vocabulary = Decision("vocabulary_size", 0, "all tokens: a GPU has the time")
    drafted = Decision("draft_vocabulary", False, "decoding may draft all tokens, trained or not")
    return [*decisions, vocabulary, drafted]


def _optimization(situation: Situation, chosen: Mapping[str, Any]) -> list[Decision]:
    if situation.start == "scratch" and situation.on_cpu:
        # torch's Muon iterates in bfloat16: ten seconds for one 1536 x 576 matrix where that is emulated.
        optimizer = Decision("optimizer", "adamw", "on a CPU an update by Muon takes longer than the rest of a step")
    elif situation.start == "scratch":
        optimizer = Decision("optimizer", "muon", "learns faster than AdamW from a copied start")
    else:
        optimizer = Decision("optimizer", "adamw", "small steps from where the drafter is")
    if chosen.get("optimizer", optimizer.value) == "muon":
        rates = [
            Decision("learning_rate", 2e-3, "of matrices; updates are scaled to AdamW's size"),
            Decision("vector_learning_rate", 1e-3, "of norms, by AdamW"),
        ]
    elif situation.start == "scratch":
        rates = [Decision("learning_rate", 1e-3, "twice what the DFlash family uses: small drafters stand it")]
    else:
        rates = [Decision("learning_rate", 3e-4, "the paper's")]
    return [optimizer, *rates]


def _batch(situation: Situation, chosen: Mapping[str, Any]) -> list[Decision]:
    if situation.on_cpu:
        return [
            Decision("batch_size", 2, "many small steps: a CPU gains little from larger ones"),
            Decision("gradient_accumulation", 1, "the batch fits at once"),
        ]
    per_trajectory = chosen.get("anchors", _anchors(situation).value) * situation.block_size * situation.hidden_size
    fitting = max(_GPU_ACTIVATIONS // per_trajectory, 1)
    batch_size = min(1 << (fitting.bit_length() - 1), _GPU_TRAJECTORIES_PER_STEP)
    if batch_size == _GPU_TRAJECTORIES_PER_STEP:
        reason = "trajectories per step: many anchors share each target forward"
    else:
        reason = "activations grow with anchors, block and width; see the estimate for what is left"
    accumulation = max(_GPU_TRAJECTORIES_PER_STEP // chosen.get("batch_size", batch_size), 1)
    return [
        Decision("batch_size", batch_size, reason),
        Decision(
            "gradient_accumulation",
            accumulation,
            "the batch fits at once" if accumulation == 1 else f"{_GPU_TRAJECTORIES_PER_STEP} trajectories per step",
        ),
    ]


def _anchors(situation: Situation) -> Decision:
    if situation.on_cpu:
        return Decision("anchors", 64, "more would cost more than a fresh trajectory teaches")
    return Decision("anchors", 512, _FAMILY)


def _epochs(situation: Situation) -> Decision:
    if situation.start == "scratch":
        return Decision("epochs", 6, "anchors are fresh in each")
    if situation.start == "init":
        return Decision("epochs", 2, "the paper's")
    return Decision("epochs", 1, "a small module")


def _schedule() -> list[Decision]:
    return [
        Decision("warmup_steps", 20, "the optimizer's averages need a few steps"),
        Decision("decay_fraction", 0.5, "the rate falls to 2 % over the second half of the run"),
    ]
