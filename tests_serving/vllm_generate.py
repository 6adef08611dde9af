"""Runs in vLLM's own environment: decodes prompts greedily, with or without a drafter, and writes what came out.

Usage: python vllm_generate.py REQUEST.json ANSWER.json. It imports nothing of this repository.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    """One request, one answer."""
    from vllm import LLM, SamplingParams, TokensPrompt

    request = json.loads(Path(sys.argv[1]).read_text())
    options = dict(request["options"])
    if request["drafter"] is not None:
        options["speculative_config"] = {
            "method": "dflash",
            "model": request["drafter"],
            "num_speculative_tokens": request["num_speculative_tokens"],
        }
    model = LLM(
        model=request["target"],
        dtype=request["dtype"],
        enforce_eager=True,
        disable_log_stats=False,
        max_model_len=512,
        max_num_seqs=request["max_num_seqs"],
        seed=0,
        **options,
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=request["max_new_tokens"])
    prompts = [TokensPrompt(prompt_token_ids=ids) for ids in request["prompts"]]
    outputs = [model.generate([prompt], sampling, use_tqdm=False)[0] for prompt in prompts]
    counters = {metric.name: getattr(metric, "value", None) for metric in model.get_metrics()}
    answer = {
        "token_ids": [list(output.outputs[0].token_ids) for output in outputs],
        "counters": {name: value for name, value in counters.items() if "spec_decode" in name and value is not None},
    }
    Path(sys.argv[2]).write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
