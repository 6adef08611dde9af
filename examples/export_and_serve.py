"""A drafter for other engines: written, read back and checked, with the command that serves it.

    python examples/export_and_serve.py --out runs/export --to sglang vllm

Nothing is started here: SGLang and vLLM want a GPU and an environment of their own. Run the commands that are printed
there, and then `adaflash bench --base-url` measures them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from adaflash_hf.cli import main as adaflash
from adaflash_hf.commands.loading import find_drafter
from adaflash_hf.embedded_target import EMBEDDED_TARGET_NAME, embedded_target_directory
from adaflash_hf.errors import AdaFlashError


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory for the exports")
    parser.add_argument("--to", nargs="+", default=["sglang", "sglang-plugin", "vllm"], help="formats")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter", default=None)
    args = parser.parse_args(argv)

    drafter = find_drafter(args.target, args.drafter)
    # Engines want files; those of the embedded target are in the cache.
    target = str(embedded_target_directory()) if args.target == EMBEDDED_TARGET_NAME else args.target
    failed = []
    for name in args.to:
        sys.stdout.write(f"\n== {name}\n")
        if adaflash(["export", drafter, str(args.out / name), "--to", name, "--target", target, "--force"]) != 0:
            failed.append(name)  # the reason has been printed
    adaflash(["inspect", drafter])
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except AdaFlashError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
