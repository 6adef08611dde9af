"""Numbers in the README and the documentation are those of `results/`: each sentence is made anew and looked up."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest


ROOT = Path(__file__).resolve().parents[1]


def results(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "results" / name / "results.json").read_text(encoding="utf-8"))


def speedup(name: str, workload: str, concurrency: int, method: str = "cost_aware", **labels: Any) -> str:
    wanted = {"workload": workload, "concurrency": concurrency, "method": method, **labels}
    (row,) = (row for row in results(name)["results"] if wanted.items() <= row.items())
    return f"{row['speedup']:.2f}"


def taus_by_row(name: str, comparison: str) -> dict[str, list[float]]:
    """Of each row of an ablation, seed by seed."""
    data = results(name)
    of_key: dict[str, list[float]] = defaultdict(list)
    for run in sorted(data["runs"], key=lambda run: run["seed"]):
        of_key[run["key"]].append(run["metrics"]["acceptance_length"])
    return {row: of_key[settings["key"]] for row, settings in data["comparisons"][comparison].items()}


def difference(taus: dict[str, list[float]], row: str, reference: str) -> str:
    """Within a seed, as the tables have it."""
    values = [one - other for one, other in zip(taus[row], taus[reference], strict=True)]
    return f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}"


def concurrency_sentence() -> str:
    return (
        f"`cost_aware` gains {speedup('methods', 'gsm8k', 8)}x with 8 requests at once and "
        f"{speedup('methods', 'gsm8k', 32)}x with 32"
    )


def many_requests_sentence() -> str:
    pairs = [
        f"{speedup('many-requests', workload, 64)} and {speedup('many-requests', workload, 128)}"
        for workload in ("gsm8k", "humaneval", "vicuna")
    ]
    return f"it runs at {pairs[0]} of plain decoding on maths, {pairs[1]} on code, and {pairs[2]} on chat"


def domains_sentence() -> str:
    maths, code, chat = (speedup("domains", workload, 1) for workload in ("gsm8k", "humaneval", "vicuna"))
    return f"One request at a time gains {maths}x on maths, {code}x on code and {chat}x on chat"


def online_sentence() -> str:
    """Before the first round in which a domain was served, and after the last, over the seeds."""
    taus: dict[tuple[str, str], list[float]] = defaultdict(list)
    for run in results("online")["runs"]:
        if run["method"] != "adaflash":
            continue
        for domain in ("code", "chat"):
            served = [index for index, one in enumerate(run["rounds"]) if one["domain"] == domain]
            for when, index in (("before", served[0] - 1), ("after", served[-1])):
                taus[domain, when].append(run["rounds"][index]["held_out"][domain]["acceptance_length"])
    mean = {key: f"{statistics.mean(values):.2f}" for key, values in taus.items()}
    return (
        f"rose from {mean['code', 'before']} to {mean['code', 'after']} on code and from {mean['chat', 'before']} to "
        f"{mean['chat', 'after']} on chat"
    )


def online_row(title: str, method: str) -> str:
    """Held-out tau after the last round of a phase, over the seeds, as docs/online.md shows it."""
    runs = [run["rounds"] for run in results("online")["runs"] if run["method"] == method]

    def after(phase: int, domain: str) -> str:
        last = [[one for one in rounds if one["phase"] == phase][-1] for rounds in runs]
        return f"{statistics.mean(one['held_out'][domain]['acceptance_length'] for one in last):.2f}"

    shown = ((0, "code"), (1, "chat"), (0, "maths"), (1, "code"), (2, "maths"))
    return " | ".join([f"| {title}", *(after(*each) for each in shown)])


def objectives_sentence() -> str:
    taus = {row: statistics.mean(values) for row, values in taus_by_row("mixture", "objective").items()}
    alone = {"before training", "reverse KL", "reverse KL, entries clipped", "expected acceptance"}
    others = [tau for row, tau in taus.items() if row not in alone]
    assert max(taus[row] for row in alone) < min(others) - 0.1  # "are far behind"
    return f"end between {min(others):.3f} and {max(others):.3f} of tau"


def clipping_sentence() -> str:
    gained = difference(taus_by_row("clipping", "clip"), "nothing", "each entry (paper)")
    return f"without it tau is higher by {gained} within a seed"


def alpha_sentence() -> str:
    taus = {row: statistics.mean(values) for row, values in taus_by_row("alpha", "hard_label_weight").items()}
    most = max(abs(tau - taus["α = 0.8"]) for row, tau in taus.items() if row != "α = 0")
    return f"changes tau by no more than {most:.3f} between 0.2 and 1"


def decay_sentence() -> str:
    taus = taus_by_row("decay", "position_decay")
    lost = statistics.mean(taus["the default"]) - statistics.mean(taus["no decay"])
    gained = difference(taus, "1 slot", "the default")
    return f"none at all costs {lost:.3f} of tau, and a decay of 1 slot gains {gained} over the default of 2"


def vocabulary_sentence() -> str:
    taus = {row: f"{statistics.mean(values):.3f}" for row, values in taus_by_row("vocabulary", "vocabulary").items()}
    return (
        f"tau is {taus['2048 tokens']} with the 2,048 commonest tokens, {taus['8192 tokens']} with 8,192 and "
        f"{taus['all tokens']} with all 49,152"
    )


def percent(shares: list[float], position: int) -> str:
    return f"{100 * shares[position]:.0f} %"


def positions_sentence() -> str:
    shares = [row["acceptance_by_position"] for row in results("positions")["results"] if row["method"] == "dflash"]
    first, last = ([percent(of_workload, position) for of_workload in shares] for position in (0, -1))
    return (
        f"accepted in {first[0]} of the rounds on maths, {first[1]} on code and {first[2]} on chat, the last of seven "
        f"in {last[0]}, {last[1]} and {last[2]}"
    )


def sampling_sentence() -> str:
    def told(drafts: str, temperature: str) -> tuple[str, str]:
        places = [f"{workload}, {drafts} drafts at {temperature}" for workload in ("gsm8k", "vicuna")]
        maths, chat = (speedup("sampling", place, 1) for place in places)
        taus = [row["acceptance_length"] for row in results("sampling")["results"] if row["method"] == "dflash"]
        names = [row["workload"] for row in results("sampling")["results"] if row["method"] == "dflash"]
        whole = dict(zip(names, taus, strict=True))
        return f"{maths}x on maths and {chat}x on chat", " and ".join(f"{whole[place]:.2f}" for place in places)

    (warm, warm_tau), (warm_sampled, warm_sampled_tau) = told("argmax", "0.7"), told("sampled", "0.7")
    (hot, hot_tau), (hot_sampled, hot_sampled_tau) = told("argmax", "1"), told("sampled", "1")
    return (
        f"at temperature 0.7 `cost_aware` gains {warm} with the likeliest drafts, {warm_sampled} with sampled ones; "
        f"at 1 it gains {hot}, and {hot_sampled}. Tau of whole blocks is {warm_tau}, {warm_sampled_tau} with sampled "
        f"drafts, {hot_tau} at 1, and {hot_sampled_tau}"
    )


def long_sentence() -> str:
    gains = [speedup("long", f"vicuna, {count} tokens", 1) for count in (128, 512, 1024)]
    return f"gains {gains[0]}x over 128 tokens, {gains[1]}x over 512 and {gains[2]}x over 1024"


def gamma_sentence() -> str:
    def of_scales(concurrency: int) -> str:
        scales = ("1.0", "1.15", "1.3", "1.6", "2.0")
        *gains, last = (f"{speedup('gamma', 'gsm8k', concurrency, f'adaflash:{scale}')}x" for scale in scales)
        return f"{', '.join(gains)} and {last} with {concurrency}"

    whole = [speedup("gamma", "gsm8k", concurrency, "dflash") for concurrency in (16, 32)]
    return f"give {of_scales(16)} requests and {of_scales(32)}; whole blocks {whole[0]}x and {whole[1]}x"


def causal_sentence() -> str:
    both, causal = (f"{statistics.mean(taus):.3f}" for taus in taus_by_row("causal", "block").values())
    return f"tau is {both} both ways and {causal} with causal blocks of 4"


def start_sentence() -> str:
    gained = difference(taus_by_row("scratch", "start"), "at random", "the target's layers")
    return f"end at a tau that is {gained} higher"


def long_start_sentence() -> str:
    gain = difference(taus_by_row("scratch_long", "start"), "at random", "the target's layers")
    return f"they end {gain} beside them"


def cross_domain_sentence() -> str:
    taus = results("cross-domain")["acceptance_length"]

    def change(trained: str, judged: str) -> str:
        return f"{abs(100 * (taus[trained][judged] / taus['before'][judged] - 1)):.0f} %"

    code, chat = ({judged: change(trained, judged) for judged in taus["before"]} for trained in ("code", "chat"))
    return (
        f"gains {code['code']} of tau on code when it is trained on code and loses {code['maths']} on maths and "
        f"{code['chat']} on chat; trained on chat it gains {chat['chat']} on chat and {chat['code']} on code and "
        f"loses {chat['maths']} on maths"
    )


def concurrency_by_method_sentence() -> str:
    def of(method: str) -> list[str]:
        return [speedup("methods", "gsm8k", concurrency, method) for concurrency in (1, 8, 32)]

    ours, whole, head = of("cost_aware"), of("dflash"), of("adaflash")
    return (
        f"`results/methods` has {ours[0]} for one request, {ours[1]} for 8 and {ours[2]} for 32, with 256 tokens at "
        f"most, where whole blocks reach {whole[0]}, {whole[1]} and {whole[2]} and the length head {head[0]}, "
        f"{head[1]} and {head[2]}"
    )


def head_sentence() -> str:
    errors: dict[str, list[float]] = defaultdict(list)
    for run in results("head")["runs"]:
        for name, estimate in run["head"]["estimates"].items():
            errors[run["key"] if name == "head" else name].append(estimate["mean_absolute_error_tokens"])
    hindsight, truncated, confidence, constant = (
        f"{statistics.mean(errors[key]):.2f}"
        for key in ("head-hindsight", "head-truncated", "head-confidence", "constant")
    )
    return (
        f"hindsight labels gave an error of {hindsight} tokens in blocks of 8, labels that end at the verified length "
        f"{truncated}, a confidence head {confidence}, and a constant {constant}"
    )


@pytest.mark.parametrize(
    ("page", "sentence"),
    [
        ("README.md", concurrency_sentence),
        ("README.md", many_requests_sentence),
        ("README.md", domains_sentence),
        ("README.md", online_sentence),
        ("docs/training.md", objectives_sentence),
        ("docs/training.md", clipping_sentence),
        ("docs/training.md", alpha_sentence),
        ("docs/training.md", decay_sentence),
        ("docs/training.md", vocabulary_sentence),
        ("docs/training.md", head_sentence),
        ("docs/evaluation.md", positions_sentence),
        ("docs/evaluation.md", sampling_sentence),
        ("docs/evaluation.md", long_sentence),
        ("docs/evaluation.md", gamma_sentence),
        ("docs/evaluation.md", causal_sentence),
        ("docs/evaluation.md", start_sentence),
        ("docs/evaluation.md", long_start_sentence),
        ("docs/evaluation.md", cross_domain_sentence),
        ("docs/concurrency.md", concurrency_by_method_sentence),
    ],
)
def test_what_is_said_was_measured(page, sentence):
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    assert sentence() in text


@pytest.mark.parametrize(
    ("title", "method"),
    [
        ("left as it is", "static"),
        ("OSD (forward KL)", "osd"),
        ("AdaFlash", "adaflash"),
        ("AdaFlash, `--balanced`", "adaflash-balanced"),
        ("AdaFlash, `--lora-rank`", "adaflash-lora"),
    ],
)
def test_what_adaptation_gained_was_measured(title, method):
    assert online_row(title, method) in (ROOT / "docs/online.md").read_text(encoding="utf-8")
