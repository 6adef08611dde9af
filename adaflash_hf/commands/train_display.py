"""What `adaflash train` shows: settings with reasons, the estimate, progress, results."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from transformers import TrainerCallback

from ..training.estimates import format_duration


if TYPE_CHECKING:
    from rich.console import Console

    from ..training.estimates import TrainingEstimate
    from ..training.recipes import Decision


__all__ = [
    "ConsoleCallback",
    "decisions_table",
    "describe_estimate",
    "presets_table",
    "results_table",
]

_PREFIX = "eval_acceptance_length"
_POSITION_PREFIX = "eval_acceptance_position_"


def decisions_table(decisions: Sequence[Decision]) -> Table:
    """
    All settings of the run.

    Args:
        decisions (`Sequence[Decision]`):
            From [`decide`].
    """
    table = Table(title="Settings")
    for heading in ("setting", "value", "why"):
        table.add_column(heading, overflow="fold")
    for decision in decisions:
        table.add_row(decision.name, str(decision.value), decision.reason)
    return table


def presets_table() -> Table:
    """The presets of `adaflash train --preset`."""
    from ..training.presets import PRESETS

    table = Table(title="Presets")
    table.add_column("preset", no_wrap=True)
    for heading in ("target", "layers", "hidden", "MLP", "heads", "block", "reads layers", "mask token"):
        table.add_column(heading, overflow="fold")
    for preset in PRESETS.values():
        fields = preset.fields
        names = ("num_hidden_layers", "hidden_size", "intermediate_size")
        heads = f"{fields['num_attention_heads']}/{fields['num_key_value_heads']}"
        layer_ids = ",".join(map(str, fields["target_layer_ids"]))
        sizes = [str(fields[name]) for name in names]
        block, mask = str(fields["block_size"]), str(fields["mask_token_id"])
        table.add_row(preset.name, preset.target, *sizes, heads, block, layer_ids, mask)
    return table


def describe_estimate(estimate: TrainingEstimate) -> str:
    """
    One sentence on what the run will take.

    Args:
        estimate (`TrainingEstimate`):
            From [`estimate_training`].
    """
    activations = "plus activations"
    if estimate.peak_bytes is not None:
        activations = f"with activations {_gigabytes(estimate.peak_bytes)} of the GPU's memory at most"
    return (
        f"{estimate.trainable_parameters / 1e6:.2f}M trained parameters, {estimate.steps} steps of "
        f"{estimate.step_s:.2f} s: about {format_duration(estimate.total_s)} without evaluations; "
        f"{_gigabytes(estimate.weights_bytes)} of weights and {_gigabytes(estimate.training_bytes)} for gradients, "
        f"optimizer and logits, {activations}."
    )


def results_table(metrics: Mapping[str, float]) -> Table:
    """
    Acceptance on held-out trajectories.

    Args:
        metrics (`Mapping[str, float]`):
            From `DrafterTrainer.evaluate`.
    """
    table = Table(title="Held-out acceptance, greedy hindsight")
    table.add_column("")
    table.add_column("value", justify="right")
    names = {_PREFIX: "acceptance length (tau)", f"{_PREFIX}_spread": "spread between domains"}
    for key, value in metrics.items():
        if key.startswith(_PREFIX):
            table.add_row(names.get(key, f"  {key.removeprefix(_PREFIX + '_')}"), f"{value:.3f}")
        elif key.startswith(_POSITION_PREFIX):
            table.add_row(f"first {key.removeprefix(_POSITION_PREFIX)} drafts accepted", f"{value:.1%}")
    if "eval_length_head_error" in metrics:
        table.add_row("length head, mean error as a share of the block", f"{metrics['eval_length_head_error']:.3f}")
        table.add_row("length head, how much too much it expects", f"{metrics['eval_length_head_bias']:+.3f}")
    if "eval_confidence_head_error" in metrics:
        error = metrics["eval_confidence_head_error"]
        table.add_row("confidence head, mean error as a share of the block", f"{error:.3f}")
    return table


class ConsoleCallback(TrainerCallback):
    """
    A progress bar on a terminal, and a line for each evaluation; elsewhere a line for each log entry.

    Args:
        console (`rich.console.Console`):
            Where to print.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("Training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[status]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=None, status="")
        self._first_step, self._begin = 0, 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the bar."""
        self._first_step, self._begin = state.global_step, time.monotonic()
        self._progress.update(self._task, total=state.max_steps, completed=state.global_step)
        self._progress.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Move the bar."""
        self._progress.update(self._task, completed=state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop the bar."""
        self._progress.stop()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Show loss and acceptance."""
        logs = logs or {}
        if _PREFIX in logs:
            domains = "  ".join(
                f"{key.removeprefix(_PREFIX + '_')} {value:.3f}"
                for key, value in logs.items()
                if key.startswith(_PREFIX + "_") and not key.endswith("_spread")
            )
            self._print(state, f"held out: tau {logs[_PREFIX]:.3f}  {domains}")
        elif "loss" in logs:
            status = f"loss {float(logs['loss']):.3f}"
            if "acceptance_length" in logs:
                status += f"  tau {logs['acceptance_length']:.2f}"
            self._progress.update(self._task, status=status)
            if not self._console.is_terminal:
                self._print(state, status)

    def _print(self, state: Any, text: str) -> None:
        done = state.global_step - self._first_step
        left = ""
        if done and state.global_step < state.max_steps:
            seconds = (time.monotonic() - self._begin) / done * (state.max_steps - state.global_step)
            left = f"  ({format_duration(seconds)} left)"
        self._console.print(f"step {state.global_step}/{state.max_steps}  {text}{left}", highlight=False)


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB"
