"""Measure speedup and tau on your own prompts: plain and AdaFlash in turn, in one process.

Plain decoding runs twice: on the model as it was loaded, which is what `generate()` does without this package, and on
the same rearranged weights as AdaFlash, which tells what drafting alone gives.

    python examples/measure_speedup.py --prompts prompts.jsonl --limit 50 --max-new-tokens 192 --out speedup.json

Prompt files are JSON Lines (or a JSON array) with a field such as `question`, `prompt`, `instruction`, `text`, `turns`
or `messages`. The default target and drafter are the embedded SmolLM2-135M and the checkpoint in this repository.
`adaflash evaluate speed` measures the same on a workload by name, and draws it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from adaflash_hf.commands.evaluate_speed import run_speed
from adaflash_hf.commands.loading import load_models
from adaflash_hf.errors import AdaFlashError
from adaflash_hf.output_places import check_writable, writing_to
from adaflash_hf.training.prompts import read_prompt_file


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", required=True, type=Path, help="prompt file")
    parser.add_argument("--limit", type=int, default=50, help="prompts to use")
    parser.add_argument("--max-new-tokens", type=int, default=192)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter", default=None)
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    parser.add_argument(
        "--length-policy", default="fixed", choices=["fixed", "length_head", "confidence", "cost_aware"]
    )
    parser.add_argument("--no-prepack", action="store_true", help="leave linear layers as they are")
    parser.add_argument("--out", type=Path, help="write the result here as JSON")
    args = parser.parse_args(argv)
    if args.limit < 1:
        parser.error(f"--limit is {args.limit}; it must be at least 1")

    console = Console(stderr=True)
    if args.out:
        check_writable(args.out.parent)
    prompts = read_prompt_file(args.prompts)[: args.limit]
    models = load_models(args.target, args.drafter, args.dtype, None, not args.no_prepack, console)
    result = run_speed(
        args.prompts.name,
        prompts,
        models,
        max_new_tokens=args.max_new_tokens,
        length_policy=args.length_policy,
        console=console,
    )
    if args.out:
        with writing_to(args.out):
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(result, indent=2) + "\n")
    Console().print_json(data={name: value for name, value in result.items() if name != "per_prompt"})


if __name__ == "__main__":
    try:
        main()
    except AdaFlashError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
