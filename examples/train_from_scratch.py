"""A new drafter and its length head for a target, from nothing: prompts, the target's responses, training, a look.

    python examples/train_from_scratch.py --out runs/example

With these small budgets it takes a few minutes on two cores and shows that everything works; a drafter that pays needs
thousands of responses (see docs/training.md). Each step is the command of the same name and resumes when killed.
Needs `pip install -e '.[train]'`.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from adaflash_hf.cli import main as adaflash


def run(*arguments: object) -> None:
    """Shows a command and runs it."""
    words = [str(argument) for argument in arguments]
    sys.stdout.write(f"\n$ adaflash {shlex.join(words)}\n")
    if (code := adaflash(words)) != 0:
        raise SystemExit(code)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory for everything")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--prompts", type=Path, help="your own prompts, .jsonl; default: the target writes some")
    parser.add_argument("--count", type=int, default=32, help="prompts")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--block-size", type=int, default=8)
    args = parser.parse_args(argv)

    prompts, trajectories, drafter = args.prompts, args.out / "trajectories", args.out / "drafter"
    if prompts is None:
        prompts = args.out / "prompts.jsonl"
        run("prompts", "--out", prompts, "--count", args.count, "--target", args.target)
    run(
        *("trajectories", "--prompts", prompts, "--out", trajectories, "--target", args.target),
        *("--limit", args.count, "--max-new-tokens", args.max_new_tokens, "--features"),
    )
    run(
        *("train", "--trajectories", trajectories, "--out", drafter, "--target", args.target, "--from-scratch"),
        *("--layers", args.layers, "--block-size", args.block_size, "--steps", args.steps),
        *("--held-out", max(args.count // 8, 1), "--batch-size", 2),
    )
    run("inspect", drafter)


if __name__ == "__main__":
    main()
