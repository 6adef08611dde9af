"""Model cards of drafters, written from what lies in their directory: configuration, run record, metrics.

Nothing in a card is typed by hand that was measured or recorded, so a card can be made anew at any time.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .atomic_files import written_aside
from .configuration_dflash_drafter import DFlashDrafterConfig
from .embedded_target import EMBEDDED_TARGET_NAME
from .error_text import first_line
from .errors import InvalidInputError
from .output_places import writing_to
from .weights_digest import weights_sha256


if TYPE_CHECKING:
    from huggingface_hub import EvalResult, ModelCard


__all__ = ["CardOptions", "build_drafter_card", "may_be_replaced", "save_drafter_card", "write_drafter_card"]

CARD_FILE = "README.md"
# In the template, so that a card written by hand is known from one that can be written anew.
_MARK = "<!-- Written by `adaflash card` from measured results; what is added by hand is lost when it runs again. -->"
# What stands in every section of transformers' own template.
_BLANK = "[More Information Needed]"
_TEMPLATE = "drafter.md"
_TAGS = ("adaflash", "dflash", "speculative-decoding")
# Under its own name the embedded target is not on the Hub.
_EMBEDDED_TARGET = ("HuggingFaceTB/SmolLM2-135M-Instruct", "apache-2.0")
_TAU = "eval_acceptance_length"
_POSITION = "eval_acceptance_position_"
_CURVE_POINTS = 8
# Runs before these, which may be many, are told in a line each.
_FULL_STAGES = 3
# Headings of the card under which notes may say something.
_TRAINING, _LIMITS = "Training", "Intended use and limits"


@dataclass(frozen=True)
class CardOptions:
    """
    What a directory cannot tell.

    Attributes:
        repo_id: Where the drafter will be; by default the name of its directory stands in the code.
        base_model: Hub id of the target; by default what the configuration names.
        license: Identifier of a licence; by default the target's, from the local cache or, given `repo_id`, the Hub.
        speed_tables: Titles and Markdown of further measurements, in order.
        results: Further entries of the model index.
        bench: Result files of `adaflash bench` and `adaflash evaluate`, in the order of their tables.
        records: Directory of `run.json` and `metrics.json`; by default the drafter's.
        notes: Markdown file with what nobody can measure, under the headings `## Training` and `## Intended use and
            limits`, or one of them; what stands before the first is left out.
    """

    repo_id: str | None = None
    base_model: str | None = None
    license: str | None = None
    speed_tables: Sequence[tuple[str, str]] = ()
    results: Sequence[EvalResult] = ()
    bench: Sequence[str | Path] = ()
    records: str | Path | None = None
    notes: str | Path | None = None


def write_drafter_card(directory: str | Path, options: CardOptions | None = None) -> Path:
    """
    Write the model card of a drafter into its directory.

    Args:
        directory (`str` or `Path`):
            A drafter's checkpoint.
        options ([`CardOptions`], *optional*):
            What the directory cannot tell.

    Returns:
        `Path`: the card.
    """
    return save_drafter_card(build_drafter_card(directory, options), directory)


def save_drafter_card(card: ModelCard, directory: str | Path) -> Path:
    """
    Write a card into a drafter's directory, whole or not at all.

    Args:
        card (`ModelCard`):
            From [`build_drafter_card`].
        directory (`str` or `Path`):
            Of the drafter.

    Returns:
        `Path`: the card.
    """
    path = Path(directory) / CARD_FILE
    with writing_to(path, "drafter"), written_aside(path) as partial:
        card.save(partial)
    return path


def may_be_replaced(text: str) -> bool:
    """
    Whether a card can be written anew without losing what somebody wrote.

    Args:
        text (`str`):
            A card.
    """
    body = re.sub(r"\A---\n.*?^---\n?", "", text, flags=re.MULTILINE | re.DOTALL)
    return _MARK in text or _BLANK in text or not body.strip()


def build_drafter_card(directory: str | Path, options: CardOptions | None = None) -> ModelCard:
    """
    The model card of a drafter.

    Args:
        directory (`str` or `Path`):
            A drafter's checkpoint; its `run.json` and `metrics.json` are used if there are any.
        options ([`CardOptions`], *optional*):
            What the directory cannot tell.

    Raises:
        InvalidInputError: the directory holds no drafter, or a result file is of another one.
    """
    from huggingface_hub import ModelCard, ModelCardData

    from .card_measurements import read_result_file

    options = options or CardOptions()
    directory = Path(directory)
    config = _read_config(directory)
    records = Path(options.records or directory)
    record = _read_json(records / "run.json") or {}
    metrics = _read_json(records / "metrics.json") or {}
    settings = record.get("settings", {})
    base_model = options.base_model or _hub_id(config.target_model_name_or_path or settings.get("target", ""))
    tau = tau_by_domain(metrics)
    repo_id = options.repo_id or directory.resolve().name
    name = repo_id.rpartition("/")[2]
    num_parameters = _num_parameters(config)
    identity = {
        "block_size": config.block_size,
        "drafter_parameters": num_parameters,
        "drafter_sha256": weights_sha256(directory),
    }
    measured = [read_result_file(path, identity, repo_id) for path in options.bench]
    notes = _read_notes(options.notes) if options.notes is not None else {}
    data = ModelCardData(
        model_name=name,
        base_model=base_model or None,
        base_model_relation="adapter" if base_model else None,
        library_name="transformers",
        license=options.license or _license_of(base_model, may_download=options.repo_id is not None),
        datasets=_datasets(record) or None,
        tags=list(_TAGS),
        eval_results=[
            *_eval_results(tau, record),
            *(result for file in measured for result in file.results()),
            *options.results,
        ]
        or None,
    )
    template = resources.files(__package__).joinpath("model_cards", _TEMPLATE).read_text(encoding="utf-8")
    return ModelCard.from_template(
        data,
        template_str=template,
        title=f"AdaFlash drafter for {base_model.rpartition('/')[2] or 'an unnamed target'}",
        base_model=base_model or "the target",
        base_model_link=f"[{base_model}](https://huggingface.co/{base_model})" if base_model else "an unnamed target",
        repo_id=repo_id,
        mark=_MARK,
        speed_tables=[*(file.table for file in measured), *options.speed_tables],
        servers=_servers(config, base_model or "path/to/target", repo_id),
        training_notes=notes.get(_TRAINING, ""),
        limits_notes=notes.get(_LIMITS, ""),
        num_parameters=_in_words(num_parameters),
        **_shape(config, directory),
        **_results(tau, metrics, record),
        **_stages(record),
    )


def tau_by_domain(metrics: Mapping[str, Any]) -> dict[str, float]:
    """
    Held-out acceptance length by domain, and of all of them together under `""` if there are several.

    Args:
        metrics (`Mapping[str, Any]`):
            From `DrafterTrainer.evaluate`.
    """
    tau = {
        key.removeprefix(_TAU).removeprefix("_"): float(value)
        for key, value in metrics.items()
        if key.startswith(_TAU) and key != f"{_TAU}_spread"
    }
    return {domain: value for domain, value in tau.items() if domain or len(tau) != 2}


def _read_config(directory: Path) -> DFlashDrafterConfig:
    if not directory.is_dir():  # or the Hub would be asked for it
        raise InvalidInputError(
            f"`directory` is {str(directory)!r}, which is not there; give that of a saved drafter."
        )
    try:
        return DFlashDrafterConfig.from_pretrained(directory)
    except OSError as error:
        raise InvalidInputError(
            f"`directory` is {str(directory)!r}, which holds no drafter (no config.json); give a saved one."
        ) from error


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _read_notes(path: str | Path) -> dict[str, str]:
    """Text by heading."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"`notes` is {str(path)!r}, which cannot be read ({first_line(error)}).") from error
    _, *parts = re.split(r"^## +(.*?) *$", text, flags=re.MULTILINE)
    notes = {heading: body.strip() for heading, body in zip(parts[::2], parts[1::2], strict=True)}
    if not notes or not notes.keys() <= {_TRAINING, _LIMITS}:
        raise InvalidInputError(
            f"`notes` is {str(path)!r}, with the headings {', '.join(map(repr, notes)) or 'none'}; write under "
            f"'## {_TRAINING}' and '## {_LIMITS}', or one of them."
        )
    return notes


