"""Ports for servers that do not take one of the system's choice."""

from __future__ import annotations

import random
import socket
from pathlib import Path


_SYSTEM = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """
    A port of this machine that nobody listens on now, and that the system gives to nobody by itself.

    One of the system's choice, asked for and given back, may be given to any connection of another test before the
    server that it is for has started, which takes seconds.
    """
    lowest = int(_SYSTEM.read_text().split()[0]) if _SYSTEM.exists() else 32768
    ports = list(range(max(lowest - 12_000, 1024), lowest)) or list(range(20_000, 32_000))
    chooser = random.Random()  # the two processes that run tests must not choose alike, whatever they seed
    for _ in range(1000):
        port = chooser.choice(ports)
        with socket.socket() as place:
            try:
                place.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no port is free")
