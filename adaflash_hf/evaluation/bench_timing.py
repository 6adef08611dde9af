"""When tokens come, and when a device is done."""

from __future__ import annotations

import time

import torch
from transformers.generation.streamers import BaseStreamer


__all__ = ["StepTimer", "synchronize"]

# Faster than any model takes a step: tokens that follow each other like this were accepted together.
_ONE_STEP_S = 3e-4


class StepTimer(BaseStreamer):
    """
    A streamer that notes when tokens come; one step of a padded batch counts once.

    Attributes:
        first_token_s: Seconds from the start to the first token; None before it.
        step_tokens: Tokens of each step in turn, the first token's included.
    """

    def __init__(self) -> None:
        self.first_token_s: float | None = None
        self.step_tokens: list[int] = []
        self._last_s = time.perf_counter()
        self._has_prompt = False
        self._steps: list[tuple[float, int]] = []  # seconds and tokens

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt, then tokens: `(batch_size,)` of one step, or `(1, n)` of several."""
        now_s = time.perf_counter()
        if not self._has_prompt:
            self._has_prompt = True
            return
        count = value.shape[1] if value.ndim > 1 else 1
        self.step_tokens.append(count)
        if self.first_token_s is None:
            self.first_token_s = now_s - self._last_s
        elif now_s - self._last_s < _ONE_STEP_S and self._steps:
            seconds, before = self._steps[-1]
            self._steps[-1] = (seconds, before + count)
        else:
            self._steps.append((now_s - self._last_s, count))
        self._last_s = now_s

    def end(self) -> None:
        """Nothing is left to do."""

    @property
    def token_latency_s(self) -> list[float]:
        """Seconds of every token after the first; those that come together share the time equally."""
        return [seconds / count for seconds, count in self._steps for _ in range(count)]


def synchronize(device: torch.device) -> None:
    """Waits until a CUDA device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