def _hub_id(target: str) -> str:
    """The name under which the Hub knows a target; empty if only this machine does."""
    if target == EMBEDDED_TARGET_NAME:
        return _EMBEDDED_TARGET[0]
    is_id = target.count("/") <= 1 and not target.startswith((".", "~", "/")) and not Path(target).exists()
    return target if is_id else ""


def _license_of(base_model: str, *, may_download: bool) -> str | None:
    """The target's licence, if its card says so: a drafter is made from its weights and its words."""
    if not base_model or base_model == _EMBEDDED_TARGET[0]:
        return _EMBEDDED_TARGET[1] if base_model else None
    from huggingface_hub import ModelCard, hf_hub_download

    from .hub_upload import hub_errors

    try:
        # Where nothing is pushed there may be no network, and the Hub's client tries for half a minute.
        card = hf_hub_download(base_model, CARD_FILE, local_files_only=not may_download)
        return ModelCard.load(card, ignore_metadata_errors=True).data.license
    except hub_errors():
        return None  # no card, or no network


def _shape(config: DFlashDrafterConfig, directory: Path) -> dict[str, Any]:
    *others, last = map(str, config.target_layer_ids)
    return {
        "has_length_head": config.length_head_config is not None,
        "num_layers": config.num_hidden_layers,
        "block_size": config.block_size,
        "block_contents": f"the anchor and {config.block_size - 1} more rows, {config.draft_length} drafts",
        "num_draft_tokens": config.draft_vocab_size and f"{config.draft_vocab_size:,}",
        "has_sources": any(directory.glob("modeling_*.py")),
        "layers_read": f"layers {', '.join(others)} and {last}" if others else f"layer {last}",
    }


