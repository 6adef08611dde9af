"""`adaflash generate`: answer prompts with a drafter, and on request compare with plain decoding."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import InvalidInputError
from .options import (
    Baseline,
    BaselineOption,
    DeviceOption,
    DrafterOption,
    DraftProposalOption,
    Dtype,
    DtypeOption,
    LengthPolicyOption,
    PrepackOption,
    TargetOption,
    VerboseOption,
    drafting_kwargs,
    is_default,
)


if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

    from ..evaluation.comparison import Comparison, DecodedRun
    from .loading import LoadedModels


__all__ = ["generate", "read_prompts", "sampling_kwargs"]


def generate(
    context: typer.Context,
    prompts: Annotated[
        list[str] | None,
        typer.Argument(metavar="PROMPT", help="Prompts, each in quotes; '-' or none reads standard input."),
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option("--prompt-file", help="Read one prompt from this file.", dir_okay=False, exists=True)
    ] = None,
    target: TargetOption = "smollm2-135m",
    drafter: DrafterOption = None,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--no-chat", help="Use the chat template; default: if the tokenizer has one."),
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="System message; needs the chat template.")] = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", min=1, help="Longest response, in tokens.")
    ] = 256,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, help="0 is greedy; above, tokens are sampled.")
    ] = 0.0,
    top_p: Annotated[
        float | None, typer.Option("--top-p", min=0.0, max=1.0, help="Sample from the likeliest tokens of this mass.")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option("--top-k", min=1, help="Sample from this many of the likeliest tokens.")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="Makes sampling repeatable.")] = None,
    dtype: DtypeOption = Dtype.AUTO,
    device: DeviceOption = None,
    length_policy: LengthPolicyOption = None,
    draft_proposal: DraftProposalOption = None,
    prepack: PrepackOption = True,
    stream: Annotated[bool, typer.Option("--stream/--no-stream", help="Print the text as it is generated.")] = True,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also decode without a drafter, in turn, and print a table.")
    ] = False,
    repeats: Annotated[
        int, typer.Option("--repeats", min=1, help="With --compare: runs of each side per prompt; medians are shown.")
    ] = 1,
    baseline: BaselineOption = Baseline.LOADED,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per prompt and nothing else.")
    ] = False,
    verbose: VerboseOption = False,
) -> None:
    """Answer each PROMPT with the target model, drafted by AdaFlash."""
    if not compare:
        _refuse_comparing_options(context)
    texts = read_prompts(prompts or [], prompt_file)
    generate_kwargs = {"max_new_tokens": max_new_tokens, **sampling_kwargs(temperature, top_p, top_k)}

    from rich.console import Console

    from ..evaluation.prompts import encode_prompt
    from .loading import load_models

    messages = Console(stderr=True)
    models = load_models(target, drafter, dtype.value, device, prepack, messages, length_policy)
    encoded = [(text, encode_prompt(models.tokenizer, text, chat=chat, system=system)) for text in texts]
    request = _Request(
        models=models,
        prompts=encoded,
        generate_kwargs=generate_kwargs,
        drafting_kwargs=drafting_kwargs(length_policy, draft_proposal, is_greedy=temperature == 0),
        seed=seed,
        stream=stream and not as_json,
        as_json=as_json,
        verbose=verbose,
        messages=messages,
    )
    if compare:
        request.compare(repeats, baseline.value)
    else:
        request.answer()


def read_prompts(prompts: list[str], prompt_file: Path | None) -> list[str]:
    """
    Collect the prompts from the command line, a file and standard input.

    Args:
        prompts (`list[str]`):
            Arguments of the command; `"-"` stands for standard input.
        prompt_file (`Path`, *optional*):
            A file with one prompt.
    """
    texts = [sys.stdin.read() if prompt == "-" else prompt for prompt in prompts]
    if prompt_file is not None:
        try:
            texts.append(prompt_file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInputError(f"`--prompt-file` is {str(prompt_file)!r} and cannot be read: {error}") from error
    if not texts and not sys.stdin.isatty():
        texts.append(sys.stdin.read())
    if not texts:
        raise InvalidInputError("`PROMPT` is missing; pass it in quotes, with --prompt-file, or on standard input.")
    if any(not text.strip() for text in texts):
        raise InvalidInputError(
            "`PROMPT` is empty; pass some text, in quotes, with --prompt-file, or on standard input."
        )
    return texts


def sampling_kwargs(temperature: float, top_p: float | None, top_k: int | None) -> dict[str, Any]:
    """The sampling arguments of `generate()`; temperature 0 is greedy, where the others would have no effect."""
    given: dict[str, Any] = {"top_p": top_p, "top_k": top_k}
    given = {name: value for name, value in given.items() if value is not None}
    if temperature > 0:
        return {"do_sample": True, "temperature": temperature, **given}
    if given:
        name, value = next(iter(given.items()))
        raise InvalidInputError(
            f"`--{name.replace('_', '-')}` is {value}, but decoding is greedy; pass --temperature above 0 with it."
        )
    return {"do_sample": False}


def _refuse_comparing_options(context: typer.Context) -> None:
    for name in ("repeats", "baseline"):
        if not is_default(context, name):
            raise InvalidInputError(
                f"`--{name}` is given without `--compare`, so there is nothing to compare with; pass both or neither."
            )


@dataclass(frozen=True)
class _Request:
    """What one invocation asks for, with the models it asks."""

    models: LoadedModels
    prompts: Sequence[tuple[str, dict[str, Tensor]]]
    generate_kwargs: dict[str, Any]
    drafting_kwargs: dict[str, Any]
    seed: int | None
    stream: bool
    as_json: bool
    verbose: bool
    messages: Console

    def answer(self) -> None:
        """Decode every prompt with the drafter: text on standard output, everything else on standard error."""
        import torch

        from ..evaluation.comparison import TimedTextStreamer, decode_once, stats_as_dict

        for text, inputs in self.prompts:
            if self.seed is not None:
                torch.manual_seed(self.seed)
            streamer = TimedTextStreamer(self.models.tokenizer, _print_piece) if self.stream else None
            run = decode_once(
                self.models.target_model,
                inputs,
                drafter=self.models.drafter,
                streamer=streamer,
                **self.generate_kwargs,
                **self.drafting_kwargs,
            )
            if self.as_json:
                stats = stats_as_dict(run.stats) if run.stats is not None else None
                _print_json({"prompt": text, **self._describe(run), "stats": stats})
                continue
            # The stream has written the text already and only lacks the end of the line.
            typer.echo("" if self.stream else self._text(run))
            self._print_summary(run)

    def compare(self, repeats: int, baseline: str) -> None:
        """Decode every prompt both ways and print one table, or one JSON object per prompt."""
        from rich.console import Console

        from ..evaluation.comparison import compare_decoding, stats_as_dict, warm_up
        from ..evaluation.comparison_table import build_comparison_table, build_statistics_table
        from ..evaluation.demo import make_display, stream_to
        from .loading import find_baseline

        console = Console()
        plain_model = find_baseline(self.models.target_model, baseline, self.messages)
        with self.messages.status("Warming up"):
            warm_up(
                self.models.target_model,
                self.models.drafter,
                self.prompts[0][1],
                drafting_kwargs=self.drafting_kwargs,
                plain_model=plain_model,
            )
        named: list[tuple[str, Comparison]] = []
        for number, (text, inputs) in enumerate(self.prompts, start=1):
            display = make_display(console) if self.stream else None
            with display if display is not None else nullcontext():
                comparison = compare_decoding(
                    self.models.target_model,
                    self.models.drafter,
                    inputs,
                    generate_kwargs=self.generate_kwargs,
                    drafting_kwargs=self.drafting_kwargs,
                    plain_model=plain_model,
                    repeats=repeats,
                    seed=self.seed,
                    make_streamer=stream_to(display, self.models.tokenizer) if display is not None else None,
                    on_run=display.finish if display is not None else None,
                )
            named.append((f"{number}: {' '.join(text.split())[:20]}", comparison))
            if self.as_json:
                stats = comparison.adaflash[0].stats
                _print_json(
                    {
                        "prompt": text,
                        "text": self._text(comparison.adaflash[0]),
                        **comparison.as_dict(),
                        "stats": stats_as_dict(stats) if stats is not None else None,
                    }
                )
        if not self.as_json:
            console.print(build_comparison_table(named))
            if self.verbose:
                console.print(build_statistics_table(named))

    def _text(self, run: DecodedRun) -> str:
        return self.models.tokenizer.decode(run.token_ids, skip_special_tokens=True)

    def _describe(self, run: DecodedRun) -> dict[str, Any]:
        return {
            "text": self._text(run),
            "new_tokens": len(run.token_ids),
            "decode_s": run.decode_s,
            "tok_per_s": run.tok_per_s,
        }

    def _print_summary(self, run: DecodedRun) -> None:
        from ..evaluation.comparison_table import build_statistics_table

        tau = "" if run.stats is None else f", tau {run.stats.acceptance_length:.2f}"
        summary = f"{len(run.token_ids)} tokens in {run.decode_s:.2f} s: {run.tok_per_s:.1f} tok/s{tau}"
        self.messages.print(summary, style="dim", highlight=False)
        if self.verbose and run.stats is not None:
            self.messages.print(build_statistics_table([("this response", run)]))


def _print_piece(text: str) -> None:
    typer.echo(text, nl=False)


def _print_json(record: dict[str, Any]) -> None:
    typer.echo(json.dumps(record, ensure_ascii=False))
