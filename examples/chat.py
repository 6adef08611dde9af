"""A conversation whose answers stream as they come.

    python examples/chat.py                                              # asks you; an empty line ends it
    python examples/chat.py --say "Name three rivers." --say "Which of them is the longest?"

The target is the embedded SmolLM2-135M and the drafter the one in this repository; both can be changed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

from rich.console import Console
from transformers import TextStreamer

from adaflash_hf.commands.loading import LoadedModels, load_models
from adaflash_hf.errors import AdaFlashError


def turns(said: Sequence[str] | None, console: Console) -> Iterator[str]:
    """What the user says, from the command line or the keyboard."""
    for text in said or ():
        console.print(f"you: {text}", markup=False)
        yield text
    while not said and (text := console.input("you: ").strip()):
        yield text


def answer(models: LoadedModels, messages: list[dict[str, str]], max_new_tokens: int) -> str:
    """Streams one answer to standard output and returns it."""
    target, tokenizer, drafter = models
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    ).to(target.device)
    output_ids = target.generate(
        **inputs,
        assistant_model=drafter,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        max_new_tokens=max_new_tokens,
        do_sample=False,
    )
    return tokenizer.decode(output_ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--say", action="append", help="a turn of yours; may be repeated")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter", default=None)
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    parser.add_argument("--max-new-tokens", type=int, default=128)
    args = parser.parse_args(argv)

    console = Console(highlight=False)
    models = load_models(args.target, args.drafter, args.dtype, None, True, console)
    messages: list[dict[str, str]] = []
    for text in turns(args.say, console):
        messages.append({"role": "user", "content": text})
        messages.append({"role": "assistant", "content": answer(models, messages, args.max_new_tokens)})
        console.print(f"[dim]tau {models.drafter.last_generation_stats.acceptance_length:.2f}[/]")


if __name__ == "__main__":
    try:
        main()
    except AdaFlashError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
