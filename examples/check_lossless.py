"""Check on real prompts that greedy tokens are those of plain `generate()`, one prompt at a time and in batches.

    python examples/check_lossless.py --prompts gsm8k.jsonl humaneval.jsonl --limit 100 --max-new-tokens 48

Exits with 1 if any response differs other than by a near-tie of the target's two best logits.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import track

from adaflash_hf.commands.loading import load_models
from adaflash_hf.errors import AdaFlashError
from adaflash_hf.evaluation.lossless import LosslessTally, generate_batch
from adaflash_hf.training.prompts import encode_prompts, read_prompt_file


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", required=True, nargs="+", type=Path)
    parser.add_argument("--limit", type=int, default=100, help="prompts to take from each file")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter", default=None)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--length-policy", default="fixed", choices=["fixed", "length_head"])
    args = parser.parse_args()
    if args.limit < 1:
        parser.error(f"--limit is {args.limit}; it must be at least 1")

    console = Console()
    files = [read_prompt_file(path)[: args.limit] for path in args.prompts]
    models = load_models(args.target, args.drafter, args.dtype, None, True, console)
    target, tokenizer = models.target_model, models.tokenizer
    prompts = [ids for file in files for ids in encode_prompts(tokenizer, file)]
    drafting = {"assistant_model": models.drafter, "length_policy": args.length_policy}
    failures = 0
    for batch_size in args.batch_size:
        tally, rounds, committed = LosslessTally(), 0, 0
        starts = range(0, len(prompts), batch_size)
        for start in track(starts, description=f"batch size {batch_size}", console=console):
            batch = prompts[start : start + batch_size]
            plain = generate_batch(target, batch, args.max_new_tokens)
            drafted = generate_batch(target, batch, args.max_new_tokens, **drafting)
            rounds += models.drafter.last_generation_stats.rounds
            committed += models.drafter.last_generation_stats.committed_tokens
            for ids, expected, actual in zip(batch, plain, drafted, strict=True):
                if (difference := tally.add(target, ids, expected, actual)) is not None:
                    console.print(f"  {difference}")
        console.print(
            f"batch size {batch_size}, {args.dtype}, {args.max_new_tokens} new tokens: {tally}; "
            f"tau {committed / max(rounds, 1):.2f}"
        )
        failures += tally.different
    return 1 if failures else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except AdaFlashError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
