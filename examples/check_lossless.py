"""Check on real prompts that greedy tokens are those of plain `generate()`, one prompt at a time and in batches.

    python examples/check_lossless.py --prompts gsm8k.jsonl humaneval.jsonl --limit 100 --max-new-tokens 48

Exits with 1 if any response differs other than by a near-tie of the target's two best logits.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

from adaflash_hf.commands.loading import load_models
from adaflash_hf.evaluation.comparison import find_first_difference
from adaflash_hf.training.prompts import encode_prompts, read_prompt_file


def left_padded(prompts: list[list[int]], pad_token_id: int) -> dict[str, torch.Tensor]:
    """A batch of prompts padded on the left."""
    longest = max(map(len, prompts))
    rows = [[pad_token_id] * (longest - len(ids)) + ids for ids in prompts]
    mask = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask)}


def new_tokens(output_ids: torch.Tensor, prompt_length: int, eos_token_id: int) -> list[tuple[int, ...]]:
    """The generated part of each row, up to and including its first EOS."""
    rows = []
    for row in output_ids[:, prompt_length:].tolist():
        rows.append(tuple(row[: row.index(eos_token_id) + 1] if eos_token_id in row else row))
    return rows


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

    console = Console()
    models = load_models(args.target, args.drafter, args.dtype, None, True, console)
    target, tokenizer = models.target_model, models.tokenizer
    prompts = [ids for path in args.prompts for ids in encode_prompts(tokenizer, read_prompt_file(path)[: args.limit])]
    failures = 0
    for batch_size in args.batch_size:
        identical = near_ties = different = rounds = committed = 0
        starts = range(0, len(prompts), batch_size)
        for start in track(starts, description=f"batch size {batch_size}", console=console):
            batch = prompts[start : start + batch_size]
            inputs = left_padded(batch, tokenizer.pad_token_id)
            settings = {"max_new_tokens": args.max_new_tokens, "do_sample": False}
            length = inputs["input_ids"].shape[1]
            plain = new_tokens(target.generate(**inputs, **settings), length, tokenizer.eos_token_id)
            output_ids = target.generate(
                **inputs, **settings, assistant_model=models.drafter, length_policy=args.length_policy
            )
            drafted = new_tokens(output_ids, length, tokenizer.eos_token_id)
            rounds += models.drafter.last_generation_stats.rounds
            committed += models.drafter.last_generation_stats.committed_tokens
            for ids, expected, actual in zip(batch, plain, drafted, strict=True):
                difference = find_first_difference(target, torch.tensor([ids]), expected, actual)
                identical += difference is None
                near_ties += difference is not None and difference.is_near_tie
                different += difference is not None and not difference.is_near_tie
                if difference is not None:
                    console.print(f"  {difference}")
        tau = committed / max(rounds, 1)
        console.print(
            f"batch size {batch_size}, {args.dtype}, {args.max_new_tokens} new tokens: {identical} of {len(prompts)} "
            f"identical, {near_ties} near-ties, {different} different; tau {tau:.2f}"
        )
        failures += different
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
