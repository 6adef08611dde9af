"""Rounds in simulated time: known costs, known acceptance, a head that may be wrong, and no model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from adaflash_hf import LengthPolicy, RoundContext, RoundOutcome
from adaflash_hf.generation.cost_table import CostTable


BLOCK_SIZE = 8
DRAFT_LENGTH = BLOCK_SIZE - 1
REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128)
LENGTHS = (1, 2, 3, 4, 6, 8)
# Shape of a small model on a CPU: flat at first, then by the row.
_ROWS = (1, 16, 64, 128, 256, 512, 1024)
_SECONDS = (0.040, 0.047, 0.085, 0.129, 0.187, 0.374, 0.75)


def target_seconds(rows: float) -> float:
    """What a target step of so many rows takes."""
    return float(np.interp(rows, _ROWS, _SECONDS))


def draft_seconds(num_requests: int) -> float:
    """What a draft takes."""
    return 0.008 + 0.1 * target_seconds(num_requests * BLOCK_SIZE)


def simulated_table(error: Callable[[int], float] = lambda length: 1.0) -> CostTable:
    """The costs of the simulation; `error` says how wrong those of a verify length are."""
    target = [[target_seconds(n * length) * error(length) for length in LENGTHS] for n in REQUESTS]
    return CostTable.fit(REQUESTS, LENGTHS, np.array(target), np.array([draft_seconds(n) for n in REQUESTS]))


def stand_in_drafter(has_head: bool = True) -> Any:
    """A drafter whose length head says what the first hidden state holds."""
    head = (lambda states: SimpleNamespace(ratio=states[:, 0, 0])) if has_head else None
    return SimpleNamespace(length_head=head, config=SimpleNamespace(draft_length=DRAFT_LENGTH, block_size=BLOCK_SIZE))


@dataclass
class Simulation:
    """
    Runs a policy.

    Attributes:
        rate (`Callable`): Acceptance rate of a slot, on average over requests, by round.
        num_active (`Callable`): Requests, by round.
        head_bias (`float`): What the head multiplies the expected number of accepted drafts by.
        noise (`float`): Spread of the logarithm of a round's time.
        is_packed (`bool`): Whether rows cost one by one.
    """

    rate: Callable[[int], float]
    num_active: Callable[[int], int]
    head_bias: float = 1.0
    noise: float = 0.05
    is_packed: bool = True
    seed: int = 0
    seconds: float = 0.0
    plain_seconds: float = 0.0
    drafted: list[bool] = field(default_factory=list)
    speedups: list[tuple[float, float]] = field(default_factory=list)

    def run(self, policy: LengthPolicy, num_rounds: int) -> Simulation:
        """Runs rounds, and plain decoding of the same tokens under the same noise beside them."""
        rng = np.random.default_rng(self.seed)
        for number in range(num_rounds):
            noise = math.exp(self.noise * rng.standard_normal())
            if rng.random() < 0.005:
                noise *= 5  # something else had the machine
            self._round(policy, self.num_active(number), self.rate(number), noise, rng)
        return self

    def _round(
        self, policy: LengthPolicy, num_active: int, mean_rate: float, noise: float, rng: np.random.Generator
    ) -> None:
        rates = np.clip(rng.beta(4 * mean_rate, 4 * (1 - mean_rate), num_active), 0.01, 0.99)
        lengths = np.ones(num_active, dtype=int)
        drafts = policy.wants_draft(num_active)
        # As an engine does it; a padded batch is drafted as a whole.
        num_drafted = min(policy.most_drafted(num_active), num_active) if drafts and self.is_packed else num_active
        context = RoundContext([BLOCK_SIZE] * num_drafted, num_active, self.is_packed)
        if drafts:
            expected = (rates[:num_drafted, None] ** np.arange(1, BLOCK_SIZE)).sum(axis=1)
            states = torch.zeros(num_drafted, BLOCK_SIZE, 2)
            states[:, 0, 0] = torch.tensor(np.clip((expected * self.head_bias + 1) / BLOCK_SIZE, 0.01, 0.99))
            lengths[:num_drafted] = policy.choose(stand_in_drafter(), states, context)
        if not self.is_packed:
            lengths[:] = lengths.max()
        hits = np.cumprod(rng.random((num_active, DRAFT_LENGTH)) < rates[:, None], axis=1).sum(axis=1)
        accepted = np.minimum(hits, lengths - 1)
        seconds = noise * (target_seconds(lengths.sum()) + (draft_seconds(num_drafted) if drafts else 0))
        committed = num_active + int(accepted.sum())
        policy.observe_round(
            context,
            RoundOutcome(
                lengths[:num_drafted].tolist(),
                accepted[:num_drafted].tolist(),
                [False] * num_drafted,
                drafts,
                committed,
                seconds,
            ),
        )
        plain = noise * committed * target_seconds(num_active) / num_active
        self.seconds += seconds
        self.plain_seconds += plain
        self.drafted.append(drafts)
        self.speedups.append((plain, seconds))

    def speedup(self, first: int = 0, last: int | None = None) -> float:
        """Against plain decoding, over some of the rounds."""
        part = self.speedups[first:last]
        return sum(plain for plain, _ in part) / sum(seconds for _, seconds in part)
