"""A drafter that knows only maths serves code, then chat, then maths again: which way of adapting it keeps up?

    python examples/domain_shift.py --data data --out runs/domain_shift
    python examples/domain_shift.py --trajectories runs/trajectories --replay --out runs/domain_shift

Compared on the same traffic and budget, over several seeds: a drafter that stays as it is (static), online speculative
decoding (osd: forward KL), AdaFlash (hard labels and clipped reverse KL), AdaFlash on a LoRA adapter, AdaFlash that
also learns of the domains it has left (balanced), and AdaFlash whose length head stays as it is, or learns from the
labels that truncated verification gives it.

By default all requests are decoded by the engine, which also measures tokens per second. `--replay` serves the
responses that are known already with the drafter alone: the rounds, and so tau and verify lengths, are those of greedy
decoding (exactly so in float32), at a fraction of the time; speeds then mean nothing.

--data is a directory with gsm8k_train.jsonl, codealpaca.json and alpaca_seed_tasks.jsonl; --prompts gives files of
other domains. Each prompt is answered once, whatever is compared; `--trajectories` takes answers that
`adaflash trajectories` has made, with their domains. A comparison that is stopped goes on with the runs that are
missing. Data are JSON, tables Markdown, curves PNG. It is the command `adaflash evaluate online`.
Needs `pip install -e '.[train,bench]'`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from adaflash_hf.cli import main as adaflash


def main(argv: Sequence[str] | None = None) -> int:
    return adaflash(["evaluate", "online", *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    sys.exit(main())