def _servers(config: DFlashDrafterConfig, target: str, drafter: str) -> list[dict[str, str]]:
    """Commands for each engine that can serve the drafter; the reason for those that cannot."""
    from .serving.formats.engine_limits import limits_of
    from .serving.launch_commands import launch_command

    titles = {"sglang": "SGLang", "vllm": "vLLM"}
    if config.length_head_config is not None:
        titles["sglang-plugin"] = "SGLang with the length head, by this package's plugin"
    entries = []
    for format_name, title in titles.items():
        reasons = [limit.text for limit in limits_of(config, format_name) if limit.is_fatal]
        out = f"{drafter.rpartition('/')[2]}-{format_name}"
        command = launch_command(format_name, config, target, out)
        lines = [f"adaflash export {shlex.join([drafter, out])} --to {format_name} --target {shlex.quote(target)}"]
        entries.append({"title": title, "reason": " ".join(reasons), "commands": "\n".join([*lines, str(command)])})
    return entries


def _num_parameters(config: DFlashDrafterConfig) -> int:
    import torch

    from .modeling_dflash_drafter import DFlashDrafterModel

    with torch.device("meta"):
        return int(DFlashDrafterModel(config).num_parameters())


def _in_words(count: int) -> str:
    return f"{count / 1e6:.1f}M" if count >= 1e5 else f"{count / 1e3:.1f}k"


def _datasets(record: Mapping[str, Any]) -> list[str]:
    """Hub data sets of all stages."""
    from .training.run_stages import stages_of

    sources = [source for stage in stages_of(record) for source in stage.get("data", {}).get("sources", [])]
    return sorted({name for source in sources for name in source.get("provenance", {}).get("datasets", [])})


def _eval_results(tau: Mapping[str, float], record: Mapping[str, Any]) -> list[EvalResult]:
    from huggingface_hub import EvalResult

    return [
        EvalResult(
            task_type="text-generation",
            task_name="Speculative decoding",
            dataset_type="adaflash-trajectories",
            dataset_name=f"Held-out responses of the target{f', {domain}' if domain else ''}",
            dataset_config=domain or "all",  # entries of one data set and configuration share its name
            dataset_args={"trajectories": record["data"]["held_out_trajectories"]} if "data" in record else None,
            metric_type="acceptance_length",
            metric_name="tau (greedy hindsight)",
            metric_value=round(value, 3),
        )
        for domain, value in tau.items()
    ]


