"""Several conversations at once, streamed as they come: greedy and sampled, with a stop string, and one given up.

    python examples/engine_streaming.py

The target is the embedded SmolLM2-135M and the drafter the one in this repository; both can be changed.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from rich.console import Console
from rich.markup import escape

from adaflash_hf import AdaFlashEngine, AsyncEngine, RequestResult
from adaflash_hf.commands.loading import LoadedModels, load_models
from adaflash_hf.errors import AdaFlashError
from adaflash_hf.training.prompts import Prompt, encode_prompts


QUESTIONS = (
    ("greedy", "What is 17 times 6? Explain step by step.", {}),
    ("seed 7", "Write two sentences about the sea.", {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "seed": 7}),
    ("to the first full stop", "Name three colours and say what you like about them.", {"stop_strings": ["."]}),
    ("no repeats", "List some animals.", {"repetition_penalty": 1.3}),
)


async def follow(
    front: AsyncEngine, models: LoadedModels, console: Console, name: str, question: str, options: dict
) -> RequestResult:
    """Prints a few words of one answer whenever they are complete, between those of the others."""
    (prompt,) = encode_prompts(models.tokenizer, [Prompt((("user", question),), "example")])
    handle = await front.submit(prompt, **{"max_new_tokens": 60, "do_sample": False, **options})
    tokens: list[int] = []
    shown = 0
    async for token in handle:
        tokens.append(token)
        # Only up to the last space: what follows may still change as its bytes come in.
        words = models.tokenizer.decode(tokens, skip_special_tokens=True)
        end = words.rfind(" ") + 1
        if end > shown + 40:
            console.print(f"[dim]{name:>24}[/]  {escape(words[shown:end].replace(chr(10), ' '))}", highlight=False)
            shown = end
    return await handle


async def give_up(front: AsyncEngine, models: LoadedModels) -> RequestResult:
    """Reads five tokens and leaves."""
    (prompt,) = encode_prompts(models.tokenizer, [Prompt((("user", "Tell me a very long story."),), "example")])
    handle = await front.submit(prompt, max_new_tokens=400)
    seen = 0
    async for _ in handle:
        seen += 1
        if seen == 5:
            handle.cancel()
    return await handle


async def run(models: LoadedModels, console: Console) -> None:
    engine = AdaFlashEngine(models.target_model, models.drafter, tokenizer=models.tokenizer, max_concurrency=8)
    async with AsyncEngine(engine) as front:
        conversations = [follow(front, models, console, *question) for question in QUESTIONS]
        *results, abandoned = await asyncio.gather(*conversations, give_up(front, models))
    for (name, question, _), result in zip(QUESTIONS, results, strict=True):
        console.rule(f"{name}: {question}")
        console.print(models.tokenizer.decode(result.token_ids, skip_special_tokens=True), markup=False)
        console.print(
            f"[dim]{len(result.token_ids)} tokens, {result.finish_reason}, tau {result.stats.acceptance_length:.2f}, "
            f"first token after {result.stats.time_to_first_token_s:.2f} s[/]"
        )
    stats = engine.statistics()
    console.rule("engine")
    console.print(
        f"{stats.generated_tokens} tokens in {stats.steps} rounds, {stats.tok_per_s:.1f} tokens per second, "
        f"tau {stats.acceptance_length:.2f}; the story was {abandoned.finish_reason} after "
        f"{len(abandoned.token_ids)} tokens"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter", default=None)
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    args = parser.parse_args()
    console = Console()
    models = load_models(args.target, args.drafter, args.dtype, None, True, console)
    asyncio.run(run(models, console))


if __name__ == "__main__":
    try:
        main()
    except AdaFlashError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
