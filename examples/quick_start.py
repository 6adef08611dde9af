"""The shortest way: load a target and its drafter, generate, and see what it gained.

    python examples/quick_start.py "A train goes 60 km in 40 minutes. How fast is that in km/h?"

The target is the embedded SmolLM2-135M and the drafter the one in this repository; both can be changed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console

from adaflash_hf.commands.loading import load_models
from adaflash_hf.errors import AdaFlashError


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", nargs="?", default="What is 17 times 6? Explain step by step.")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter", default=None)
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    parser.add_argument("--max-new-tokens", type=int, default=96)
    args = parser.parse_args(argv)

    console = Console(highlight=False)
    target, tokenizer, drafter = load_models(args.target, args.drafter, args.dtype, None, True, console)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": args.question}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    ).to(target.device)
    # The one line that differs from plain transformers: `assistant_model`.
    output_ids = target.generate(**inputs, assistant_model=drafter, max_new_tokens=args.max_new_tokens)
    console.print(
        tokenizer.decode(output_ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True), markup=False
    )
    stats = drafter.last_generation_stats
    console.print(
        f"{stats.committed_tokens} tokens in {stats.rounds} rounds: {stats.acceptance_length:.2f} tokens per "
        f"verification, {stats.draft_s:.2f} s drafting, {stats.verify_s:.2f} s verifying"
    )


if __name__ == "__main__":
    try:
        main()
    except AdaFlashError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
