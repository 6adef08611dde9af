"""Rounds in simulated time: known costs, known acceptance, a head that may be wrong, and no model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from adaflash_hf import LengthPolicy, RoundContext, RoundOutcome
from adaflash_hf.generation.cost_table import CostTable
from adaflash_hf.generation.draft_head import LikeliestTokens


BLOCK_SIZE = 8
DRAFT_LENGTH = BLOCK_SIZE - 1
REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128)
LENGTHS = (1, 2, 3, 4, 6, 8)


@dataclass(frozen=True)
class Machine:
    """
    What steps take.

    Attributes:
        rows (`tuple[int, ...]`): Rows of target steps.
        target_s (`tuple[float, ...]`): Seconds of each.
        requests (`tuple[int, ...]`): Requests of drafts.
        draft_s (`tuple[float, ...]`): Seconds of each.
    """

    rows: tuple[int, ...]
    target_s: tuple[float, ...]
    requests: tuple[int, ...]
    draft_s: tuple[float, ...]

    def target_seconds(self, rows: float) -> float:
        """What a target step of so many rows takes."""
        return _interpolate(rows, self.rows, self.target_s)

    def draft_seconds(self, num_requests: int, longest: int = BLOCK_SIZE) -> float:
        """What a draft takes: as much as one of whole blocks with as many rows in all."""
        return _interpolate(num_requests * longest / BLOCK_SIZE, self.requests, self.draft_s)

    def table(self, error: Callable[[int], float] = lambda length: 1.0, can_cut: bool = False) -> CostTable:
        """The true costs, but for what `error` says of a verify length."""
        target = [[self.target_seconds(n * length) * error(length) for length in LENGTHS] for n in REQUESTS]
        cut = np.array([[self.draft_seconds(n, length) for length in LENGTHS] for n in REQUESTS])
        whole = np.array([*map(self.draft_seconds, REQUESTS)])
        return CostTable.fit(REQUESTS, LENGTHS, np.array(target), whole, cut if can_cut else None)


def _interpolate(value: float, grid: Sequence[int], seconds: Sequence[float]) -> float:
    """Beyond the grid the last slope goes on."""
    slope = (seconds[-1] - seconds[-2]) / (grid[-1] - grid[-2])
    return float(np.interp(value, grid, seconds)) + slope * max(value - grid[-1], 0)


# Shape of a small model on a CPU: flat at first, then by the row. A draft takes 8 ms and a tenth of a target step.
_ROWS = (1, 16, 64, 128, 256, 512, 1024)
_SECONDS = (0.040, 0.047, 0.085, 0.129, 0.187, 0.374, 0.75)
SMALL_CPU = Machine(_ROWS, _SECONDS, (2, 8, 16, 32, 64, 128), (0.0127, 0.0165, 0.0209, 0.0267, 0.0454, 0.083))
# Measured: SmolLM2-135M in bfloat16 and its drafter, on two cores. Acceptance of a block's slots likewise.
MEASURED_CPU = Machine(
    (1, 8, 32, 64, 128), (0.018, 0.026, 0.054, 0.070, 0.110), (1, 8, 32, 64), (4e-3, 8e-3, 20e-3, 38e-3)
)
MEASURED_ACCEPTANCE = (0.65, 0.38, 0.20, 0.10, 0.04, 0.02, 0.01)


def simulated_table(error: Callable[[int], float] = lambda length: 1.0) -> CostTable:
    """The costs of the simulation unless it is given others; `error` says how wrong those of a verify length are."""
    return SMALL_CPU.table(error)


def stand_in_drafter(has_head: bool = True) -> Any:
    """A drafter whose length head says what the first hidden state holds."""
    head = (lambda states: SimpleNamespace(ratio=states[:, 0, 0])) if has_head else None
    return SimpleNamespace(length_head=head, config=SimpleNamespace(draft_length=DRAFT_LENGTH, block_size=BLOCK_SIZE))


@dataclass
class Simulation:
    """
    Runs a policy.

    Attributes:
        rate (`Callable`): Acceptance rate of a slot, on average over requests, by round; or the shares of slots that
            are accepted, by round.
        num_active (`Callable`): Requests, by round.
        head_bias (`float`): What the head multiplies the expected number of accepted drafts by.
        gives_probabilities (`bool`): Whether the policy is given the true rate of every slot, as a drafter that knows
            itself would do by the probabilities of its drafts.
        noise (`float`): Spread of the logarithm of a round's time.
        is_packed (`bool`): Whether rows cost one by one.
        can_cut (`bool`): Whether blocks are cut to what the policy wants.
        machine (`Machine`): What steps cost.
    """

    rate: Callable[[int], float | Sequence[float]]
    num_active: Callable[[int], int]
    head_bias: float = 1.0
    gives_probabilities: bool = False
    noise: float = 0.05
    is_packed: bool = True
    can_cut: bool = False
    machine: Machine = SMALL_CPU
    seed: int = 0
    seconds: float = 0.0
    plain_seconds: float = 0.0
    drafted: list[bool] = field(default_factory=list)
    longest: list[int] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)
    speedups: list[tuple[float, float]] = field(default_factory=list)

    def run(self, policy: LengthPolicy, num_rounds: int, num_tokens: float = math.inf) -> Simulation:
        """Runs rounds until so many tokens are committed, and plain decoding of the same tokens under the same noise
        beside them."""
        rng = np.random.default_rng(self.seed)
        for number in range(num_rounds):
            noise = math.exp(self.noise * rng.standard_normal())
            if rng.random() < 0.005:
                noise *= 5  # something else had the machine
            num_active = self.num_active(number)
            self._round(policy, num_active, _slot_rates(self.rate(number), num_active, rng), noise, rng)
            if sum(self.committed) >= num_tokens:
                break
        return self

    def _round(
        self, policy: LengthPolicy, num_active: int, rates: np.ndarray, noise: float, rng: np.random.Generator
    ) -> None:
        lengths = np.ones(num_active, dtype=int)
        drafts = policy.wants_draft(num_active)
        # As an engine does it; a padded batch is drafted as a whole.
        num_drafted = min(policy.most_drafted(num_active), num_active) if drafts and self.is_packed else num_active
        longest = (policy.longest_wanted(num_active) if self.can_cut and drafts else None) or BLOCK_SIZE
        context = RoundContext([longest] * num_drafted, num_active, self.is_packed)
        if drafts:
            self.longest.append(longest)
            expected = np.cumprod(rates[:num_drafted], axis=1).sum(axis=1)
            states = torch.zeros(num_drafted, longest, 2)
            states[:, 0, 0] = torch.tensor(np.clip((expected * self.head_bias + 1) / BLOCK_SIZE, 0.01, 0.99))
            if self.gives_probabilities:
                known = torch.tensor(rates[:num_drafted, : longest - 1])
                context.likeliest = LikeliestTokens(torch.zeros(known.shape, dtype=torch.long), known)
            lengths[:num_drafted] = policy.choose(stand_in_drafter(), states, context)
        if not self.is_packed:
            lengths[:] = lengths.max()
        hits = np.cumprod(rng.random((num_active, DRAFT_LENGTH)) < rates, axis=1).sum(axis=1)
        accepted = np.minimum(hits, lengths - 1)
        draft_s = self.machine.draft_seconds(num_drafted, longest) if drafts else 0.0
        seconds = noise * (self.machine.target_seconds(lengths.sum()) + draft_s)
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
        plain = noise * committed * self.machine.target_seconds(num_active) / num_active
        self.seconds += seconds
        self.plain_seconds += plain
        self.drafted.append(drafts)
        self.committed.append(committed)
        self.speedups.append((plain, seconds))

    def speedup(self, first: int = 0, last: int | None = None) -> float:
        """Against plain decoding, over some of the rounds."""
        part = self.speedups[first:last]
        return sum(plain for plain, _ in part) / sum(seconds for _, seconds in part)


def _slot_rates(rate: float | Sequence[float], num_active: int, rng: np.random.Generator) -> np.ndarray:
    """Chances that a slot is accepted if all before it are, of shape `(num_active, DRAFT_LENGTH)`; blocks differ."""
    if isinstance(rate, float):
        rates = rng.beta(4 * rate, 4 * (1 - rate), num_active)[:, None].repeat(DRAFT_LENGTH, axis=1)
    else:
        shares = np.asarray(rate)
        rates = (shares / np.concatenate([[1.0], shares[:-1]])) ** np.exp(0.4 * rng.standard_normal((num_active, 1)))
    return np.clip(rates, 0.01, 0.99)
