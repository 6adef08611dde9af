"""Traffic that shifts from one domain to the next: which prompts are served in which round, and which never.

The target's greedy responses do not depend on who drafts, so they are made once and shared by all methods and seeds.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import InvalidInputError
from ..online.recorded_trajectory import RecordedTrajectory
from ..training.features import features_path
from ..training.trajectories import find_trajectory_shards, read_settings
from ..training.trajectory_dataset import TrajectoryDataset


if TYPE_CHECKING:
    import torch


__all__ = ["DomainResponses", "TrafficPlan", "TrafficRound", "TrafficShape", "plan_traffic", "too_few_prompts"]

_TEACHER = ("teacher_ids", "teacher_log_probs")


class DomainResponses:
    """
    The target's greedy responses, by domain, as if none could be longer than `max_new_tokens`.

    A greedy response that is cut is what the target says with that limit. An entry is a row of
    [`TrajectoryDataset`] without its teacher.

    Args:
        directories (`Sequence[str or Path]`):
            What `adaflash trajectories` made at temperature 0; of equal prompts the first one is taken.
        max_new_tokens (`int`):
            Longest response.
        layer_ids (`Sequence[int]`, *optional*):
            Layers the drafter reads. If the target's features of these are stored beside all trajectories, they come
            with the entries.

    Raises:
        InvalidInputError: A response was sampled, or made with a smaller limit.
    """

    def __init__(
        self, directories: Sequence[str | Path], max_new_tokens: int, layer_ids: Sequence[int] | None = None
    ) -> None:
        made_with = [read_settings(directory) for directory in directories]
        for directory, settings in zip(directories, made_with, strict=True):
            if temperature := settings.get("temperature"):
                raise InvalidInputError(
                    f"`trajectories` is {str(directory)!r}, sampled at temperature {temperature}; only greedy "
                    "responses are the same whatever drafts."
                )
        shards = [path for directory in directories for path in find_trajectory_shards(directory)]
        has_features = layer_ids is not None and all(features_path(path).exists() for path in shards)
        # Those of other layers are for another drafter; what this one reads is computed.
        has_features &= all(settings.get("capture_layer_ids") in ([], list(layer_ids or ())) for settings in made_with)
        self._rows = TrajectoryDataset(directories)
        self._examples = TrajectoryDataset(directories, feature_layer_ids=layer_ids) if has_features else self._rows
        self.max_new_tokens = max_new_tokens
        self.domains = self._rows.domains
        self._by_domain: dict[str, list[int]] = {domain: [] for domain in self.domains}
        self._order: dict[int, bytes] = {}
        self._indices: dict[bytes, int] = {}
        for index in range(len(self._rows)):
            digest = _digest(self._rows.prompt_ids(index))
            if digest not in self._indices:
                self._indices[digest] = index
                self._order[index] = digest
                self._by_domain[self._rows.domain(index)].append(index)
                self._check_limit(index)

    def _check_limit(self, index: int) -> None:
        length = len(self._rows.response_ids(index))
        if length < self.max_new_tokens and not self._rows[index]["finished"]:
            raise InvalidInputError(
                f"`max_new_tokens` is {self.max_new_tokens}, but response {index} was cut after {length}; pass "
                f"{length} or less, or make the trajectories with --max-new-tokens {self.max_new_tokens}."
            )

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> dict[str, Any]:
        example = {name: value for name, value in self._examples[index].items() if name not in _TEACHER}
        ids = example["input_ids"][: example["prompt_length"] + self.max_new_tokens]
        example["finished"] = self.is_finished(index)
        example["input_ids"] = ids
        if "context_hidden_states" in example:
            example["context_hidden_states"] = example["context_hidden_states"][: len(ids) - 1]
        return example

    @property
    def digest(self) -> str:
        """SHA-256 of all different prompts and their domains, in order."""
        total = hashlib.sha256()
        for index, digest in self._order.items():
            total.update(digest + self._rows.domain(index).encode())
        return total.hexdigest()

    @property
    def teacher_top_k(self) -> int:
        """Likeliest tokens of the target that are stored at each place of a response; 0 if none are."""
        return self._rows.teacher_top_k

    def target_outputs(self, trajectory: RecordedTrajectory) -> dict[str, torch.Tensor]:
        """
        What is stored of the target's outputs for a response that was served.

        Args:
            trajectory (`RecordedTrajectory`):
                One of these responses, perhaps cut.

        Returns:
            `dict[str, torch.Tensor]`: `teacher_ids` and `teacher_log_probs` `[response, k]`, and with features
            `context_hidden_states` `[n - 1, layers * hidden]`

        Raises:
            InvalidInputError: It is none of these responses.
        """
        length, prompt = len(trajectory.token_ids), trajectory.token_ids[: trajectory.prompt_length]
        index = self._indices.get(_digest(prompt))
        example = {} if index is None else self._examples[index]
        if index is None or example["input_ids"][:length].tolist() != trajectory.token_ids.tolist():
            raise InvalidInputError(
                f"`trajectory` of {length} tokens is not one of the stored responses; train on whole distributions."
            )
        outputs = {name: example[name][: length - len(prompt)] for name in _TEACHER}
        if "context_hidden_states" in example:
            outputs["context_hidden_states"] = example["context_hidden_states"][: length - 1]
        return outputs

    def of_domain(self, domain: str) -> list[int]:
        """
        Responses of a domain, in an order that depends on the prompts alone.

        Args:
            domain (`str`):
                Its name.
        """
        if domain not in self._by_domain:
            raise InvalidInputError(
                f"`phases` has {domain!r}, but the responses are of {', '.join(map(repr, self.domains))}."
            )
        return sorted(self._by_domain[domain], key=lambda index: self._order[index])

    def is_finished(self, index: int) -> bool:
        """Whether a response ends by itself within the limit."""
        is_whole = len(self._rows.response_ids(index)) <= self.max_new_tokens
        return is_whole and bool(self._rows[index]["finished"])

    def prompt_ids(self, index: int) -> list[int]:
        """Tokens of a prompt."""
        return self._rows.prompt_ids(index).tolist()

    def response_ids(self, index: int) -> list[int]:
        """Tokens of a response."""
        return self._rows.response_ids(index)[: self.max_new_tokens].tolist()

    def recorded(self, index: int) -> RecordedTrajectory:
        """
        As a recorder would keep it.

        Args:
            index (`int`):
                Number of the response.
        """
        return RecordedTrajectory.from_lists(
            self.prompt_ids(index),
            self.response_ids(index),
            domain=self._rows.domain(index),
            finished=self.is_finished(index),
            id=index + 1,
        )


def _digest(prompt_ids: np.ndarray) -> bytes:
    return hashlib.sha256(prompt_ids.astype("<i4").tobytes()).digest()


@dataclass(frozen=True)
class TrafficShape:
    """
    How much is served of what.

    Attributes:
        home: The domain that the drafter knows.
        phases: Domains of the traffic, one after the other.
        rounds_per_phase: Rounds of adaptation in each.
        trajectories_per_round: Trajectories that each round may train on.
        home_trajectories: Served before the first phase, so that there is something to remember home by.
        held_out: Responses of each domain that are never served.
        held_out_share: Share of the prompts that the replay buffer keeps back to judge rounds by; they are served on
            top of `trajectories_per_round`.
    """

    home: str
    phases: tuple[str, ...]
    rounds_per_phase: int
    trajectories_per_round: int
    home_trajectories: int
    held_out: int
    held_out_share: float = 0.0

    def __post_init__(self) -> None:
        for name in ("rounds_per_phase", "trajectories_per_round", "held_out", "home_trajectories"):
            if getattr(self, name) < 1:
                raise InvalidInputError(f"`{name}` is {getattr(self, name)}; it must be at least 1.")
        if not self.phases:
            raise InvalidInputError("`phases` is empty; name the domains that are served, such as code.")
        if any(one == other for one, other in zip((self.home, *self.phases), self.phases, strict=False)):
            raise InvalidInputError(
                f"`home` is {self.home!r} and `phases` are {', '.join(self.phases)}; neighbours must differ, or "
                "nothing shifts."
            )

    def prompts_of(self, domain: str) -> int:
        """
        Different prompts of a domain that are needed, without those to judge rounds by.

        Args:
            domain (`str`):
                Its name.
        """
        served = self.phases.count(domain) * self.rounds_per_phase * self.trajectories_per_round
        return self.held_out + served + (self.home_trajectories if domain == self.home else 0)

    @property
    def domains(self) -> list[str]:
        """All domains, the home first."""
        return list(dict.fromkeys([self.home, *self.phases]))


@dataclass(frozen=True)
class TrafficRound:
    """
    What is served before one round of training.

    Attributes:
        number: 0 is the traffic of the home domain that nothing is trained after.
        phase: Number of the phase; -1 before the first.
        domain: Domain of all of it.
        indices: Numbers of the responses.
    """

    number: int
    phase: int
    domain: str
    indices: tuple[int, ...]


@dataclass(frozen=True)
class TrafficPlan:
    """
    All traffic of one seed; the same for every method.

    Attributes:
        rounds: In order, the home's first.
        held_out: Numbers of the responses of each domain that are never served; the same for every seed.
    """

    rounds: tuple[TrafficRound, ...]
    held_out: Mapping[str, tuple[int, ...]]

    @property
    def num_requests(self) -> int:
        """Requests of all rounds."""
        return sum(len(one.indices) for one in self.rounds)

    def served(self, domain: str) -> list[int]:
        """Numbers of the responses of one domain that are served in its phases, in order."""
        return [i for one in self.rounds if one.domain == domain and one.phase >= 0 for i in one.indices]


def plan_traffic(responses: DomainResponses, shape: TrafficShape, seed: int) -> TrafficPlan:
    """
    Deal the prompts out.

    Args:
        responses (`DomainResponses`):
            What there is.
        shape (`TrafficShape`):
            What is wanted.
        seed (`int`):
            Decides which of the prompts that are not held out are served when.

    Raises:
        InvalidInputError: There are too few prompts of a domain; none is served twice.
    """
    pools: dict[str, list[int]] = {}
    held_out = {}
    for domain in shape.domains:
        indices = responses.of_domain(domain)
        held_out[domain] = tuple(indices[: shape.held_out])
        pools[domain] = indices[shape.held_out :]
        random.Random(f"{seed}-{domain}").shuffle(pools[domain])
    numbers = [(0, -1, shape.home, shape.home_trajectories)]
    for phase, domain in enumerate(shape.phases):
        first = 1 + phase * shape.rounds_per_phase
        numbers += [(first + i, phase, domain, shape.trajectories_per_round) for i in range(shape.rounds_per_phase)]
    rounds = []
    for number, phase, domain, count in numbers:
        taken = _take(responses, pools[domain], count, shape.held_out_share)
        if taken is None:
            raise too_few_prompts(shape, domain, len(responses.of_domain(domain)))
        rounds.append(TrafficRound(number, phase, domain, tuple(taken)))
    return TrafficPlan(tuple(rounds), held_out)


def _take(responses: DomainResponses, pool: list[int], count: int, held_out_share: float) -> list[int] | None:
    """The next of a pool until `count` of them may be trained on; None if it does not have as many."""
    taken = []
    while count:
        if not pool:
            return None
        taken.append(pool.pop())
        count -= not held_out_share or responses.recorded(taken[-1]).prompt_hash >= held_out_share
    return taken


def too_few_prompts(shape: TrafficShape, domain: str, count: int) -> InvalidInputError:
    """
    The error that says how many prompts there are and how many are needed.

    Args:
        shape (`TrafficShape`):
            What is wanted.
        domain (`str`):
            Domain that has too few.
        count (`int`):
            Different prompts that it has.
    """
    share = f" and {shape.held_out_share:.0%} on top to judge by" if shape.held_out_share else ""
    return InvalidInputError(
        f"{count} different prompts of {domain!r} are there, {shape.prompts_of(domain)}{share} are needed; give more "
        "of them (`adaflash prompts` makes some), or serve fewer rounds or trajectories."
    )
