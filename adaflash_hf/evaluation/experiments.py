"""The experiments of `adaflash evaluate`: each an existing command with certain settings, and what others got."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import InvalidInputError


__all__ = ["EXPERIMENTS", "Experiment", "Kind", "find_experiment"]

Kind = Literal["speed", "bench", "servers", "ablation", "shift", "cross"]
_THREE = ["gsm8k", "humaneval", "vicuna"]


@dataclass(frozen=True)
class Experiment:
    """
    What is compared, and how.

    Attributes:
        name: On the command line.
        question: What it answers, in one line.
        kind: The command that measures it.
        minutes: Order of magnitude with the embedded target and the defaults, on two cores without bfloat16
            instructions.
        settings: Defaults of that command's options, where they are not its own.
        sweep: Labels, and settings that the command runs with one after the other; empty for a single run.
        published: Keys of [`PUBLISHED`] that stand beside the results.
        compared: Methods whose results stand beside them.
        needs: What must be given, for the list of experiments.
    """

    name: str
    question: str
    kind: Kind
    minutes: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    sweep: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    published: tuple[str, ...] = ()
    compared: tuple[str, ...] = ("dflash",)
    needs: str = ""


def _bench(name: str, question: str, minutes: int, methods: list[str], **rest: Any) -> Experiment:
    more = {key: rest.pop(key) for key in ("sweep", "published", "compared", "needs") if key in rest}
    return Experiment(name, question, "bench", minutes, {"methods": methods, **rest}, **more)


def _ablation(name: str, question: str, minutes: int, compare: list[str], *published: str, **rest: Any) -> Experiment:
    return Experiment(
        name, question, "ablation", minutes, {"compare": compare, **rest}, published=published, needs="--trajectories"
    )


EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        Experiment(
            "speed",
            "What does generate() gain on one prompt at a time? The README's headline.",
            "speed",
            4,
            published=("dflash-4b", "dflash-8b"),
        ),
        _bench(
            "methods",
            "Which way of decoding is fastest at which concurrency?",
            60,
            ["plain", "transformers", "dflash", "confidence", "adaflash", "cost_aware"],
            concurrencies=["1", "8", "32"],
            max_new_tokens=96,
            repeats=2,
            published=("dflash-concurrency", "mtp-concurrency", "adaflash-dflash-concurrency"),
            compared=("dflash", "adaflash", "cost_aware"),
        ),
        _bench(
            "many-requests",
            "Whether cost_aware is never slower than plain decoding, where drafting cannot pay.",
            30,
            ["plain", "cost_aware"],
            concurrencies=["64", "128"],
            workloads=_THREE,
            max_new_tokens=96,
            repeats=1,
            in_turns=True,
            published=("dflash-concurrency", "mtp-concurrency", "adaflash-dflash-concurrency"),
            compared=("cost_aware",),
        ),
        Experiment(
            "servers",
            "The same of running servers, such as one with EAGLE-3, one with DFlash and a plain one.",
            "servers",
            20,
            {"concurrencies": ["1", "8", "32"], "workloads": _THREE},
            published=("eagle3-8b", "dflash-8b", "dspark-eagle3-8b", "dspark-dflash-8b", "dspark-8b"),
            compared=(),
            needs="--base-url",
        ),
        Experiment(
            "mtp",
            "Multi-token prediction by the target's own heads, through transformers' use_mtp.",
            "bench",
            10,
            {"methods": ["plain", "transformers", "transformers_mtp"], "concurrencies": ["1"], "workloads": ["gsm8k"]},
            published=("mtp-concurrency", "dflash-concurrency"),
            compared=("transformers_mtp",),
            needs="a --target with such heads",
        ),
        _ablation(
            "causal",
            "Blocks whose rows see each other both ways against causal ones, and the spread over domains.",
            60,
            ["block"],
            "dflash-8b",
        ),
        _ablation("clipping", "What clipping of the reverse KL is worth, and of what.", 60, ["clip"], "clipping"),
        _ablation(
            "mixture", "Hard labels, soft labels, their mixture, and other objectives.", 150, ["objective"], "alpha"
        ),
        _ablation("head", "Labels and shapes of the length head, and a confidence head.", 40, ["heads"]),
        _ablation("alpha", "The share α of the hard label.", 100, ["hard_label_weight"], "alpha"),
        _ablation("delta", "The threshold δ of clipping.", 80, ["clip_threshold"], "delta"),
        _ablation("decay", "How much less later slots of a block count in the loss.", 80, ["position_decay"]),
        _ablation(
            "scratch",
            "Training from scratch: started from the target's layers or at random.",
            60,
            ["start"],
            "adaflash-scratch",
        ),
        _bench(
            "gamma",
            "The scale γ of the length head: what more or fewer rows cost and gain.",
            60,
            ["plain", "dflash", *(f"adaflash:{scale}" for scale in ("1.0", "1.15", "1.3", "1.6", "2.0"))],
            concurrencies=["16", "32"],
            max_new_tokens=96,
            repeats=2,
            published=("gamma",),
        ),
        _bench(
            "positions",
            "Which share of the rounds accepts the first draft, the second, and so on.",
            10,
            ["dflash"],
            concurrencies=["1"],
            workloads=_THREE,
            repeats=1,
            published=("first-position",),
        ),
        _bench(
            "domains",
            "How far apart tau and speedup are on maths, code and chat.",
            25,
            ["dflash", "cost_aware"],
            concurrencies=["1"],
            workloads=_THREE,
            repeats=2,
            published=("dflash-4b", "dflash-8b", "eagle3-8b"),
        ),
        _bench(
            "sampling",
            "Temperatures 0.7 and 1: drafts chosen by their probability or the likeliest ones.",
            50,
            ["dflash", "cost_aware"],
            concurrencies=["1"],
            workloads=["gsm8k", "vicuna"],
            repeats=2,
            sweep={
                f"{drafts} drafts at {temperature:g}": {"temperature": temperature, "draft_proposal": proposal}
                for temperature in (0.7, 1.0)
                for drafts, proposal in (("argmax", "argmax"), ("sampled", "sample"))
            },
            published=("dflash-4b-sampled", "dflash-8b-sampled"),
        ),
        _bench(
            "long",
            "Long outputs: whether the gain stays as the text grows.",
            50,
            ["dflash", "cost_aware"],
            concurrencies=["1"],
            workloads=["vicuna"],
            requests=8,
            repeats=1,
            ignore_eos=True,
            sweep={f"{count} tokens": {"max_new_tokens": count} for count in (128, 512, 1024)},
            published=("mlx-long",),
        ),
        Experiment(
            "online",
            "Ways of adapting a drafter while its traffic shifts: OSD, AdaFlash, and AdaFlash without its parts.",
            "shift",
            400,
            {"methods": "static,osd,adaflash,adaflash-lora,adaflash-balanced,adaflash-head-off,adaflash-truncated"},
            published=("onlinespec",),
            needs="--data",
        ),
        Experiment(
            "cross-domain",
            "A drafter trained on one domain, judged on each of them.",
            "cross",
            120,
            needs="--data",
        ),
    )
}


def find_experiment(name: str) -> Experiment:
    """
    An experiment by name.

    Args:
        name (`str`):
            As on the command line.
    """
    if name not in EXPERIMENTS:
        raise InvalidInputError(f"`experiment` is {name!r}; choose from {', '.join(EXPERIMENTS)}.")
    return EXPERIMENTS[name]
