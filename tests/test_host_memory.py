"""What the system says of free memory, from files laid out as Linux lays them out."""

from __future__ import annotations

from pathlib import Path

import pytest

from adaflash_hf import host_memory
from adaflash_hf.host_memory import available_memory_bytes


def laid_out(tmp_path: Path, machine: str | None = None, **container: str) -> tuple[Path, Path]:
    meminfo = tmp_path / "meminfo"
    if machine is not None:
        meminfo.write_text(machine)
    for name, text in container.items():
        (tmp_path / f"memory.{name}").write_text(text)
    return meminfo, tmp_path


MACHINE = "MemTotal:       1000 kB\nMemFree:          10 kB\nMemAvailable:    600 kB\n"


@pytest.mark.parametrize(
    ("container", "expected"),
    [
        ({}, 600 * 1024),
        ({"max": "max\n", "current": "5\n", "stat": "inactive_file 1\n"}, 600 * 1024),
        # What the container's page cache holds can be given back.
        ({"max": "100000\n", "current": "70000\n", "stat": "anon 50000\ninactive_file 20000\n"}, 50_000),
        ({"max": "9999999\n", "current": "0\n", "stat": "inactive_file 0\n"}, 600 * 1024),
        ({"max": "100\n", "current": "300\n", "stat": "inactive_file 0\n"}, 0),
        ({"max": "nonsense", "current": "0", "stat": ""}, 600 * 1024),
    ],
)
def test_the_tighter_of_machine_and_container_counts(tmp_path, container, expected):
    assert available_memory_bytes(*laid_out(tmp_path, MACHINE, **container)) == expected


def test_a_system_that_does_not_say(tmp_path, monkeypatch):
    monkeypatch.setattr(host_memory, "_of_psutil", lambda: None)
    assert available_memory_bytes(*laid_out(tmp_path)) is None
    assert available_memory_bytes(*laid_out(tmp_path, "MemTotal: 5 kB\n")) is None


def test_this_machine_says():
    assert (available_memory_bytes() or 0) > 1 << 20
