"""Tries a served drafter on a few prompts, before and after an update, and says whether its acceptance collapsed."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ..online.replay_buffer import ReplayBuffer
from .observed_response import rounds_of_details
from .replica import Replica, ServedModel


__all__ = ["ProbeResult", "ServerProbe"]

# Below this, chance decides.
_SLACK = 3
_LONGEST_PROMPT = 1024


class ProbeResult(NamedTuple):
    """
    How drafting fared.

    Attributes:
        rounds: Draft-and-verify rounds.
        accepted: Drafts accepted in them.
    """

    rounds: int
    accepted: int

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per round, bonus included; 0 if there was no round."""
        return 1 + self.accepted / self.rounds if self.rounds else 0.0

    def has_collapsed(self, before: ProbeResult, min_relative_acceptance: float) -> bool:
        """
        Whether much fewer drafts are accepted than before.

        Args:
            before (`ProbeResult`): The same prompts on the version before.
            min_relative_acceptance (`float`): The share of accepted drafts per round that must be reached.
        """
        if not before.rounds or not self.rounds:
            return False
        # Where less is accepted there are more rounds: what counts is drafts per round.
        needed = min_relative_acceptance * before.accepted / before.rounds * self.rounds
        return self.accepted + _SLACK < needed


class ServerProbe:
    """
    The prompts, and how to ask them.

    Args:
        buffer (`str` or `Path`, *optional*):
            Replay buffer whose newest held-out prompts are asked; without one, or while it has none, prompts of public
            test sets.
        num_prompts (`int`, *optional*, defaults to 8):
            How many; 0 asks none, and nothing is judged.
        max_new_tokens (`int`, *optional*, defaults to 48):
            Length of each answer.
    """

    def __init__(self, buffer: str | Path | None = None, *, num_prompts: int = 8, max_new_tokens: int = 48) -> None:
        self._buffer = None if buffer is None else Path(buffer)
        self.num_prompts, self._max_new_tokens = num_prompts, max_new_tokens

    def prompts(self) -> list[str | list[int]]:
        """What to ask now; the same before and after an update."""
        prompts: list[str | list[int]] = []
        if self._buffer is not None and self._buffer.exists() and self.num_prompts:
            buffer = ReplayBuffer(self._buffer)
            held_out = buffer.held_out(self.num_prompts, balanced=True) or buffer.newest(self.num_prompts)
            prompts += [one.token_ids[: one.prompt_length][-_LONGEST_PROMPT:].tolist() for one in held_out]
            buffer.close()
        if not prompts:
            prompts += _test_set_prompts(self.num_prompts)
        return prompts

    def measure(self, replica: Replica, served: ServedModel, prompts: Sequence[str | list[int]]) -> ProbeResult:
        """
        Ask a server.

        Args:
            replica (`Replica`): The server.
            served (`ServedModel`): What it serves.
            prompts (`Sequence[str | list[int]]`): What to ask.
        """
        rounds = accepted = 0
        salt = f"adaflash-probe-{uuid.uuid4().hex}"
        for prompt in prompts:
            details = replica.generate(prompt, self._max_new_tokens, served.name, salt)
            found = rounds_of_details(details)
            rounds += len(found)
            accepted += sum(count for _, count in found)
        return ProbeResult(rounds, accepted)


def _test_set_prompts(count: int) -> list[str]:
    from ..evaluation.prompts import load_test_set_prompts

    prompts = load_test_set_prompts()
    # In equal steps, so that there is maths, code and chat.
    step = max(len(prompts) // max(count, 1), 1)
    return [prompt.text for prompt in prompts[::step][:count]]
