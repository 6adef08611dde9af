"""Sampling with a drafter: the target's distribution, reproducible by seed, and two ways of proposing.

    python examples/sampling.py "Write an opening line for a novel." --temperature 0.8

`argmax` drafts the likeliest tokens and accepts those that the target samples itself; `sample` samples drafts and
corrects by rejection. Neither changes what the target would say; they differ in how much is accepted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
from rich.console import Console

from adaflash_hf.commands.loading import load_models
from adaflash_hf.errors import AdaFlashError


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", nargs="?", default="Write one sentence about the sea.")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter", default=None)
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--answers", type=int, default=3, help="answers of each kind")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)

    console = Console(highlight=False)
    target, tokenizer, drafter = load_models(args.target, args.drafter, args.dtype, None, True, console)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": args.question}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    ).to(target.device)
    for proposal in ("argmax", "sample"):
        torch.manual_seed(args.seed)
        output_ids = target.generate(
            **inputs,
            assistant_model=drafter,
            draft_proposal=proposal,
            do_sample=True,
            temperature=args.temperature,
            top_p=args.top_p,
            num_return_sequences=args.answers,
            max_new_tokens=args.max_new_tokens,
        )
        console.rule(f"{proposal}: tau {drafter.last_generation_stats.acceptance_length:.2f}")
        for row in output_ids[:, inputs["input_ids"].shape[1] :]:
            console.print(f"- {tokenizer.decode(row, skip_special_tokens=True).strip()}", markup=False)


if __name__ == "__main__":
    try:
        main()
    except AdaFlashError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
