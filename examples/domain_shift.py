"""A drafter that knows only maths serves code, then chat, then maths again: which way of adapting it keeps up?

    python examples/domain_shift.py --data data --out results/domain_shift
    python examples/domain_shift.py --trajectories runs/trajectories --replay --out results/domain_shift

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
missing. Data are JSON, tables Markdown, curves PNG.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from adaflash_hf.commands.loading import LoadedModels, find_drafter, load_drafter, load_models
from adaflash_hf.errors import AdaFlashError, InvalidInputError
from adaflash_hf.evaluation.bench import describe_environment
from adaflash_hf.evaluation.domain_shift import (
    METHODS,
    STATIC,
    DomainShift,
    DomainShiftSettings,
    FinishedShiftRun,
)
from adaflash_hf.evaluation.domain_shift_plots import plot_shift
from adaflash_hf.evaluation.domain_shift_report import shift_results, shift_sections
from adaflash_hf.evaluation.domain_traffic import (
    DomainResponses,
    TrafficPlan,
    TrafficShape,
    plan_traffic,
    too_few_prompts,
)
from adaflash_hf.evaluation.result_files import write_results
from adaflash_hf.training.prompts import encode_prompts, read_prompt_file
from adaflash_hf.training.trajectories import TrajectorySettings, generate_trajectories


FILES = {"maths": "gsm8k_train.jsonl", "code": "codealpaca.json", "chat": "alpaca_seed_tasks.jsonl"}
# Of the prompts that some of must be judged by; their hashes decide which.
SPARE = 1.5


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = parser.add_argument_group("models")
    models.add_argument("--target", default="smollm2-135m")
    models.add_argument("--drafter", help="what all begin with; it should know --home and little else")
    models.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    models.add_argument("--device")
    traffic = parser.add_argument_group("traffic")
    traffic.add_argument("--data", type=Path, help=f"directory with {', '.join(FILES.values())}")
    traffic.add_argument("--prompts", action="append", default=[], metavar="DOMAIN=FILE", help="prompts of a domain")
    traffic.add_argument("--trajectories", action="append", default=[], type=Path, help="answered prompts instead")
    traffic.add_argument("--home", default="maths", help="domain that the drafter knows")
    traffic.add_argument("--phases", nargs="+", default=["code", "chat", "maths"], help="domains served after it")
    traffic.add_argument("--rounds-per-phase", type=int, default=10)
    traffic.add_argument("--trajectories-per-round", type=int, default=128)
    traffic.add_argument("--home-trajectories", type=int, help="served first; default: as many as in a round")
    traffic.add_argument("--held-out", type=int, default=64, help="answers of each domain that are never served")
    traffic.add_argument("--held-out-anchors", type=int, default=32, help="blocks judged on each")
    traffic.add_argument("--max-new-tokens", type=int, default=512)
    traffic.add_argument("--max-prompt-tokens", type=int, default=512)
    traffic.add_argument("--replay", action="store_true", help="draft on known answers instead of decoding")
    traffic.add_argument("--concurrency", type=int, default=16, help="requests decoded at a time")
    traffic.add_argument("--length-policy", default="fixed", choices=["fixed", "length_head"])
    traffic.add_argument("--length-scale", type=float, default=1.3)
    training = parser.add_argument_group("training")
    training.add_argument("--methods", nargs="+", default=list(METHODS)[:4], choices=list(METHODS))
    training.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    training.add_argument("--balanced", action="store_true", help="every round learns of all domains seen so far")
    training.add_argument("--guard", action="store_true", help="publish only rounds that held-out traffic approves of")
    training.add_argument("--epochs", type=int, default=2)
    training.add_argument("--gradient-accumulation", type=int, default=2, help="trajectories per update")
    training.add_argument("--anchors", type=int, default=512, help="blocks per trajectory")
    training.add_argument("--learning-rate", type=float, default=3e-4)
    training.add_argument("--lora-learning-rate", type=float, default=1e-3)
    training.add_argument("--reference", action="append", default=[], metavar="DOMAIN=DRAFTER", help="its upper bound")
    training.add_argument("--reference-epochs", type=int, default=6, help="of a reference that is trained here")
    parser.add_argument("--out", type=Path, required=True, help="directory of results; finished runs are kept there")
    parser.add_argument("--no-plots", action="store_true")
    return parser.parse_args(argv)


def named(values: list[str], option: str) -> dict[str, str]:
    """`DOMAIN=VALUE` each."""
    pairs = {}
    for value in values:
        domain, separator, rest = value.partition("=")
        if not (domain and separator and rest):
            raise InvalidInputError(f"`{option}` is {value!r}; give it as DOMAIN=VALUE, such as code=prompts.jsonl.")
        pairs[domain] = rest
    return pairs


def settings_of(args: argparse.Namespace, start: str) -> DomainShiftSettings:
    shape = TrafficShape(
        home=args.home,
        phases=tuple(args.phases),
        rounds_per_phase=args.rounds_per_phase,
        trajectories_per_round=args.trajectories_per_round,
        home_trajectories=args.home_trajectories or args.trajectories_per_round,
        held_out=args.held_out,
        held_out_share=0.125 if args.guard else 0.0,
    )
    return DomainShiftSettings(
        # Where it lies means nothing elsewhere.
        start=Path(start).name if Path(start).is_dir() else start,
        shape=shape,
        max_new_tokens=args.max_new_tokens,
        is_live=not args.replay,
        length_policy=args.length_policy,
        length_scale=args.length_scale,
        concurrency=args.concurrency,
        held_out_anchors=args.held_out_anchors,
        learning_rate=args.learning_rate,
        lora_learning_rate=args.lora_learning_rate,
        reference_epochs=args.reference_epochs,
        training={
            "epochs": args.epochs,
            "gradient_accumulation_steps": args.gradient_accumulation,
            "anchors_per_trajectory": args.anchors,
            "balanced": args.balanced,
            "max_tokens": args.max_prompt_tokens + args.max_new_tokens,
        },
    )


def prompt_files(args: argparse.Namespace, shape: TrafficShape) -> dict[str, Path]:
    files = {domain: Path(path) for domain, path in named(args.prompts, "--prompts").items()}
    for domain in shape.domains:
        if domain not in files and args.data is not None and domain in FILES:
            files[domain] = args.data / FILES[domain]
        if domain not in files or not files[domain].is_file():
            raise InvalidInputError(
                f"No prompts of {domain!r}: {files.get(domain)} is not a file. Give --prompts {domain}=FILE, or "
                f"--data with a directory that holds {FILES.get(domain, 'it')}."
            )
    return {domain: files[domain] for domain in shape.domains}


def choose_prompts(
    files: dict[str, Path], shape: TrafficShape, tokenizer: Any, max_prompt_tokens: int
) -> tuple[list[list[int]], list[str]]:
    """As many different prompts of each domain as are needed, and their domains."""
    chosen: list[list[int]] = []
    domains: list[str] = []
    for domain, path in files.items():
        wanted = int(shape.prompts_of(domain) * (SPARE if shape.held_out_share else 1))
        encoded = encode_prompts(tokenizer, read_prompt_file(path, domain))
        different = {tuple(ids): ids for ids in encoded if len(ids) <= max_prompt_tokens}
        if len(different) < shape.prompts_of(domain):
            raise too_few_prompts(shape, domain, len(different))
        found = list(different.values())[:wanted]
        chosen += found
        domains += [domain] * len(found)
    return chosen, domains


def answer_prompts(args: argparse.Namespace, shape: TrafficShape, models: LoadedModels, console: Console) -> Path:
    """The target's responses to all prompts, once for all methods and seeds."""
    files = prompt_files(args, shape)
    prompts, domains = choose_prompts(files, shape, models.tokenizer, args.max_prompt_tokens)
    # Only a replay reads each response so often that the target's states are worth their disk space.
    layers = tuple(models.drafter.config.target_layer_ids) if args.replay else ()
    settings = TrajectorySettings(max_new_tokens=args.max_new_tokens, capture_layer_ids=layers)
    directory = args.out / "trajectories"
    done = 0

    def show(report: Any) -> None:
        nonlocal done
        done += report.trajectories
        console.print(f"{done} of {len(prompts)} prompts answered", highlight=False)

    generate_trajectories(
        models.target_model,
        prompts,
        domains,
        directory,
        settings,
        show,
        provenance={"files": [path.name for path in files.values()]},
    )
    return directory


