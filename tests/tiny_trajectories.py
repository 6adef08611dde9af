"""Trajectories of tiny targets, made as `adaflash trajectories` makes them."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import torch
from stand_ins import byte_target
from tiny_models import VOCAB_SIZE
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from adaflash_hf.cli import main
from adaflash_hf.training.trajectories import TrajectorySettings, generate_trajectories


def random_prompts(count: int, seed: int = 0) -> tuple[list[list[int]], list[str]]:
    """Prompts of 3 to 8 tokens and their domains, two of them in turn."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 9, (count,), generator=generator).tolist()
    prompts = [torch.randint(4, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]
    return prompts, ["math" if i % 2 else "code" for i in range(count)]


def make_trajectories(directory: Path, target: PreTrainedModel, count: int = 12, **settings: object) -> Path:
    """A directory of `count` trajectories of 10 new tokens each unless `settings` say otherwise."""
    prompts, domains = random_prompts(count)
    fields = {"max_new_tokens": 10, "batch_size": 4, **settings}
    generate_trajectories(target, prompts, domains, directory, TrajectorySettings(**fields))
    return directory


def byte_trajectories(directory: Path) -> Path:
    """Twelve of the byte target, with soft targets and the features of one layer."""
    return make_trajectories(directory, byte_target(), teacher_top_k=4, capture_layer_ids=(2,))


def run_train(trajectories: Path, out: str | Path, *options: object, steps: int = 30) -> int:
    """Exit code of `adaflash train` on them, a few steps with three held out."""
    common = ["--held-out", 3, "--steps", steps, "--batch-size", 3, "--anchors", 4]
    return main([str(word) for word in ["train", "--trajectories", trajectories, "--out", out, *common, *options]])


def run_until_killed(function: Callable[[], None]) -> None:
    """Runs `function`, which must end by SIGKILL, in a forked process: importing everything anew would take longer."""

    def single_threaded() -> None:
        torch.set_num_threads(1)  # the threads of the parent's pool do not exist in a fork
        tqdm.set_lock(threading.RLock())  # the usual one is shared with forks, and stays taken by one that was killed
        function()

    process = multiprocessing.get_context("fork").Process(target=single_threaded, daemon=True)
    process.start()
    process.join(1200)
    assert process.exitcode == -signal.SIGKILL, process.exitcode
