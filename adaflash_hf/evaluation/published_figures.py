"""What others have published, to stand beside what is measured here; none of it was measured by this project.

Figures of different targets, blocks and machines are no yardstick for each other: they say what the method reaches
where it was trained on a GPU for days, and by how much it should fall with temperature, concurrency or length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


__all__ = ["PUBLISHED", "PublishedFigures"]

_ADAFLASH = "AdaFlash, arXiv 2607.19223"
_ZLAB = "DFlash, z-lab's README of 2026-01-05, transformers, block 16"
_DSPARK = "DSpark, arXiv 2607.05147, Table 1, temperature 1, block 7"
_QWEN_CARD = "DFlash, card of Qwen3.5-4B-DFlash, SGLang on a B200"
_MLX = "dflash-mlx 0.1.8, Apple silicon"

Values = Mapping[str, tuple[float | None, float | None]]


@dataclass(frozen=True)
class PublishedFigures:
    """
    One row or column of somebody's table.

    Attributes:
        label: Method and target, short.
        source: Who measured it, and how.
        axis: What its keys are: `"workload"`, `"concurrency"` or `"sweep"` (settings gone through), or
            `"none"` if there is only a note.
        values: Speedup over plain decoding and tau, by key; None where only the other is known.
        note: What else the reader must know.
    """

    label: str
    source: str
    axis: str
    values: Values
    note: str = ""


def _pairs(text: str) -> Values:
    """`gsm8k 5.17/6.50 ...`: workload, speedup, tau."""
    words = text.split()
    return {
        name: (float(pair.partition("/")[0]), float(pair.partition("/")[2]))
        for name, pair in zip(words[::2], words[1::2], strict=True)
    }


def _taus(text: str) -> Values:
    words = text.split()
    return {name: (None, float(tau)) for name, tau in zip(words[::2], words[1::2], strict=True)}


def _speedups(values: Mapping[str, float]) -> Values:
    return {key: (speedup, None) for key, speedup in values.items()}


PUBLISHED: dict[str, PublishedFigures] = {
    "dflash-4b": PublishedFigures(
        "DFlash, Qwen3-4B",
        f"{_ZLAB}, greedy",
        "workload",
        _pairs(
            "gsm8k 5.17/6.50 math500 6.19/7.84 aime25 5.79/7.28 humaneval 5.26/6.63 mbpp 4.87/6.19 mtbench 2.87/4.35 "
            "alpaca 2.23/3.10"
        ),
    ),
    "dflash-8b": PublishedFigures(
        "DFlash, Qwen3-8B",
        f"{_ZLAB}, greedy",
        "workload",
        _pairs(
            "gsm8k 5.20/6.55 math500 6.17/7.87 aime25 5.85/7.31 humaneval 5.20/6.55 mbpp 4.75/6.00 mtbench 2.79/4.25 "
            "alpaca 2.27/3.16"
        ),
    ),
    "eagle3-8b": PublishedFigures(
        "EAGLE-3, Qwen3-8B",
        f"{_ZLAB}, greedy, speculator.eagle3",
        "workload",
        _pairs(
            "gsm8k 2.13/2.89 math500 2.18/2.94 aime25 2.18/2.93 humaneval 2.48/3.36 mbpp 2.27/3.08 mtbench 1.94/2.72 "
            "alpaca 1.88/2.68"
        ),
    ),
    "dflash-4b-sampled": PublishedFigures(
        "DFlash, Qwen3-4B, temperature 1",
        f"{_ZLAB}, argmax drafts",
        "workload",
        _pairs(
            "gsm8k 4.73/5.98 math500 5.14/6.67 aime25 3.89/5.01 humaneval 4.80/6.05 mbpp 4.35/5.55 mtbench 2.63/4.03 "
            "alpaca 2.16/2.99"
        ),
    ),
    "dflash-8b-sampled": PublishedFigures(
        "DFlash, Qwen3-8B, temperature 1",
        f"{_ZLAB}, argmax drafts",
        "workload",
        _pairs(
            "gsm8k 4.78/6.04 math500 5.02/6.57 aime25 3.84/5.03 humaneval 4.35/5.40 mbpp 4.07/5.17 mtbench 2.50/3.74 "
            "alpaca 2.11/2.88"
        ),
    ),
    "dspark-eagle3-8b": PublishedFigures(
        "EAGLE-3, Qwen3-8B, block 7",
        _DSPARK,
        "workload",
        _taus("gsm8k 5.30 math500 4.77 aime25 3.91 mbpp 3.96 humaneval 4.33 mtbench 2.66 alpaca 2.54"),
        "Its tau cannot exceed 8.",
    ),
    "dspark-dflash-8b": PublishedFigures(
        "DFlash, Qwen3-8B, block 7",
        _DSPARK,
        "workload",
        _taus("gsm8k 5.33 math500 4.91 aime25 4.07 mbpp 4.36 humaneval 4.64 mtbench 3.11 alpaca 2.98"),
        "Its tau cannot exceed 8.",
    ),
    "dspark-8b": PublishedFigures(
        "DSpark, Qwen3-8B, block 7",
        _DSPARK,
        "workload",
        _taus("gsm8k 6.17 math500 5.78 aime25 5.01 mbpp 5.16 humaneval 5.52 mtbench 3.72 alpaca 3.58"),
        "Its tau cannot exceed 8.",
    ),
    "dflash-concurrency": PublishedFigures(
        "DFlash, Qwen3.5-4B, MATH-500",
        _QWEN_CARD,
        "concurrency",
        _speedups({"1": 3.5, "8": 3.0, "16": 2.3, "32": 1.8}),
    ),
    "mtp-concurrency": PublishedFigures(
        "multi-token prediction, Qwen3.5-4B, MATH-500",
        _QWEN_CARD,
        "concurrency",
        _speedups({"1": 1.7, "8": 1.5, "16": 1.3, "32": 1.2}),
    ),
    "adaflash-dflash-concurrency": PublishedFigures(
        "DFlash fixed, as the AdaFlash paper measures it",
        _ADAFLASH,
        "concurrency",
        _speedups({"128": 0.76}),
        "A fixed block becomes slower than plain decoding; that is what the length head is for.",
    ),
    "adaflash-scratch": PublishedFigures(
        "AdaFlash from scratch, Qwen3-1.7B",
        _ADAFLASH,
        "workload",
        _taus("gsm8k 4.55"),
    ),
    "mlx-long": PublishedFigures(
        "DFlash, Qwen3.5-9B",
        _MLX,
        "sweep",
        _speedups({"1024 tokens": 4.37, "2048 tokens": 3.65, "4096 tokens": 3.06, "8192 tokens": 2.22}),
    ),
    "first-position": PublishedFigures(
        "DFlash, first draft accepted",
        "DSpark, arXiv 2607.05147",
        "none",
        {},
        "0.88 of the first drafts are accepted on maths, 0.72 on chat.",
    ),
    "onlinespec": PublishedFigures(
        "OnlineSPEC", "arXiv 2603.12617", "none", {}, "Up to 24 % faster by adapting online, on its own targets."
    ),
    "alpha": PublishedFigures("AdaFlash's choice", _ADAFLASH, "none", {}, "α = 0.8."),
    "delta": PublishedFigures("AdaFlash's choice", _ADAFLASH, "none", {}, "δ = 0.01 nats, on every entry."),
    "gamma": PublishedFigures(
        "AdaFlash's choice", _ADAFLASH, "none", {}, "γ = 1.3, with the head in use from 16 requests at once."
    ),
    "clipping": PublishedFigures(
        "AdaFlash's authors",
        f"{_ADAFLASH} and its code",
        "none",
        {},
        "The paper clips every entry of the reverse KL; the code clips the sum over a slot. Both are rows here.",
    ),
}
