"""A drafter adapted to your own prompts by LoRA: a few megabytes beside the drafter they belong to.

    python examples/lora_adaptation.py --out runs/adapted --prompts my_prompts.jsonl

Writes the adapter, to be loaded on top of its base, and the merged drafter, to be exported, and compares both drafters
on the same held-out responses of the target. Needs `pip install -e '.[train]'`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from adaflash_hf.cli import main as adaflash
from adaflash_hf.commands.loading import find_drafter
from adaflash_hf.errors import AdaFlashError


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory for everything")
    parser.add_argument("--prompts", type=Path, required=True, help=".jsonl with your prompts")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter", default=None)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--limit", type=int, default=64, help="prompts used")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--held-out", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args(argv)

    trajectories, adapted = args.out / "trajectories", args.out / "drafter"
    for step in (
        ["trajectories", "--prompts", args.prompts, "--out", trajectories, "--target", args.target]
        + ["--limit", args.limit, "--max-new-tokens", args.max_new_tokens],
        ["train", "--trajectories", trajectories, "--init", find_drafter(args.target, args.drafter)]
        + ["--target", args.target, "--lora-rank", args.rank, "--only", "drafter", "--out", adapted]
        + ["--steps", args.steps, "--held-out", args.held_out],
    ):
        if (code := adaflash([str(word) for word in step])) != 0:
            return code
    curve = json.loads((adapted / "run.json").read_text(encoding="utf-8"))["outcome"]["curve"]
    tau = [point["eval_acceptance_length"] for point in curve]
    sys.stdout.write(f"held-out tau: {tau[0]:.3f} at step {curve[0]['step']}, {tau[-1]:.3f} at the end\n")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except AdaFlashError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
