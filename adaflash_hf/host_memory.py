"""How much memory this process may still take, a container's limit included."""

from __future__ import annotations

from pathlib import Path


__all__ = ["available_memory_bytes"]

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def available_memory_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int | None:
    """
    What can be allocated without swapping, as far as the system says so.

    Args:
        meminfo (`Path`, *optional*): Where Linux counts the machine's memory.
        cgroup (`Path`, *optional*): Where it counts the container's.

    Returns:
        `int` or `None`: Bytes; None on systems that do not say.
    """
    free = [bytes_left for bytes_left in (_of_machine(meminfo), _of_container(cgroup)) if bytes_left is not None]
    return max(min(free), 0) if free else _of_psutil()


def _of_machine(meminfo: Path) -> int | None:
    try:
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        return 1024 * int(fields["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError, IndexError):
        return None


def _of_container(cgroup: Path) -> int | None:
    try:
        limit, used = (cgroup / "memory.max").read_text().strip(), int((cgroup / "memory.current").read_text())
        cached = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        return None if limit == "max" else int(limit) - used + int(cached.get("inactive_file", 0))
    except (OSError, ValueError):
        return None


def _of_psutil() -> int | None:
    try:
        import psutil  # type: ignore[import-untyped]
    except ImportError:
        return None
    return int(psutil.virtual_memory().available)
