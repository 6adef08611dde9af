"""Check on real prompts that an engine full of requests that come and go says what plain `generate()` says.

    python examples/check_engine_lossless.py --prompts gsm8k.jsonl humaneval.jsonl --limit 100 --max-new-tokens 64

Requests are submitted at random times, run beside up to 15 others, and some are cancelled on the way; of those the
tokens up to then count. Exits with 1 if any response differs other than by a near-tie of the target's two best logits.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import track

from adaflash_hf import AdaFlashEngine, RequestHandle
from adaflash_hf.commands.loading import LoadedModels, load_models
from adaflash_hf.errors import AdaFlashError
from adaflash_hf.evaluation.lossless import LosslessTally, generate_batch
from adaflash_hf.training.prompts import encode_prompts, read_prompt_file


def plain_responses(
    models: LoadedModels, prompts: list[list[int]], args: argparse.Namespace, console: Console
) -> list[tuple[int, ...]]:
    """What transformers' own loop says, in padded batches of prompts of like length."""
    by_length = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    responses: dict[int, tuple[int, ...]] = {}
    for start in track(range(0, len(prompts), args.concurrency), description="plain", console=console):
        members = by_length[start : start + args.concurrency]
        batch = generate_batch(models.target_model, [prompts[index] for index in members], args.max_new_tokens)
        responses.update(zip(members, batch, strict=True))
    return [responses[index] for index in range(len(prompts))]


def run_engine(engine: AdaFlashEngine, prompts: list[list[int]], args: argparse.Namespace) -> list[RequestHandle]:
    """Submits at random moments, on average as fast as the engine keeps up; cancels at random moments too."""
    chance = random.Random(args.seed)
    handles: list[RequestHandle] = []
    give_up_at: dict[int, int] = {}  # tokens after which an owner loses interest
    while len(handles) < len(prompts) or engine.has_requests:
        is_eager = engine.queue_depth < args.concurrency // 2
        while is_eager and len(handles) < len(prompts) and chance.random() < 0.6:
            if chance.random() < args.cancel_share:
                give_up_at[len(handles)] = chance.randrange(args.max_new_tokens)
            handles.append(engine.submit(prompts[len(handles)], max_new_tokens=args.max_new_tokens, do_sample=False))
        for index, limit in list(give_up_at.items()):
            if len(handles[index].token_ids) >= limit:
                handles[index].cancel()
                del give_up_at[index]
        engine.step()
    return handles


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", required=True, nargs="+", type=Path)
    parser.add_argument("--limit", type=int, default=100, help="prompts to take from each file")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--cancel-share", type=float, default=0.2)
    parser.add_argument("--memory-limit-mb", type=float, help="makes requests go back to the queue, if it is low")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter", default=None)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--length-policy", default=["fixed"], nargs="+", help="'none' is the engine without a drafter")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.limit < 1:
        parser.error(f"--limit is {args.limit}; it must be at least 1")

    console = Console()
    files = [read_prompt_file(path)[: args.limit] for path in args.prompts]
    models = load_models(args.target, args.drafter, args.dtype, None, True, console)
    prompts = [ids for file in files for ids in encode_prompts(models.tokenizer, file)]
    random.Random(args.seed).shuffle(prompts)
    plain = plain_responses(models, prompts, args, console)
    failures = 0
    for policy in args.length_policy:
        engine = AdaFlashEngine(
            models.target_model,
            None if policy == "none" else models.drafter,
            length_policy=None if policy == "none" else policy,
            max_concurrency=args.concurrency,
            memory_limit_bytes=None if args.memory_limit_mb is None else int(args.memory_limit_mb * 2**20),
        )
        with console.status(f"engine, {policy}"):
            handles = run_engine(engine, prompts, args)
        tally = LosslessTally()
        for ids, expected, handle in zip(prompts, plain, handles, strict=True):
            result = handle.result()
            is_whole = result.finish_reason != "cancelled"
            expected = expected if is_whole else expected[: len(result.token_ids)]
            if (difference := tally.add(models.target_model, ids, expected, result.token_ids)) is not None:
                console.print(f"  {difference}")
        stats = engine.statistics()
        console.print(
            f"{policy}, {args.dtype}, concurrency {args.concurrency}: {tally}; {stats.finished_requests}, "
            f"{stats.returned_requests} returned; tau {stats.acceptance_length:.2f}"
        )
        failures += tally.different
    return 1 if failures else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except AdaFlashError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
