"""Runs in SGLang's own environment: several of its servers, whose imports are done once.

Usage: python sglang_servers.py SERVERS.json CHECKS.json. The first is a list of {"log": path, "arguments": [...],
"environment": {...}}. Every process of a server would import SGLang anew, most of a minute each; here they are forked
from one that has. What `sglang_checks.py` finds goes into the second. It runs until it is terminated, and takes its
servers with it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from sglang_checks import run_checks


def import_everything() -> None:
    """What the main process and the scheduler of a server import, plugins included."""
    import sglang.srt.entrypoints.http_server
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler
    import sglang.srt.models.registry
    import sglang.srt.speculative.dflash_worker_v2  # noqa: F401
    from sglang.srt.plugins import load_plugins

    load_plugins()
    # SGLang sets "spawn"; a fork has what is needed already.
    multiprocessing.set_start_method = lambda *args, **kwargs: None  # type: ignore[assignment]


def serve(log: str, arguments: Sequence[str], environment: dict[str, str]) -> None:
    """What `python -m sglang.launch_server` does."""
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(environment)
    run_server(prepare_server_args(list(arguments)))


def main() -> None:
    """Forks a server for each entry and waits."""
    entries: list[dict[str, Any]] = json.loads(Path(sys.argv[1]).read_text())
    import_everything()
    Path(sys.argv[2]).write_text(json.dumps(run_checks()))
    children = []
    for entry in entries:
        child = os.fork()
        if child == 0:
            os.setsid()
            try:
                serve(**entry)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        children.append(child)

    def stop(signal_number: int, frame: FrameType | None) -> None:
        for child in children:
            os.killpg(child, signal.SIGKILL)
        os._exit(0)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
