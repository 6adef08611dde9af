"""A domain shift from prompt files to tables and curves: what `adaflash evaluate online` and `cross-domain` do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InvalidInputError
from .loading import LoadedModels, check_checkpoint, find_drafter, load_drafter, load_models


if TYPE_CHECKING:
    from rich.console import Console

    from ..evaluation.domain_shift import DomainShift, DomainShiftSettings, FinishedShiftRun
    from ..evaluation.domain_traffic import DomainResponses, TrafficPlan, TrafficShape
    from ..training.prompts import Prompt


__all__ = ["PROMPT_FILES", "ShiftRun"]

PROMPT_FILES = {"maths": "gsm8k_train.jsonl", "code": "codealpaca.json", "chat": "alpaca_seed_tasks.jsonl"}
RESULTS = "results"
# As many as `adaflash trajectories` keeps by default.
_TEACHER_TOP_K = 16
# Of the prompts that some of must be judged by; their hashes decide which.
_SPARE = 1.5


@dataclass(frozen=True)
class ShiftRun:
    """
    What the options came to; `compare` and `cross` go through the run.

    Attributes:
        data: Directory with [`PROMPT_FILES`].
        prompts: Files of prompts of other domains, or in place of those, by domain.
        trajectories: Answers that are there already.
        references: Drafters that know a domain, by domain; others are trained.
        guard: Whether only rounds that held-out traffic approves of are published.
        stored_teacher: Whether to train on the likeliest tokens that are stored with the answers.
        out: Directory of results; finished runs are kept there.
        The others are as in [`DomainShiftSettings`] and [`TrafficShape`].
    """

    target: str
    drafter: str | None
    dtype: str
    device: str | None
    data: Path | None
    prompts: dict[str, Path]
    trajectories: list[Path]
    home: str
    phases: list[str]
    rounds_per_phase: int
    trajectories_per_round: int
    home_trajectories: int | None
    held_out: int
    held_out_anchors: int
    max_new_tokens: int
    max_prompt_tokens: int
    replay: bool
    concurrency: int
    length_policy: str
    length_scale: float
    balanced: bool
    guard: bool
    epochs: int
    gradient_accumulation: int
    anchors: int
    learning_rate: float
    lora_learning_rate: float
    stored_teacher: bool
    references: dict[str, str]
    reference_epochs: int
    seeds: list[int]
    out: Path
    console: Console

    def compare(self, methods: Sequence[str], plots: bool) -> None:
        """
        Let every method serve and adapt to the same traffic, seed by seed.

        Args:
            methods (`Sequence[str]`):
                Of `METHODS`; `static` always comes first.
            plots (`bool`):
                Whether to draw curves.
        """
        from ..evaluation.domain_shift import STATIC

        shift, plans, models, write = self._prepare(plots, methods)
        runs: list[FinishedShiftRun] = []
        references: list[FinishedShiftRun] = []
        sections: list[str] = []
        # Seed by seed: a comparison that is stopped early is complete for some seeds.
        # The references come after the first, which shows whether the rest is worth waiting for.
        for seed, plan in plans.items():
            for method in dict.fromkeys([STATIC, *methods]):
                runs.append(self._run(shift, method, seed, plan))
                sections = write(runs, references)
            if not references:
                known = [d for d in shift.settings.shape.domains if d != self.home or d in self.references]
                references = self._run_references(shift, plan, models, known)
            sections = write(runs, references)
        self._say("\n\n".join(sections))

    def cross(self, plots: bool) -> None:
        """
        Train the drafter on each domain and judge it on all of them.

        Args:
            plots (`bool`):
                Whether to draw a map.
        """
        from ..evaluation.bench import describe_environment
        from ..evaluation.cross_domain import cross_domain_results, cross_domain_sections, plot_cross_domain
        from ..evaluation.domain_shift import STATIC
        from ..evaluation.result_files import write_results

        shift, plans, models, _ = self._prepare(plots, ())
        seed, plan = next(iter(plans.items()))
        start = self._run(shift, STATIC, seed, plan)
        trained = self._run_references(shift, plan, models, list(dict.fromkeys(self.phases)))
        environment = describe_environment(models.target_model, models.drafter)
        results = cross_domain_results(start, trained, shift.settings, environment)
        sections = cross_domain_sections(results)
        write_results(self.out / RESULTS, results, "Cross-domain generalisation", sections)
        if plots:
            plot_cross_domain(results, self.out / RESULTS)
        self._say("\n\n".join(sections))

    @cached_property
    def start(self) -> str:
        """The drafter that all begin with."""
        return find_drafter(self.target, self.drafter)

    def settings(self) -> DomainShiftSettings:
        """What all runs have in common."""
        from ..evaluation.domain_shift import DomainShiftSettings
        from ..evaluation.domain_traffic import TrafficShape
        from ..evaluation.result_files import shown_name

        shape = TrafficShape(
            home=self.home,
            phases=tuple(self.phases),
            rounds_per_phase=self.rounds_per_phase,
            trajectories_per_round=self.trajectories_per_round,
            home_trajectories=self.home_trajectories or self.trajectories_per_round,
            held_out=self.held_out,
            held_out_share=0.125 if self.guard else 0.0,
        )
        return DomainShiftSettings(
            start=shown_name(self.start),
            target=self.target,
            shape=shape,
            max_new_tokens=self.max_new_tokens,
            is_live=not self.replay,
            length_policy=self.length_policy,
            length_scale=self.length_scale,
            concurrency=self.concurrency,
            held_out_anchors=self.held_out_anchors,
            learning_rate=self.learning_rate,
            lora_learning_rate=self.lora_learning_rate,
            reference_epochs=self.reference_epochs,
            training={
                "epochs": self.epochs,
                "gradient_accumulation_steps": self.gradient_accumulation,
                "anchors_per_trajectory": self.anchors,
                "balanced": self.balanced,
                "max_tokens": self.max_prompt_tokens + self.max_new_tokens,
            },
        )

    def _prepare(
        self, plots: bool, methods: Sequence[str]
    ) -> tuple[DomainShift, dict[int, TrafficPlan], LoadedModels, Callable[..., Any]]:
        """Loads the models and finds out what the target says; what is missing is said before that."""
        from ..evaluation.bench import describe_environment
        from ..evaluation.domain_shift import REFERENCE, DomainShift
        from ..evaluation.domain_shift_plots import plot_shift
        from ..evaluation.domain_shift_report import shift_results, shift_sections
        from ..evaluation.result_files import write_results

        settings = self.settings()
        for method in (REFERENCE, *methods):
            settings.arguments(method, 0)
        for path in self.references.values():
            check_checkpoint(path, "--reference", target=self.target)
        layer_ids = check_checkpoint(self.start, length_policy=self.length_policy, target=self.target).target_layer_ids
        if self.trajectories:
            responses, plans = self._plan(self.trajectories, settings.shape, layer_ids)
        else:
            prompts = self._read_prompts(settings.shape)
        models = load_models(self.target, self.start, self.dtype, self.device, False, self.console)
        if not self.trajectories:
            answered = self._answer_prompts(prompts, settings.shape, models)
            responses, plans = self._plan([answered], settings.shape, layer_ids)
        if self.stored_teacher:
            settings = replace(settings, teacher_top_k=responses.teacher_top_k)
        shift = DomainShift(models.target_model, models.drafter, responses, settings, self.out)
        environment = describe_environment(models.target_model, models.drafter)

        def write(runs: list[FinishedShiftRun], references: list[FinishedShiftRun]) -> list[str]:
            sections = shift_sections(runs, references, settings)
            data = shift_results(runs, references, settings, environment)
            write_results(self.out / RESULTS, data, "Domain shift", sections)
            if plots:
                plot_shift(runs, references, self.out / RESULTS)
            return sections

        return shift, plans, models, write

    def _plan(
        self, directories: Sequence[Path], shape: TrafficShape, layer_ids: Sequence[int]
    ) -> tuple[DomainResponses, dict[int, TrafficPlan]]:
        """What is served when, by seed."""
        from ..evaluation.domain_traffic import DomainResponses, plan_traffic

        responses = DomainResponses(directories, self.max_new_tokens, layer_ids)
        return responses, {seed: plan_traffic(responses, shape, seed) for seed in self.seeds}

    def _run(self, shift: DomainShift, method: str, seed: int, plan: TrafficPlan) -> FinishedShiftRun:
        run, was_done = shift.run(method, seed, plan, lambda entry: self._show_round(method, seed, entry))
        self._say(f"{method}, seed {seed}: {'found' if was_done else f'{run.seconds:.0f} s'}")
        return run

    def _run_references(
        self, shift: DomainShift, plan: TrafficPlan, models: LoadedModels, domains: Sequence[str]
    ) -> list[FinishedShiftRun]:
        """Drafters that know a domain: those that were given, else the start, trained on what is served of it."""
        finished = []
        for domain in domains:
            given = self.references.get(domain)
            drafter = None if given is None else load_drafter(given, models.target_model, "--reference")
            finished.append(shift.run_reference(domain, plan, drafter))
            tau = finished[-1].rounds[0]["held_out"][domain]["acceptance_length"]
            self._say(f"trained on {domain}: held-out tau {tau:.3f}")
        return finished

    def _prompt_files(self, shape: TrafficShape) -> dict[str, Path]:
        files = dict(self.prompts)
        for domain in shape.domains:
            if domain not in files and self.data is not None and domain in PROMPT_FILES:
                files[domain] = self.data / PROMPT_FILES[domain]
            if domain not in files or not files[domain].is_file():
                raise InvalidInputError(
                    f"No prompts of {domain!r}: {files.get(domain)} is not a file. Give --prompts {domain}=FILE, or "
                    f"--data with a directory that holds {PROMPT_FILES.get(domain, 'it')}."
                )
        return {domain: files[domain] for domain in shape.domains}

    def _read_prompts(self, shape: TrafficShape) -> dict[str, list[Prompt]]:
        """Those of each domain; some may be too long, which only the target's tokenizer knows."""
        from ..evaluation.domain_traffic import too_few_prompts
        from ..training.prompts import read_prompt_file

        prompts = {domain: read_prompt_file(path, domain) for domain, path in self._prompt_files(shape).items()}
        for domain, found in prompts.items():
            if len(set(found)) < shape.prompts_of(domain):
                raise too_few_prompts(shape, domain, len(set(found)))
        return prompts

    def _choose_prompts(
        self, prompts: dict[str, list[Prompt]], shape: TrafficShape, tokenizer: Any
    ) -> tuple[list[list[int]], list[str]]:
        """As many different prompts of each domain as are needed, and their domains."""
        from ..evaluation.domain_traffic import too_few_prompts
        from ..training.prompts import encode_prompts

        chosen: list[list[int]] = []
        domains: list[str] = []
        for domain, read in prompts.items():
            wanted = int(shape.prompts_of(domain) * (_SPARE if shape.held_out_share else 1))
            encoded = encode_prompts(tokenizer, read)
            different = {tuple(ids): ids for ids in encoded if len(ids) <= self.max_prompt_tokens}
            if len(different) < shape.prompts_of(domain):
                raise too_few_prompts(shape, domain, len(different))
            found = list(different.values())[:wanted]
            chosen += found
            domains += [domain] * len(found)
        return chosen, domains

    def _answer_prompts(self, read: dict[str, list[Prompt]], shape: TrafficShape, models: LoadedModels) -> Path:
        """The target's responses to all prompts, once for all methods and seeds."""
        from ..training.trajectories import TrajectorySettings, generate_trajectories

        prompts, domains = self._choose_prompts(read, shape, models.tokenizer)
        # Only a replay reads each response so often that the target's states are worth their disk space.
        layers = tuple(models.drafter.config.target_layer_ids) if self.replay else ()
        settings = TrajectorySettings(
            max_new_tokens=self.max_new_tokens,
            capture_layer_ids=layers,
            teacher_top_k=_TEACHER_TOP_K if self.stored_teacher else 0,
        )
        directory = self.out / "trajectories"
        done = 0

        def show(report: Any) -> None:
            nonlocal done
            done += report.trajectories
            self._say(f"{done} of {len(prompts)} prompts answered")

        provenance = {"files": [path.name for path in self._prompt_files(shape).values()]}
        generate_trajectories(models.target_model, prompts, domains, directory, settings, show, provenance=provenance)
        return directory

    def _show_round(self, method: str, seed: int, entry: dict[str, Any]) -> None:
        held_out = ", ".join(f"{domain} {one['acceptance_length']:.3f}" for domain, one in entry["held_out"].items())
        outcome, tau = entry["training"].get("outcome", "untrained"), entry["served"]["acceptance_length"]
        text = f"{method}, seed {seed}, round {entry['number']} ({entry['domain']}): tau {tau:.3f}; {outcome}"
        self._say(f"{text}; held out: {held_out}")

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)