def _results(tau: Mapping[str, float], metrics: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    from .evaluation.result_files import markdown_table

    domains = {domain: value for domain, value in tau.items() if domain}
    rows = [("all", tau[""])] if "" in tau else []
    shares = [value for key, value in metrics.items() if key.startswith(_POSITION)]
    error = metrics.get("eval_length_head_error")
    limits = ""
    if len(domains) > 1:
        best, worst = max(domains, key=domains.__getitem__), min(domains, key=domains.__getitem__)
        limits = f"It accepts most on {best} ({domains[best]:.2f}) and least on {worst} ({domains[worst]:.2f})."
    return {
        "results_table": markdown_table(["domain", "tau"], [*domains.items(), *rows]) if tau else "",
        "held_out": record.get("data", {}).get("held_out_trajectories", "the"),
        "positions": f"Share of blocks whose first 1, 2, ... drafts are accepted: {_percent(shares)}.",
        "length_head_error": "" if error is None else f"Mean error of the length head: {error:.3f} of a block.",
        "limits": limits,
    }


def _percent(shares: Sequence[float]) -> str:
    return ", ".join(f"{share:.0%}" for share in shares)


def _stages(record: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The runs that led here, the first one first: the last few of them in full, those before in a line each."""
    from .training.run_stages import stages_of

    if not record:
        return {"earlier_stages": [], "stages": []}
    first = 1 + record.get("previous_omitted", 0)
    stages = [_stage(stage, first + i, is_first=i == 0) for i, stage in enumerate(stages_of(record))]
    lines = [f"{stage['title']}; {stage['begun']}; commit {stage['commit']}." for stage in stages[:-_FULL_STAGES]]
    return {"earlier_stages": lines, "stages": stages[-_FULL_STAGES:]}


def _stage(record: Mapping[str, Any], number: int, *, is_first: bool) -> dict[str, str]:
    settings, outcome = record["settings"], record.get("outcome", {})
    parts = {None: "drafter and length head", "drafter": "the drafter", "length-head": "the length head alone"}
    what = parts.get(settings.get("only"), str(settings.get("only")))
    if settings.get("lora_rank") is not None:
        what = f"{what}, by an adapter of rank {settings['lora_rank']} that is merged here"
    begun = "started from the target's last layers"
    if settings.get("init") is not None:
        begun = f"went on from {Path(settings['init']).name}" if is_first else "went on from the stage before"
    begun += _duration(outcome)
    if "checkpoint" in record:
        begun += f"; the next stage began with its {record['checkpoint']}"
    listed = ", ".join(f"{name} {version}" for name, version in record.get("versions", {}).items())
    commit = f", commit {record['git_commit']}" if record.get("git_commit") else ""
    return {
        "title": f"Stage {number}: {what}",
        "begun": begun,
        "commit": record.get("git_commit") or "unknown",
        "start": f"Trained: {what}; {begun}.",
        "data": _describe_data(record.get("data", {})),
        "settings": _settings_table(settings, record.get("reasons", {})),
        "command": _command(record.get("argv", [])),
        "made_with": f"Made {_place(record.get('machine'))}with {listed}{commit}.",
        "curve": _curve(outcome.get("curve", [])),
    }


def _duration(outcome: Mapping[str, Any]) -> str:
    from .training.estimates import format_duration

    if outcome.get("elapsed_s") is None:
        return ""
    return f"; {outcome['step']} steps in {format_duration(outcome['elapsed_s'])}, evaluations included"


def _place(machine: Mapping[str, Any] | None) -> str:
    if not machine:
        return ""
    processes, threads = machine.get("processes", 1), machine.get("threads")
    details = f"{processes} process{'es' if processes > 1 else ''}"
    if threads is not None:
        details += f", {threads} thread{'s' if threads > 1 else ''}, {machine.get('logical_cpus')} logical CPUs"
    return f"on {machine.get('device')} ({details}) "


def _describe_data(data: Mapping[str, Any]) -> str:
    from .evaluation.result_files import markdown_table

    domains = data.get("train", {})
    rows = [(name, entry["trajectories"], entry["response_tokens"]) for name, entry in domains.items()]
    kinds = set()
    for source in data.get("sources", []):
        how = "greedy" if not source.get("temperature") else f"sampled at temperature {source['temperature']}"
        cut = f"at most {source['max_new_tokens']} tokens" if "max_new_tokens" in source else "of any length"
        kinds.add(f"{how}, {cut}, in {source.get('dtype', 'an unknown dtype')}")
    described = f"Data: the target's own responses ({'; '.join(sorted(kinds))})." if kinds else "Data: trajectories."
    return (
        f"{described}\n\n{markdown_table(['domain', 'trajectories', 'response tokens'], rows)}" if rows else described
    )


def _settings_table(settings: Mapping[str, Any], reasons: Mapping[str, str]) -> str:
    lines = ["| setting | value | why |", "|:--|:--|:--|"]
    lines += [f"| {name} | {settings[name]} | {reason} |" for name, reason in reasons.items() if name in settings]
    return "\n".join(lines)


def _command(argv: Sequence[str]) -> str:
    """The command line, with the names instead of the places of files."""
    if not argv:
        return "adaflash train"
    arguments = [Path(argument).name if Path(argument).is_absolute() else argument for argument in argv]
    return shlex.join(["adaflash", *arguments[1:]])


def _curve(points: Sequence[Mapping[str, Any]]) -> str:
    """Some of the evaluations on the way, the first and the last among them."""
    from .evaluation.result_files import markdown_table

    if len(points) < 2:
        return ""
    wanted = sorted({round(i * (len(points) - 1) / (_CURVE_POINTS - 1)) for i in range(_CURVE_POINTS)})
    rows = [(points[i]["step"], round(points[i]["elapsed_s"] / 60), float(points[i][_TAU])) for i in wanted]
    return "Held-out tau on the way:\n\n" + markdown_table(["step", "minutes", "tau"], rows)
