"""Several questions in one call: a batch with left padding, each row advancing by what it accepts.

    python examples/batch.py
    python examples/batch.py --question "Name three rivers." --question "What is 12 * 12?"

For requests that come and go use the engine, see engine_streaming.py. The target is the embedded SmolLM2-135M and the
drafter the one in this repository; both can be changed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console

from adaflash_hf.commands.loading import load_models
from adaflash_hf.errors import AdaFlashError


QUESTIONS = (
    "What is 17 times 6? Explain step by step.",
    "Write a Python function that reverses a string.",
    "A shop sells 12 apples for 3 euros. What do 20 apples cost?",
    "Name three colours.",
)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--question", action="append", help="may be repeated; default: four questions")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter", default=None)
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    parser.add_argument("--max-new-tokens", type=int, default=64)
    args = parser.parse_args(argv)

    console = Console(highlight=False)
    target, tokenizer, drafter = load_models(args.target, args.drafter, args.dtype, None, True, console)
    questions = args.question or list(QUESTIONS)
    inputs = tokenizer.apply_chat_template(
        [[{"role": "user", "content": question}] for question in questions],
        add_generation_prompt=True,
        padding=True,  # on the left, which `load_models` sets
        return_dict=True,
        return_tensors="pt",
    ).to(target.device)
    output_ids = target.generate(
        **inputs, assistant_model=drafter, max_new_tokens=args.max_new_tokens, do_sample=False
    )
    answers = tokenizer.batch_decode(output_ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    for question, text in zip(questions, answers, strict=True):
        console.rule(question)
        console.print(text, markup=False)
    stats = drafter.last_generation_stats
    console.rule(f"{stats.committed_tokens} tokens, tau {stats.acceptance_length:.2f}, {stats.total_s:.1f} s")


if __name__ == "__main__":
    try:
        main()
    except AdaFlashError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
