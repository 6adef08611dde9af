"""The demo: a few real prompts decoded plainly and with AdaFlash, side by side, then one table.

The two sides of a prompt run one after the other, never at once: they would take each other's cores and time nothing.
On a terminal both responses stay visible in two columns as they stream; elsewhere they come as prefixed lines.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from .comparison import Comparison, DecodedRun, Side, TimedTextStreamer, compare_decoding, warm_up
from .comparison_table import build_comparison_table, build_statistics_table
from .prompts import DemoPrompt, encode_prompt


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


__all__ = [
    "ColumnsDisplay",
    "LinesDisplay",
    "ResponseDisplay",
    "fit_new_tokens",
    "make_display",
    "run_demo",
    "stream_to",
]

_SIDE_TITLES: dict[Side, str] = {"plain": "plain", "adaflash": "AdaFlash"}
_REFRESH_S = 0.1
_MINIMUM_NEW_TOKENS = 24


class ResponseDisplay(Protocol):
    """Shows the two responses to one prompt while they are generated."""

    def __enter__(self) -> ResponseDisplay: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def write(self, side: Side, text: str) -> None:
        """Add a piece of a response."""

    def finish(self, side: Side, run: DecodedRun) -> None:
        """The response of a side is complete."""


class ColumnsDisplay:
    """
    Two panels next to each other, redrawn a few times a second.

    Args:
        console (`rich.console.Console`):
            A terminal.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._texts: dict[Side, str] = {"plain": "", "adaflash": ""}
        self._subtitles: dict[Side, str] = {"plain": "", "adaflash": ""}
        self._drawn_at = 0.0
        # Without a refresh thread of its own: that would compete with the model for the cores.
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")

    def __enter__(self) -> ColumnsDisplay:
        self._live.start()
        self._draw()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._draw()
        self._live.stop()

    def write(self, side: Side, text: str) -> None:
        """Add a piece of a response; draws at most ten times a second."""
        self._texts[side] += text
        if time.monotonic() - self._drawn_at >= _REFRESH_S:
            self._draw()

    def finish(self, side: Side, run: DecodedRun) -> None:
        """Show the speed of the side under its panel."""
        self._subtitles[side] = f"{len(run.token_ids)} tokens, {run.tok_per_s:.1f} tok/s"
        self._draw()

    def _draw(self) -> None:
        width = max(self._console.width // 2 - 1, 20)
        height = max(self._console.height - 6, 6)
        panels = [self._panel(side, width, height) for side in _SIDE_TITLES]
        self._live.update(Columns(panels, padding=(0, 0), expand=False), refresh=True)
        self._drawn_at = time.monotonic()

    def _panel(self, side: Side, width: int, height: int) -> Panel:
        # A response longer than the screen scrolls: its last lines are shown.
        lines = Text(self._texts[side].strip("\n")).wrap(self._console, width - 4)[-height:]
        return Panel(Group(*lines), title=_SIDE_TITLES[side], subtitle=self._subtitles[side] or None, width=width)


class LinesDisplay:
    """
    Prefixed lines, for logs and pipes.

    Args:
        console (`rich.console.Console`):
            Where the lines go.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._pending: dict[Side, str] = {"plain": "", "adaflash": ""}

    def __enter__(self) -> LinesDisplay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def write(self, side: Side, text: str) -> None:
        """Add a piece of a response; complete lines are printed."""
        *lines, self._pending[side] = (self._pending[side] + text).split("\n")
        for line in lines:
            self._print(side, line)

    def finish(self, side: Side, run: DecodedRun) -> None:
        """Print what is left and the speed of the side."""
        if self._pending[side]:
            self._print(side, self._pending[side])
        self._pending[side] = ""
        self._print(side, f"[{len(run.token_ids)} tokens, {run.tok_per_s:.1f} tok/s]")

    def _print(self, side: Side, line: str) -> None:
        prefix = f"{_SIDE_TITLES[side]:>8} | "
        self._console.print(prefix + line, markup=False, highlight=False, soft_wrap=True)


def make_display(console: Console) -> ResponseDisplay:
    """Columns on a terminal that is wide enough, lines elsewhere."""
    return ColumnsDisplay(console) if console.is_terminal and console.width >= 60 else LinesDisplay(console)


def stream_to(
    display: ResponseDisplay, tokenizer: PreTrainedTokenizerBase
) -> Callable[[Side], TimedTextStreamer | None]:
    """What [`compare_decoding`] takes as `make_streamer` to show both sides on `display`."""
    return lambda side: TimedTextStreamer(tokenizer, functools.partial(display.write, side))


def fit_new_tokens(
    plain: DecodedRun, adaflash: DecodedRun, *, prompts: int, time_budget_s: float, max_new_tokens: int
) -> int:
    """
    How many tokens per response keep the demo within its time, from a short run of each side.

    Args:
        plain (`DecodedRun`):
            A warm plain run.
        adaflash (`DecodedRun`):
            A warm AdaFlash run.
        prompts (`int`):
            How many prompts will be decoded by both sides.
        time_budget_s (`float`):
            Seconds for all of them.
        max_new_tokens (`int`):
            Upper bound of the result.
    """
    seconds_per_token = sum(1 / run.tok_per_s for run in (plain, adaflash) if run.tok_per_s > 0)
    affordable = int(time_budget_s / (prompts * seconds_per_token)) if seconds_per_token > 0 else max_new_tokens
    return min(max_new_tokens, max(affordable, _MINIMUM_NEW_TOKENS))


def run_demo(
    target_model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafter: Any,
    prompts: Sequence[DemoPrompt],
    *,
    console: Console,
    max_new_tokens: int,
    time_budget_s: float,
    drafting_kwargs: Mapping[str, Any] | None = None,
    plain_model: PreTrainedModel | None = None,
    verbose: bool = False,
) -> list[Comparison]:
    """
    Decode `prompts` both ways, greedily, and print the responses and a table.

    Args:
        target_model (`PreTrainedModel`):
            The target.
        tokenizer (`PreTrainedTokenizerBase`):
            Its tokenizer.
        drafter (`DFlashDrafterModel`):
            The drafter.
        prompts (`Sequence[DemoPrompt]`):
            What to ask.
        console (`rich.console.Console`):
            Where everything is printed.
        max_new_tokens (`int`):
            Longest response.
        time_budget_s (`float`):
            Seconds for all responses; they are cut shorter on a slow machine.
        drafting_kwargs (`Mapping[str, Any]`, *optional*):
            Passed to `generate()` with the drafter only (`length_policy`, `draft_proposal`).
        plain_model (`PreTrainedModel`, *optional*):
            Decodes the plain side; `target_model` by default.
        verbose (`bool`, *optional*, defaults to `False`):
            Also print verify lengths and where the time went.

    Returns:
        `list[Comparison]`: one per prompt.
    """
    with console.status("Warming up"):
        last_runs = warm_up(
            target_model,
            drafter,
            encode_prompt(tokenizer, prompts[0].text),
            drafting_kwargs=drafting_kwargs,
            plain_model=plain_model,
        )
    deadline = time.monotonic() + time_budget_s
    shortest = max_new_tokens
    named: list[tuple[str, Comparison]] = []
    for number, prompt in enumerate(prompts, start=1):
        # Anew for each prompt, because the speed of a shared machine changes.
        new_tokens = fit_new_tokens(
            *last_runs,
            prompts=len(prompts) - number + 1,
            time_budget_s=deadline - time.monotonic(),
            max_new_tokens=max_new_tokens,
        )
        shortest = min(shortest, new_tokens)
        console.rule(f"{number}/{len(prompts)}  {prompt.domain}  ({prompt.source})")
        console.print(prompt.text, style="dim", markup=False, highlight=False)
        with make_display(console) as display:
            comparison = compare_decoding(
                target_model,
                drafter,
                encode_prompt(tokenizer, prompt.text),
                generate_kwargs={"max_new_tokens": new_tokens, "do_sample": False},
                drafting_kwargs=drafting_kwargs,
                plain_model=plain_model,
                make_streamer=stream_to(display, tokenizer),
                on_run=display.finish,
            )
        named.append((f"{prompt.domain} ({prompt.source})", comparison))
        last_runs = comparison.plain[0], comparison.adaflash[0]

    console.rule("Result")
    if shortest < max_new_tokens:
        console.print(
            f"Responses were cut, the shortest to {shortest} of {max_new_tokens} tokens, to end within "
            f"{time_budget_s:.0f} s; --time-budget sets another limit.",
            highlight=False,
        )
    console.print(build_comparison_table(named))
    if verbose:
        console.print(build_statistics_table(named))
    return [comparison for _, comparison in named]
