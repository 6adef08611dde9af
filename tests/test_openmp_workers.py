from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


pytestmark = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads as Linux shows them")

# A process of its own: what it counts are all of its threads.
PROGRAM = """
import os
import time
import torch
from adaflash_hf.openmp_workers import release_openmp_workers

def work():
    assert torch.equal(torch.ones(512, 512) @ torch.ones(512, 512), torch.full((512, 512), 512.0))

def num_threads():
    return len(os.listdir("/proc/self/task"))

def wait_for(is_true):  # a thread that was waited for is listed a moment longer
    deadline = time.monotonic() + 600
    while not is_true():
        assert time.monotonic() < deadline, (before, busy, num_threads())
        time.sleep(0.01)

torch.set_num_threads(4)
before = num_threads()
work()
busy = num_threads()
assert busy >= before + 3, (before, busy)
assert release_openmp_workers()
wait_for(lambda: num_threads() <= busy - 3)
work()  # new ones
wait_for(lambda: num_threads() == busy)
assert release_openmp_workers() and release_openmp_workers()
assert torch.get_num_threads() == 4
"""


def test_workers_end_and_come_back():
    outcome = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr
