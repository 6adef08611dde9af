"""A drafter that knows one domain serves others: how fast does each way of adapting it catch up, and what is lost?

Every run serves the same requests in the same rounds. After each round of traffic, what was recorded goes through the
real replay buffer, trainer, publisher and hot reload, one after the other in this process, so that a round is a round
for every method (`adaflash online` has serving and training in processes of their own). Acceptance is measured twice:
on the traffic of a round, before anything has been learned from it, and after the round on responses of each domain
that are never served.

Each finished run is kept in a file of its own, so that a killed comparison goes on where it was.
"""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..atomic_files import written_aside
from ..errors import InvalidInputError
from ..generation.engine_handles import RequestResult
from ..online.online_arguments import OnlineTrainingArguments
from ..online.round_training import RoundTrainer, StoredOutputs
from .domain_adaptation import DomainAdaptation
from .domain_serving import Server, new_server
from .domain_traffic import DomainResponses, TrafficPlan, TrafficRound, TrafficShape
from .finished_runs import read_finished_run, refuse_difference
from .held_out_acceptance import measure_held_out


if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..modeling_dflash_drafter import DFlashDrafterModel


__all__ = [
    "METHODS",
    "REFERENCE",
    "STATIC",
    "DomainShift",
    "DomainShiftSettings",
    "FinishedShiftRun",
]

STATIC = "static"
# `reference-code` is the start, trained on all of the code that is served, long enough to know it.
REFERENCE = "reference"
METHODS: dict[str, dict[str, Any]] = {
    STATIC: {},
    "osd": {"objective": "forward_kl"},
    "adaflash": {"objective": "mixture"},
    "adaflash-lora": {"objective": "mixture", "lora_rank": 16},
    "adaflash-balanced": {"objective": "mixture", "balanced": True},
    "adaflash-head-off": {"objective": "mixture", "trained_parts": "drafter"},
    "adaflash-truncated": {"objective": "mixture", "length_labels": "truncated"},
}
_LORA = "lora_rank"


@dataclass(frozen=True)
class DomainShiftSettings:
    """
    What all runs have in common.

    Attributes:
        start: Name of the drafter that all begin with.
        shape: How much is served of what.
        max_new_tokens: Longest response.
        is_live: Whether requests are decoded by the engine; else known responses are replayed with the drafter alone.
        length_policy: `"fixed"` (whole blocks) or `"length_head"`, of the traffic.
        length_scale: Of the length head.
        concurrency: Requests at a time of live decoding.
        held_out_anchors: Blocks per held-out response.
        learning_rate: Of all methods but LoRA.
        lora_learning_rate: Of LoRA.
        reference_epochs: How often a reference goes through the traffic of its domain.
        teacher_top_k: Train on this many likeliest tokens of the target, as they are stored with the responses; by
            default on its whole distributions, which a forward pass gives. For replays.
        training: Further fields of `OnlineTrainingArguments`, the same for all methods.
        target: Name of the target.
    """

    start: str
    shape: TrafficShape
    max_new_tokens: int
    is_live: bool = True
    length_policy: str = "fixed"
    length_scale: float = 1.3
    concurrency: int = 16
    held_out_anchors: int = 32
    learning_rate: float = 3e-4
    lora_learning_rate: float = 1e-3
    reference_epochs: int = 6
    teacher_top_k: int | None = None
    training: dict[str, Any] = field(default_factory=dict)
    target: str = ""

    def arguments(self, method: str, seed: int) -> OnlineTrainingArguments:
        """
        What a method trains with.

        Args:
            method (`str`):
                Of [`METHODS`], or a reference.
            seed (`int`):
                Of the run.
        """
        fields = {**METHODS["adaflash" if method.startswith(REFERENCE) else method]}
        rate = self.lora_learning_rate if _LORA in fields else self.learning_rate
        is_guarded = self.shape.held_out_share > 0
        common = {
            "round_size": self.shape.trajectories_per_round,
            "learning_rate": rate,
            "length_scale": self.length_scale,
            "seed": seed,
            "held_out": OnlineTrainingArguments.held_out if is_guarded else 0,
            "min_held_out": 0,
        }
        return OnlineTrainingArguments(**{**common, **self.training, **fields})


