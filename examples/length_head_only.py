"""A length head for a drafter that has none, or a new one: the drafter itself stays as it is.

    python examples/length_head_only.py --out runs/head

The head learns, from the target's own responses, how much of a block will be accepted, so that the target verifies no
more than that. Labels come from hindsight: what followed in the response says how far a block was right. Needs
`pip install -e '.[train]'`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from adaflash_hf import DFlashDrafterModel
from adaflash_hf.cli import main as adaflash
from adaflash_hf.commands.loading import find_drafter
from adaflash_hf.errors import AdaFlashError


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory for everything")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter", default=None)
    parser.add_argument("--trajectories", type=Path, help="from `adaflash trajectories`; default: a few are made")
    parser.add_argument("--count", type=int, default=32, help="prompts, if trajectories are made")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args(argv)

    drafter = find_drafter(args.target, args.drafter)
    trajectories = args.trajectories or args.out / "trajectories"
    steps = [
        ["train", "--trajectories", trajectories, "--init", drafter, "--only", "length-head", "--target", args.target]
        + ["--out", args.out / "drafter", "--steps", args.steps, "--held-out", max(args.count // 8, 1)]
    ]
    if args.trajectories is None:
        prompts = args.out / "prompts.jsonl"
        steps[:0] = [
            ["prompts", "--out", prompts, "--count", args.count, "--target", args.target],
            ["trajectories", "--prompts", prompts, "--out", trajectories, "--target", args.target]
            + ["--max-new-tokens", args.max_new_tokens],
        ]
    for step in steps:
        if (code := adaflash([str(word) for word in step])) != 0:
            return code
    head = DFlashDrafterModel.from_pretrained(args.out / "drafter").length_head
    size = sum(parameter.numel() for parameter in head.parameters())
    sys.stdout.write(f"A head of {size} parameters; use it with length_policy='length_head'.\n")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except AdaFlashError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
