"""Compare what a round costs beside the models, in this package's loop and in transformers' own DFlash loop.

    python examples/compare_loop_overhead.py --prompts prompts.jsonl --limit 8 --max-new-tokens 96

Both loops decode the same prompts with the same drafter, in turn. The forwards of target and drafter and the
projection of the drafts onto the vocabulary are timed and taken away, the rest is divided by the rounds. Times are the
processor's, on one thread, so that other processes matter little.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import nn

from adaflash_hf.commands.loading import LoadedModels, load_models
from adaflash_hf.errors import AdaFlashError
from adaflash_hf.training.prompts import encode_prompts, read_prompt_file


class ForwardClock:
    """Adds up the time of what is timed, nested parts once, and counts the forwards of the first module."""

    def __init__(self, *modules: nn.Module) -> None:
        self.seconds, self.calls, self._depth, self._begin_s = 0.0, 0, 0, 0.0
        self._hooks: list[Any] = [modules[0].register_forward_pre_hook(self._count)]
        for module in modules:
            self._hooks += [module.register_forward_pre_hook(self._enter), module.register_forward_hook(self._leave)]

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed too."""

        def timed(*args: Any) -> Any:
            self._enter()
            try:
                return function(*args)
            finally:
                self._leave()

        return timed

    def remove(self) -> None:
        """Takes the hooks off."""
        for hook in self._hooks:
            hook.remove()

    def _count(self, *args: object) -> None:
        self.calls += 1

    def _enter(self, *args: object) -> None:
        if self._depth == 0:
            self._begin_s = time.process_time()
        self._depth += 1

    def _leave(self, *args: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.seconds += time.process_time() - self._begin_s


def overhead_ms(models: LoadedModels, ids: torch.Tensor, max_new_tokens: int, **loop: Any) -> float:
    """Milliseconds a round beside the forwards. The prefill's share, which is no round, is small and in both loops."""
    target, drafter = models.target_model, models.drafter
    clock = ForwardClock(target, drafter, target.get_output_embeddings())
    drafter.__dict__["compute_logits"] = clock.timed(drafter.compute_logits)
    try:
        begin_s = time.process_time()
        target.generate(ids, max_new_tokens=max_new_tokens, do_sample=False, assistant_model=drafter, **loop)
        seconds = time.process_time() - begin_s - clock.seconds
    finally:
        clock.remove()
        del drafter.__dict__["compute_logits"]
    return 1000 * seconds / max(clock.calls - 1, 1)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", required=True, type=Path)
    parser.add_argument("--limit", type=int, default=8, help="prompts to use")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter", default=None)
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    args = parser.parse_args(arguments)
    if args.limit < 1:
        parser.error(f"--limit is {args.limit}; it must be at least 1")

    torch.set_num_threads(1)
    console = Console(stderr=True)
    chosen = read_prompt_file(args.prompts)[: args.limit]
    models = load_models(args.target, args.drafter, args.dtype, None, True, console)
    prompts = encode_prompts(models.tokenizer, chosen)
    loops: dict[str, dict[str, Any]] = {"adaflash": {}, "transformers": {"speculation_type": "dflash"}}
    found: dict[str, list[float]] = {name: [] for name in loops}
    for loop in loops.values():  # first calls pay for what is made once
        overhead_ms(models, torch.tensor([prompts[0]]), 16, **loop)
    for ids in track(prompts, description="Decoding", console=console):
        for name, loop in loops.items():
            found[name].append(overhead_ms(models, torch.tensor([ids]), args.max_new_tokens, **loop))
    result = {f"{name}_ms_per_round": round(statistics.median(times), 3) for name, times in found.items()}
    Console().print_json(data={"prompts": len(prompts), "torch": torch.__version__, **result})
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except AdaFlashError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
