"""Finished domain shifts as tables: what adapting recovered of each gap, what it cost at home, what the head chose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .domain_shift import REFERENCE, STATIC, DomainShiftSettings, FinishedShiftRun
from .result_files import markdown_table, mean_and_spread


__all__ = ["PhaseOutcome", "phase_outcomes", "shift_results", "shift_sections"]

_TAU = "acceptance_length"
# Below it a share of the gap would be a share of noise.
_LEAST_GAP = 0.05


@dataclass(frozen=True)
class PhaseOutcome:
    """
    What one run made of one phase; tau is held-out acceptance length.

    Attributes:
        phase: Number of the phase.
        domain: Domain served in it.
        before: Tau on that domain when the phase began.
        after: Tau on it when the phase ended.
        start: Tau on it of the drafter that nothing was taught.
        reference: Tau on it of a drafter trained on it; None if there is none.
        recovered: Share of the gap between `start` and `reference` that is closed at the end; None without a gap.
        left: Domain served before.
        left_before: Tau on that domain when it was left.
        left_after: Tau on it when the phase ended.
    """

    phase: int
    domain: str
    before: float
    after: float
    start: float
    reference: float | None
    recovered: float | None
    left: str
    left_before: float
    left_after: float

    @property
    def change_of_left(self) -> float:
        """Relative change of tau on the domain that was left."""
        return self.left_after / self.left_before - 1


def phase_outcomes(run: FinishedShiftRun, references: Mapping[str, float]) -> list[PhaseOutcome]:
    """
    One entry for each phase.

    Args:
        run (`FinishedShiftRun`):
            Of any method.
        references (`Mapping[str, float]`):
            Held-out tau of a drafter trained on a domain, by domain.
    """
    outcomes = []
    for phase in range(max(entry["phase"] for entry in run.rounds) + 1):
        first = next(i for i, entry in enumerate(run.rounds) if entry["phase"] == phase)
        last = max(i for i, entry in enumerate(run.rounds) if entry["phase"] == phase)
        domain, left = run.rounds[first]["domain"], run.rounds[first - 1]["domain"]
        start, after = _tau(run, 0, domain), _tau(run, last, domain)
        reference = references.get(domain)
        gap = 0.0 if reference is None else reference - start
        outcomes.append(
            PhaseOutcome(
                phase=phase,
                domain=domain,
                before=_tau(run, first - 1, domain),
                after=after,
                start=start,
                reference=reference,
                recovered=(after - start) / gap if gap >= _LEAST_GAP else None,
                left=left,
                left_before=_tau(run, first - 1, left),
                left_after=_tau(run, last, left),
            )
        )
    return outcomes


def shift_results(
    runs: Sequence[FinishedShiftRun],
    references: Sequence[FinishedShiftRun],
    settings: DomainShiftSettings,
    environment: Mapping[str, Any],
) -> dict[str, Any]:
    """
    Everything measured, as plain data.

    Args:
        runs (`Sequence[FinishedShiftRun]`):
            All methods and seeds that are finished.
        references (`Sequence[FinishedShiftRun]`):
            Of the domains.
        settings (`DomainShiftSettings`):
            What all have in common.
        environment (`Mapping[str, Any]`):
            Machine and versions.
    """
    taus = _reference_taus(references)
    return {
        "config": asdict(settings),
        "environment": dict(environment),
        "references": {_domain_of(run): {**run.rounds[0]["held_out"], "seconds": run.seconds} for run in references},
        "runs": [
            {
                "method": run.method,
                "seed": run.seed,
                "training": run.training,
                "seconds": run.seconds,
                "rounds": run.rounds,
                "phases": [asdict(outcome) for outcome in phase_outcomes(run, taus)],
            }
            for run in runs
        ],
    }


def shift_sections(
    runs: Sequence[FinishedShiftRun], references: Sequence[FinishedShiftRun], settings: DomainShiftSettings
) -> list[str]:
    """
    Paragraphs and tables of a Markdown report.

    Args:
        runs (`Sequence[FinishedShiftRun]`):
            All methods and seeds that are finished.
        references (`Sequence[FinishedShiftRun]`):
            Of the domains.
        settings (`DomainShiftSettings`):
            What all have in common.
    """
    sections = [_budget(settings, runs), "## Held-out tau by phase", _phases_table(runs, references)]
    sections += ["## Spread of held-out tau between the best and the worst domain", _spread_table(runs)]
    sections += ["## Tau of the traffic, first and last round of each phase", _served_table(runs, settings.is_live)]
    if any("head_rows" in measured for run in runs for measured in run.rounds[-1]["held_out"].values()):
        sections += ["## Length head, at the end of each phase, on the domain served", _heads_table(runs)]
    unused = sum(bool(entry["training"].get("refused")) for run in runs for entry in run.rounds)
    lost = sum(entry["training"].get("outcome", "published") != "published" for run in runs for entry in run.rounds)
    other = sum(entry["served"]["different_responses"] for run in runs for entry in run.rounds)
    served = sum(entry["served"]["requests"] for run in runs for entry in run.rounds)
    sections.append(
        f"Rounds whose weights were not published: {lost}; published versions that serving refused: {unused}. "
        f"Responses that differ from plain greedy decoding: {other} of {served}"
        + ("." if settings.is_live else " (a replay serves those that are known).")
    )
    return sections


def _budget(settings: DomainShiftSettings, runs: Sequence[FinishedShiftRun]) -> str:
    shape = settings.shape
    served = (
        f"decoded by the engine, {settings.concurrency} at a time"
        if settings.is_live
        else "replayed with the drafter alone, which gives the rounds of greedy decoding"
    )
    training = ", ".join(f"{name} {value}" for name, value in settings.training.items()) or "defaults"
    teacher = "all of them"
    if settings.teacher_top_k is not None:
        teacher = f"those of the {settings.teacher_top_k} likeliest tokens, all others taken together"
    seeds = ", ".join(str(seed) for seed in sorted({run.seed for run in runs}))
    return (
        f"{settings.start} knows {shape.home} and serves {', then '.join(shape.phases)}: "
        f"{shape.rounds_per_phase} rounds each of {shape.trajectories_per_round} trajectories to learn from, after "
        f"{shape.home_trajectories} of {shape.home}. Responses are greedy, of at most {settings.max_new_tokens} "
        f"tokens, {served}; lengths: {settings.length_policy}. Learning rate {settings.learning_rate:g} (LoRA "
        f"{settings.lora_learning_rate:g}), {training}; what they learn of the target's probabilities: {teacher}. "
        "Every method sees the same requests in the same rounds. "
        f"Held-out tau: {shape.held_out} responses of each domain that are never served, up to "
        f"{settings.held_out_anchors} blocks each, greedy hindsight, whole blocks. A reference is the same start, "
        f"trained {settings.reference_epochs} times over all that is served of its domain, unless another drafter was "
        f"given. Seeds: {seeds}; values are means ± standard deviations over them."
    )


def _phases_table(runs: Sequence[FinishedShiftRun], references: Sequence[FinishedShiftRun]) -> str:
    taus = _reference_taus(references)
    header = ["phase", "method", "tau before", "after", "start", "reference", "recovered share of the gap"]
    header += ["domain left", "its tau when left", "after", "change", "seeds"]
    lines: list[list[Any]] = []
    by_method = _by_method(runs)
    outcomes = {method: [phase_outcomes(run, taus) for run in members] for method, members in by_method.items()}
    for phase in range(max((len(one[0]) for one in outcomes.values()), default=0)):
        for method, per_seed in outcomes.items():
            found = [one[phase] for one in per_seed]
            reference = found[0].reference
            lines.append(
                [
                    f"{phase + 1}: {found[0].domain}",
                    method,
                    mean_and_spread([one.before for one in found]),
                    mean_and_spread([one.after for one in found]),
                    f"{found[0].start:.3f}",
                    None if reference is None else f"{reference:.3f}",
                    mean_and_spread([one.recovered for one in found if one.recovered is not None], digits=2),
                    found[0].left,
                    mean_and_spread([one.left_before for one in found]),
                    mean_and_spread([one.left_after for one in found]),
                    f"{mean_and_spread([100 * one.change_of_left for one in found], digits=1)} %",
                    str(len(found)),
                ]
            )
    return markdown_table(header, lines)


def _spread_table(runs: Sequence[FinishedShiftRun]) -> str:
    lines = []
    for method, members in _by_method(runs).items():
        spreads = [[_spread(run.rounds[place]["held_out"]) for run in members] for place in (0, -1)]
        lines.append([method, *(mean_and_spread(values) for values in spreads)])
    return markdown_table(["method", "at the start", "at the end"], lines)


def _spread(held_out: Mapping[str, Mapping[str, float]]) -> float:
    taus = [measured[_TAU] for measured in held_out.values()]
    return max(taus) - min(taus)


def _served_table(runs: Sequence[FinishedShiftRun], is_live: bool) -> str:
    figures = {_TAU: ("tau", 3), "mean_verify_length": ("rows verified per round", 2)}
    if is_live:  # a replay's speed is nobody's
        figures["tok_per_s"] = ("tokens/s", 1)
    header = ["phase", "method"]
    for title, _ in figures.values():
        header += [f"{title}, first", "last"]
    lines: list[list[Any]] = []
    for phase in _phases(runs):
        for method, members in _by_method(runs).items():
            served = [[entry for entry in run.rounds if entry["phase"] == phase] for run in members]
            line: list[Any] = [f"{phase + 1}: {served[0][0]['domain']}", method]
            for name, (_, digits) in figures.items():
                for place in (0, -1):
                    values = _known([entries[place]["served"] for entries in served], name)
                    line.append(mean_and_spread(values, digits=digits))
            lines.append(line)
    return markdown_table(header, lines)


def _heads_table(runs: Sequence[FinishedShiftRun]) -> str:
    header = ["phase", "method", "error (tokens), before", "after", "rows it would verify", "tau with these"]
    header.append("tokens per row verified")
    lines: list[list[Any]] = []
    for phase in _phases(runs):
        for method, members in _by_method(runs).items():
            before, after = [], []
            for run in members:
                places = [i for i, entry in enumerate(run.rounds) if entry["phase"] == phase]
                domain = run.rounds[places[0]]["domain"]
                before.append(run.rounds[places[0] - 1]["held_out"][domain])
                after.append(run.rounds[places[-1]]["held_out"][domain])
            ratios = [one["head_acceptance_length"] / one["head_rows"] for one in after if "head_rows" in one]
            lines.append(
                [
                    f"{phase + 1}: {domain}",
                    method,
                    mean_and_spread(_known(before, "head_error_tokens")),
                    mean_and_spread(_known(after, "head_error_tokens")),
                    mean_and_spread(_known(after, "head_rows"), digits=2),
                    mean_and_spread(_known(after, "head_acceptance_length")),
                    mean_and_spread(ratios),
                ]
            )
    return markdown_table(header, lines)


def _phases(runs: Sequence[FinishedShiftRun]) -> list[int]:
    return sorted({entry["phase"] for run in runs for entry in run.rounds if entry["phase"] >= 0})


def _by_method(runs: Sequence[FinishedShiftRun]) -> dict[str, list[FinishedShiftRun]]:
    grouped: dict[str, list[FinishedShiftRun]] = {}
    # What is never trained comes first, whatever order the runs were done in.
    for run in sorted(runs, key=lambda one: (one.method != STATIC, one.seed)):
        grouped.setdefault(run.method, []).append(run)
    return grouped


def _reference_taus(references: Sequence[FinishedShiftRun]) -> dict[str, float]:
    return {_domain_of(run): run.rounds[0]["held_out"][_domain_of(run)][_TAU] for run in references}


def _domain_of(reference: FinishedShiftRun) -> str:
    return reference.method.removeprefix(f"{REFERENCE}-")


def _tau(run: FinishedShiftRun, place: int, domain: str) -> float:
    return float(run.rounds[place]["held_out"][domain][_TAU])


def _known(measured: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [one[name] for one in measured if one.get(name) is not None]