@dataclass(frozen=True)
class FinishedShiftRun:
    """
    What a run gave, as it is kept.

    Attributes:
        method: Of [`METHODS`], or `reference-` and a domain.
        seed: Of the run.
        common: What all runs have in common.
        training: What this one trained with; empty for static.
        rounds: One entry per round of traffic. The first is the home's, before anything is trained. Each has
            `number`, `phase`, `domain`, `version` in use after it, `served`, `training` and `held_out` by domain.
        seconds: Of the run.
    """

    method: str
    seed: int
    common: dict[str, Any]
    training: dict[str, Any]
    rounds: list[dict[str, Any]]
    seconds: float


class DomainShift:
    """
    Does the runs.

    Args:
        target (`PreTrainedModel`):
            The target.
        start (`DFlashDrafterModel`):
            The drafter that all runs begin with, in the target's dtype; stays as it is.
        responses (`DomainResponses`):
            What the target says.
        settings (`DomainShiftSettings`):
            What all runs have in common.
        directory (`Path`):
            Where finished runs are kept, and each run works.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        start: DFlashDrafterModel,
        responses: DomainResponses,
        settings: DomainShiftSettings,
        directory: str | Path,
    ) -> None:
        self.target, self.start, self.responses, self.settings = target, start, responses, settings
        self.directory = Path(directory)
        self._teacher = None if settings.teacher_top_k is None else _stored_teacher(settings, responses)
        # Names and numbers may agree where weights or prompts do not.
        self._common = {
            **asdict(settings),
            "start_sha256": _digest_of_weights(start),
            "responses_sha256": responses.digest,
        }

    def run(
        self, method: str, seed: int, plan: TrafficPlan, on_round: Callable[[dict[str, Any]], None] | None = None
    ) -> tuple[FinishedShiftRun, bool]:
        """
        One method on the traffic of one seed, unless it is done already.

        Args:
            method (`str`):
                Of [`METHODS`].
            seed (`int`):
                Of traffic and training.
            plan (`TrafficPlan`):
                The traffic of that seed.
            on_round (`Callable`, *optional*):
                Called with each round's entry.

        Returns:
            `tuple`: the run, and whether it was there already
        """
        if method not in METHODS:
            raise InvalidInputError(f"`method` is {method!r}; choose from {', '.join(map(repr, METHODS))}.")
        arguments = self.settings.arguments(method, seed)
        training = {} if method == STATIC else arguments.to_dict()
        if (stored := self._stored(method, seed, training)) is not None:
            return stored, True
        workspace = self.directory / "work" / f"{method}-seed{seed}"
        shutil.rmtree(workspace, ignore_errors=True)  # of a run that was killed
        workspace.mkdir(parents=True)
        began_s = time.perf_counter()
        drafter = copy.deepcopy(self.start)
        server = new_server(self.target, drafter, self.responses, self.settings)
        rounds: list[dict[str, Any]] = []
        with ExitStack() as stack:
            adaptation = None
            if method != STATIC:
                adaptation = DomainAdaptation(
                    self.target,
                    self.start,
                    server,
                    arguments,
                    workspace,
                    max_requests=plan.num_requests,
                    held_out_share=self.settings.shape.held_out_share,
                    stored=self._teacher,
                )
                stack.enter_context(adaptation)
            for traffic in plan.rounds:
                held_out = rounds[-1]["held_out"] if rounds else None
                rounds.append(self._round(traffic, plan, server, adaptation, held_out))
                if on_round is not None:
                    on_round(rounds[-1])
        run = self._keep(method, seed, training, rounds, time.perf_counter() - began_s)
        shutil.rmtree(workspace, ignore_errors=True)
        return run, False

    def run_reference(
        self, domain: str, plan: TrafficPlan, drafter: DFlashDrafterModel | None = None
    ) -> FinishedShiftRun:
        """
        What a drafter that was trained on one domain accepts: the gap that adapting can close.

        Args:
            domain (`str`):
                The domain.
            plan (`TrafficPlan`):
                Traffic; what is served of the domain is what it is trained on.
            drafter (`DFlashDrafterModel`, *optional*):
                Judge this one; by default the start is trained, `reference_epochs` times over all of it.
        """
        method = f"{REFERENCE}-{domain}"
        arguments = self.settings.arguments(method, 0)
        training = {**arguments.to_dict(), "epochs": self.settings.reference_epochs}
        training |= {} if drafter is None else {"drafter": drafter.config.name_or_path}
        if (stored := self._stored(method, 0, training)) is not None:
            return stored
        began_s = time.perf_counter()
        if drafter is None:
            trajectories = [self.responses.recorded(index) for index in plan.served(domain)]
            arguments = OnlineTrainingArguments(**training)
            trainer = RoundTrainer(copy.deepcopy(self.start), self.target, arguments, stored=self._teacher)
            trainer.train(trajectories, 1)
            drafter = trainer.model.to(self.start.dtype)
        entry = {"number": 0, "phase": -1, "domain": domain, "held_out": self._held_out(drafter, plan)}
        return self._keep(method, 0, training, [entry], time.perf_counter() - began_s)

    def _round(
        self,
        traffic: TrafficRound,
        plan: TrafficPlan,
        server: Server,
        adaptation: DomainAdaptation | None,
        held_out: dict[str, dict[str, float]] | None,
    ) -> dict[str, Any]:
        began_s = time.perf_counter()
        results = server.serve(traffic.indices, traffic.domain)
        served = _served(results, time.perf_counter() - began_s)
        served["different_responses"] = sum(
            result.token_ids != self.responses.response_ids(index)
            for index, result in zip(traffic.indices, results, strict=True)
        )
        trained: dict[str, Any] = {}
        if adaptation is not None:
            # Nothing is trained on the home's traffic: the drafter knows it.
            trained = adaptation.adapt(len(results), is_training=traffic.phase >= 0)
        if trained or held_out is None:
            held_out = self._held_out(server.drafter, plan)
        return {
            "number": traffic.number,
            "phase": traffic.phase,
            "domain": traffic.domain,
            "version": server.drafter_version,
            "served": served,
            "training": trained,
            "held_out": held_out,
        }

    def _held_out(self, drafter: DFlashDrafterModel, plan: TrafficPlan) -> dict[str, dict[str, float]]:
        return {
            domain: measure_held_out(
                drafter,
                self.target,
                [self.responses[index] for index in indices],
                anchors_per_trajectory=self.settings.held_out_anchors,
                length_scale=self.settings.length_scale,
            )
            for domain, indices in plan.held_out.items()
        }

    def _path(self, method: str, seed: int) -> Path:
        return self.directory / "runs" / f"{method}-seed{seed}.json"

    def _stored(self, method: str, seed: int, training: Mapping[str, Any]) -> FinishedShiftRun | None:
        path = self._path(method, seed)
        if not path.exists():
            return None
        run = read_finished_run(path, FinishedShiftRun)
        for there, now in ((run.common, self._common), (run.training, dict(training))):
            now = json.loads(json.dumps(now))
            refuse_difference(path, there, now, there.keys() | now.keys(), "place")
        return run

    def _keep(
        self, method: str, seed: int, training: dict[str, Any], rounds: list[dict[str, Any]], seconds: float
    ) -> FinishedShiftRun:
        run = FinishedShiftRun(method, seed, self._common, training, rounds, seconds)
        path = self._path(method, seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(asdict(run), indent=2)
        with written_aside(path) as partial:
            partial.write_text(text + "\n", encoding="utf-8")
        return FinishedShiftRun(**json.loads(text))  # as it will be read back: tuples become lists


def _stored_teacher(settings: DomainShiftSettings, responses: DomainResponses) -> StoredOutputs:
    if settings.is_live:
        raise InvalidInputError(
            "`is_live` is true, but `teacher_top_k` is given: what is decoded anew may differ from what is stored; "
            "replay the responses, or train on whole distributions."
        )
    if not settings.teacher_top_k == responses.teacher_top_k > 0:
        raise InvalidInputError(
            f"`teacher_top_k` is {settings.teacher_top_k}, but with the responses {responses.teacher_top_k} tokens "
            "are stored; make them with --teacher-top-k, or train on whole distributions."
        )
    return responses.target_outputs


def _digest_of_weights(model: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _served(results: Sequence[RequestResult], seconds: float) -> dict[str, Any]:
    rounds = [pair for result in results for pair in result.rounds]
    rows, accepted = sum(length for length, _ in rounds), sum(count for _, count in rounds)
    tokens = sum(len(result.token_ids) for result in results)
    return {
        "requests": len(results),
        "tokens": tokens,
        "rounds": len(rounds),
        "accepted": accepted,
        "rows": rows,
        "acceptance_length": 1 + accepted / len(rounds) if rounds else None,
        "mean_verify_length": rows / len(rounds) if rounds else None,
        "seconds": seconds,
        "tok_per_s": tokens / seconds,
    }
