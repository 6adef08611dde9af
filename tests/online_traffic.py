"""Recorded trajectories for tests, and processes that are killed at random instants."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tiny_models import VOCAB_SIZE
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from adaflash_hf.online.recorded_trajectory import RecordedTrajectory


def recorded(seed: int = 0, domain: str = "math", response: int = 10, **fields: Any) -> RecordedTrajectory:
    """A trajectory of random tokens: a prompt of five, and a response."""
    rng = random.Random(seed)
    prompt, answer = ([rng.randrange(4, VOCAB_SIZE) for _ in range(length)] for length in (5, response))
    return RecordedTrajectory.from_lists(prompt, answer, [(4, 1), (4, 3)], domain=domain, **fields)


@torch.no_grad()
def served(target: PreTrainedModel, count: int, domain: str = "math", seed: int = 0, new_tokens: int = 16) -> list:
    """What a target really answers to random prompts, greedily."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(4, VOCAB_SIZE, (count, 5), generator=generator)
    ids = target.generate(prompts, max_new_tokens=new_tokens, do_sample=False, attention_mask=torch.ones_like(prompts))
    return [
        RecordedTrajectory.from_lists(row[:5], row[5:], [(4, 0), (4, 1)], domain=domain, finished=False)
        for row in ids.tolist()
    ]


@contextmanager
def in_fork(function: Callable[..., None], *args: Any) -> Iterator[multiprocessing.Process]:
    """Runs a function in a forked process, which is killed when the block ends if it has not ended by then."""

    def single_threaded() -> None:
        torch.set_num_threads(1)  # the threads of the parent's pool do not exist in a fork
        tqdm.set_lock(threading.RLock())  # the usual one is shared with forks, and stays taken by one that was killed
        function(*args)

    process = multiprocessing.get_context("fork").Process(target=single_threaded, daemon=True)
    process.start()
    try:
        yield process  # type: ignore[misc]
    finally:
        if process.is_alive():
            os.kill(process.pid or 0, signal.SIGKILL)
        process.join()


def kill_after(process: multiprocessing.Process, seconds: float) -> None:
    """Sends SIGKILL after a while, whether or not the process has ended by itself."""
    time.sleep(seconds)
    if process.is_alive():
        os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
