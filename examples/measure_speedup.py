"""Measure speedup and tau on your own prompts: plain and AdaFlash in turn, in one process.

Plain decoding runs twice: on the model as it was loaded, which is what `generate()` does without this package, and on
the same rearranged weights as AdaFlash, which tells what drafting alone gives.

    python examples/measure_speedup.py --prompts prompts.jsonl --limit 50 --max-new-tokens 192 --out speedup.json

Prompt files are JSON Lines (or a JSON array) with a field such as `question`, `prompt`, `instruction`, `text`, `turns`
or `messages`. The default target and drafter are the embedded SmolLM2-135M and the checkpoint in this repository.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.progress import track

from adaflash_hf.commands.loading import load_models
from adaflash_hf.evaluation.comparison import Comparison, DecodedRun, compare_decoding, decode_once, warm_up
from adaflash_hf.generation.prepacking import PrepackedLinear, unpacked_twin
from adaflash_hf.training.prompts import encode_prompts, read_prompt_file


def overhead_per_round_ms(stats: object) -> float:
    """Milliseconds per round that neither model's forward accounts for."""
    return 1000 * stats.overhead_s / max(stats.rounds, 1)  # type: ignore[attr-defined]


def summarise(comparisons: list[Comparison], prepacked: list[DecodedRun]) -> dict:
    """Medians over prompts; tau pooled over all rounds."""
    runs: list[DecodedRun] = [run for comparison in comparisons for run in comparison.adaflash]
    stats = [run.stats for run in runs if run.stats is not None]
    speedups = sorted(comparison.speedup for comparison in comparisons)
    drafting = sorted(c.adaflash_tok_per_s / run.tok_per_s for c, run in zip(comparisons, prepacked, strict=True))
    return {
        "prompts": len(comparisons),
        "plain_tok_per_s": statistics.median(c.plain_tok_per_s for c in comparisons),
        "prepacked_plain_tok_per_s": statistics.median(run.tok_per_s for run in prepacked),
        "adaflash_tok_per_s": statistics.median(c.adaflash_tok_per_s for c in comparisons),
        "speedup_median": statistics.median(speedups),
        "speedup_quartiles": [speedups[len(speedups) // 4], speedups[(3 * len(speedups)) // 4]],
        "speedup_over_prepacked_median": statistics.median(drafting),
        "speedup_over_prepacked_quartiles": [drafting[len(drafting) // 4], drafting[(3 * len(drafting)) // 4]],
        "acceptance_length": sum(s.committed_tokens for s in stats) / max(sum(s.rounds for s in stats), 1),
        "identical": sum(c.first_difference is None for c in comparisons),
        "near_ties": sum(c.first_difference is not None and c.first_difference.is_near_tie for c in comparisons),
        "draft_ms_per_round": 1000 * sum(s.draft_s for s in stats) / max(sum(s.rounds for s in stats), 1),
        "verify_ms_per_round": 1000 * sum(s.verify_s for s in stats) / max(sum(s.rounds for s in stats), 1),
        "overhead_ms_per_round": statistics.median(overhead_per_round_ms(s) for s in stats),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", required=True, type=Path, help="prompt file")
    parser.add_argument("--limit", type=int, default=50, help="prompts to use")
    parser.add_argument("--max-new-tokens", type=int, default=192)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter", default=None)
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    parser.add_argument(
        "--length-policy", default="fixed", choices=["fixed", "length_head", "confidence", "cost_aware"]
    )
    parser.add_argument("--no-prepack", action="store_true", help="leave linear layers as they are")
    parser.add_argument("--out", type=Path, help="write the result here as JSON")
    args = parser.parse_args()

    console = Console(stderr=True)
    models = load_models(args.target, args.drafter, args.dtype, None, not args.no_prepack, console)
    prompts = encode_prompts(models.tokenizer, read_prompt_file(args.prompts)[: args.limit])
    inputs = [{"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids)).long()} for ids in prompts]
    drafting = {"length_policy": args.length_policy}
    greedy = {"max_new_tokens": args.max_new_tokens, "do_sample": False}
    as_loaded = unpacked_twin(models.target_model)
    warm_up(models.target_model, models.drafter, inputs[0], drafting_kwargs=drafting, plain_model=as_loaded)
    comparisons, prepacked = [], []
    for prompt in track(inputs, description="Decoding", console=console):
        comparisons.append(
            compare_decoding(
                models.target_model,
                models.drafter,
                prompt,
                generate_kwargs=greedy,
                drafting_kwargs=drafting,
                plain_model=as_loaded,
            )
        )
        prepacked.append(decode_once(models.target_model, prompt, **greedy))
    result = {
        "environment": {
            "processor": platform.processor() or platform.machine(),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
            "device": str(models.target_model.device),
            "dtype": str(models.target_model.dtype),
            "prepacked": any(isinstance(module, PrepackedLinear) for module in models.target_model.modules()),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "settings": {name: str(value) for name, value in vars(args).items() if name != "out"},
        **summarise(comparisons, prepacked),
        "per_prompt": [comparison.as_dict() for comparison in comparisons],
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=2) + "\n")
    Console().print_json(data={name: value for name, value in result.items() if name != "per_prompt"})


if __name__ == "__main__":
    main()
