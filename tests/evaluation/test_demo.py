from __future__ import annotations

import io

import pytest
from rich.console import Console
from stand_ins import StandInDrafter, StandInTarget, byte_tokenizer

from adaflash_hf.evaluation.comparison import DecodedRun
from adaflash_hf.evaluation.demo import ColumnsDisplay, LinesDisplay, fit_new_tokens, make_display, run_demo
from adaflash_hf.evaluation.prompts import DemoPrompt


PROMPTS = [DemoPrompt("maths", "test/0", "1 + 1?"), DemoPrompt("chat", "test/1", "[bold]hello[/bold]")]


def console_of(width: int = 100, *, terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), width=width, height=30, force_terminal=terminal, color_system=None)


def run_with_rate(tok_per_s: float) -> DecodedRun:
    return DecodedRun(tuple(range(10)), 10 / tok_per_s)


def demo(console: Console, **overrides) -> tuple[StandInTarget, list]:
    target = StandInTarget()
    options = {"max_new_tokens": 8, "time_budget_s": 60.0, **overrides}
    return target, run_demo(target, byte_tokenizer(), StandInDrafter(), PROMPTS, console=console, **options)


@pytest.mark.parametrize("terminal", [False, True])
def test_demo_shows_prompts_both_sides_and_one_table(terminal):
    console = console_of(terminal=terminal)
    _, comparisons = demo(console)
    text = console.file.getvalue()
    assert len(comparisons) == 2
    # Prompts are printed as they are, not read as markup.
    assert "[bold]hello[/bold]" in text
    assert "plain" in text
    assert "AdaFlash" in text
    assert "2 of 2 identical" in text
    assert "verify lengths" not in text


def test_verbose_demo_shows_verify_lengths():
    console = console_of(140)
    demo(console, verbose=True)
    assert "verify lengths" in console.file.getvalue()


def test_drafting_options_reach_the_drafter_only():
    target, _ = demo(console_of(), drafting_kwargs={"length_policy": "fixed"})
    assert {call.get("length_policy") for call in target.calls if "assistant_model" in call} == {"fixed"}
    assert all("length_policy" not in call for call in target.calls if "assistant_model" not in call)


@pytest.mark.parametrize(
    ("plain_rate", "adaflash_rate", "expected"),
    [
        # 6 prompts x (1/20 + 1/30) s per token: 110 s buy 220 tokens, more than asked for.
        (20.0, 30.0, 128),
        # 6 x (1/5 + 1/10) s: 61 tokens.
        (5.0, 10.0, 61),
        (0.5, 1.0, 24),
    ],
)
def test_responses_are_cut_to_the_time_there_is(plain_rate, adaflash_rate, expected):
    tokens = fit_new_tokens(
        run_with_rate(plain_rate), run_with_rate(adaflash_rate), prompts=6, time_budget_s=110.0, max_new_tokens=128
    )
    assert tokens == expected


def test_demo_says_when_it_cut_responses():
    console = console_of()
    target, _ = demo(console, max_new_tokens=40, time_budget_s=0.0)
    assert "shortest to 24 of 40 tokens" in console.file.getvalue()
    assert {call["max_new_tokens"] for call in target.calls[4:]} == {24}


def test_a_short_limit_is_never_raised():
    runs = run_with_rate(0.1), run_with_rate(0.1)
    assert fit_new_tokens(*runs, prompts=6, time_budget_s=1.0, max_new_tokens=4) == 4


def test_display_fits_the_output():
    assert isinstance(make_display(console_of(terminal=True)), ColumnsDisplay)
    assert isinstance(make_display(console_of(40, terminal=True)), LinesDisplay)
    assert isinstance(make_display(console_of()), LinesDisplay)


def test_lines_are_prefixed_and_complete():
    console = console_of()
    with LinesDisplay(console) as display:
        display.write("plain", "one\ntw")
        display.write("plain", "o")
        display.finish("plain", run_with_rate(5.0))
        display.write("adaflash", "three")
        display.finish("adaflash", run_with_rate(10.0))
    assert console.file.getvalue().splitlines() == [
        "   plain | one",
        "   plain | two",
        "   plain | [10 tokens, 5.0 tok/s]",
        "AdaFlash | three",
        "AdaFlash | [10 tokens, 10.0 tok/s]",
    ]


def test_columns_show_both_texts_and_the_end_of_long_ones():
    console = console_of(terminal=True)
    with ColumnsDisplay(console) as display:
        display.write("plain", "\n".join(f"line {i}" for i in range(100)))
        display.write("adaflash", "short")
        display.finish("plain", run_with_rate(5.0))
    output = console.file.getvalue()
    # The two panels open on one line, so the last frame starts at the second to last corner.
    last_frame = output[output.rindex("╭", 0, output.rindex("╭")) :]
    assert "line 99" in last_frame
    assert "line 50" not in last_frame
    assert "short" in last_frame
    assert "10 tokens, 5.0 tok/s" in last_frame