def show_round(console: Console, method: str, seed: int, entry: dict[str, Any]) -> None:
    held_out = ", ".join(f"{domain} {one['acceptance_length']:.3f}" for domain, one in entry["held_out"].items())
    outcome, tau = entry["training"].get("outcome", "untrained"), entry["served"]["acceptance_length"]
    text = f"{method}, seed {seed}, round {entry['number']} ({entry['domain']}): tau {tau:.3f}; {outcome}"
    console.print(f"{text}; held out: {held_out}", highlight=False, soft_wrap=True)


def run_references(
    args: argparse.Namespace, shift: DomainShift, plan: TrafficPlan, models: LoadedModels, console: Console
) -> list[FinishedShiftRun]:
    given = named(args.reference, "--reference")
    finished = []
    for domain in shift.settings.shape.domains:
        drafter = load_drafter(given[domain], models.target_model) if domain in given else None
        if domain == shift.settings.shape.home and drafter is None:
            continue  # the start is what knows it
        finished.append(shift.run_reference(domain, plan, drafter))
        tau = finished[-1].rounds[0]["held_out"][domain]["acceptance_length"]
        console.print(f"trained on {domain}: held-out tau {tau:.3f}", highlight=False)
    return finished


def write_all(
    args: argparse.Namespace,
    runs: list[FinishedShiftRun],
    references: list[FinishedShiftRun],
    settings: DomainShiftSettings,
    environment: dict[str, Any],
) -> list[str]:
    sections = shift_sections(runs, references, settings)
    data = shift_results(runs, references, settings, environment)
    write_results(args.out / "domain_shift", data, "Domain shift", sections)
    if not args.no_plots:
        plot_shift(runs, references, args.out / "domain_shift")
    return sections


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    console = Console()
    start = find_drafter(args.target, args.drafter)
    settings = settings_of(args, start)
    if not args.trajectories:
        prompt_files(args, settings.shape)  # refused before models are loaded
    models = load_models(args.target, start, args.dtype, args.device, False, console)
    directories = args.trajectories or [answer_prompts(args, settings.shape, models, console)]
    responses = DomainResponses(directories, args.max_new_tokens, models.drafter.config.target_layer_ids)
    plans = {seed: plan_traffic(responses, settings.shape, seed) for seed in args.seeds}
    shift = DomainShift(models.target_model, models.drafter, responses, settings, args.out)
    environment = describe_environment(models.target_model, models.drafter)
    runs: list[FinishedShiftRun] = []
    references: list[FinishedShiftRun] = []
    sections: list[str] = []
    # Seed by seed: a comparison that is stopped early is complete for some seeds.
    # The references come after the first, which shows whether the rest is worth waiting for.
    for seed in args.seeds:
        for method in dict.fromkeys([STATIC, *args.methods]):
            run, was_done = shift.run(
                method,
                seed,
                plans[seed],
                lambda entry, method=method, seed=seed: show_round(console, method, seed, entry),
            )
            runs.append(run)
            console.print(f"{method}, seed {seed}: {'found' if was_done else f'{run.seconds:.0f} s'}", highlight=False)
            sections = write_all(args, runs, references, settings, environment)
        references = references or run_references(args, shift, plans[seed], models, console)
        sections = write_all(args, runs, references, settings, environment)
    console.print("\n\n".join(sections), highlight=False, markup=False, soft_wrap=True)
    console.print(f"\nThe results are in {args.out}.", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    try:
        main()
    except AdaFlashError as error:
        sys.exit(f"Error: {error}")
