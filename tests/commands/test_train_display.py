from __future__ import annotations

from types import SimpleNamespace

from rich.console import Console

from adaflash_hf.commands.train_display import (
    ConsoleCallback,
    decisions_table,
    describe_estimate,
    results_table,
)
from adaflash_hf.training.estimates import TrainingEstimate
from adaflash_hf.training.recipes import Decision


def printed(*renderables):
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    for renderable in renderables:
        console.print(renderable)
    return console.export_text()


def test_tables_show_values_and_reasons():
    text = printed(decisions_table([Decision("anchors", 48, "enough")]))
    assert "anchors" in text and "48" in text and "enough" in text
    metrics = {
        "eval_acceptance_length": 2.345,
        "eval_acceptance_length_math": 2.5,
        "eval_acceptance_length_spread": 0.25,
        "eval_acceptance_position_1": 0.75,
        "eval_length_head_error": 0.125,
        "eval_length_head_bias": 0.0625,
        "eval_loss": 9.0,
    }
    text = printed(results_table(metrics))
    for expected in ("tau", "2.345", "math", "2.500", "first 1 drafts accepted", "75.0%", "0.125", "+0.06"):
        assert expected in text
    assert "9.0" not in text


def test_an_estimate_is_one_sentence():
    text = describe_estimate(TrainingEstimate(15_800_000, 100, 1.5, 150.0, 2 * 10**9, 5 * 10**8))
    assert "15.80M" in text and "100 steps of 1.50 s" in text and "2 min" in text and "2.00 GB" in text
    assert "plus activations" in text
    text = describe_estimate(TrainingEstimate(15_800_000, 100, 1.5, 150.0, 2 * 10**9, 5 * 10**8, 9 * 10**9))
    assert "with activations 9.00 GB of the GPU's memory" in text


def test_progress_prints_lines_where_there_is_no_terminal():
    console = Console(width=120, record=True, file=open("/dev/null", "w"), force_terminal=False)  # noqa: SIM115
    callback, state = ConsoleCallback(console), SimpleNamespace(global_step=0, max_steps=4)
    callback.on_train_begin(None, state, None)
    state.global_step = 2
    callback.on_step_end(None, state, None)
    callback.on_log(None, state, None, logs={"loss": 1.25, "acceptance_length": 1.5})
    callback.on_log(None, state, None, logs={"eval_acceptance_length": 2.0, "eval_acceptance_length_code": 1.75})
    callback.on_train_end(None, state, None)
    text = console.export_text()
    assert "step 2/4  loss 1.250  tau 1.50" in text and "held out: tau 2.000  code 1.750" in text and "left)" in text
