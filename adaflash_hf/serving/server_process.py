"""Runs a server as a child process: waits until it is healthy, passes signals on, ends with its exit code."""

from __future__ import annotations

import http.client
import logging
import os
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from ..errors import ServerError
from .launch_commands import LaunchCommand


__all__ = ["ServerProcess", "run_server"]

logger = logging.getLogger(__name__)

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_HEALTH_TIMEOUT_S = 10.0
# A proxy of the environment (`http_proxy`) knows nothing of a server on this machine.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ServerProcess:
    """
    A running server.

    Args:
        command (`LaunchCommand`): What to run. It gets a process group of its own.
        health_url (`str`): Answers 200 once requests can be sent.
    """

    def __init__(self, command: LaunchCommand, health_url: str) -> None:
        self.health_url = health_url
        self._signals = 0
        try:
            # A group of its own: a Ctrl-C in the terminal then reaches the server once, through us, and what the
            # server leaves behind can be ended with it.
            self._process = subprocess.Popen(
                command.arguments, env={**os.environ, **command.environment}, start_new_session=True
            )
        except OSError as error:
            raise ServerError(f"{command.arguments[0]!r} cannot be started: {error}") from error

    @property
    def exit_code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._process.poll()

    def is_healthy(self) -> bool:
        """Whether it takes requests."""
        return _answers(self.health_url)

    def wait_until_healthy(self, timeout_s: float, poll_s: float = 0.5) -> bool:
        """
        Wait for it to take requests.

        Args:
            timeout_s (`float`): Longest wait.
            poll_s (`float`, *optional*, defaults to 0.5): Seconds between two looks.

        Returns:
            `bool`: whether it does; not if it ended first.

        Raises:
            ServerError: It takes too long; it is ended.
        """
        deadline = time.monotonic() + timeout_s
        while self.exit_code is None:
            if self.is_healthy():
                return True
            if time.monotonic() > deadline:
                self.end()
                raise ServerError(
                    f"The server did not answer {self.health_url} within {timeout_s:.0f} s; its output says what it "
                    "was doing. Large models take longer: see --start-timeout."
                )
            if self._signals:
                return False
            time.sleep(poll_s)
        return False

    def wait(self) -> int:
        """Wait for its end, and return its exit code as a shell would."""
        code = self._process.wait()
        return code if code >= 0 else 128 - code

    def forward(self, number: int) -> None:
        """
        Pass a signal on; the second one that asks it to end does not ask.

        Args:
            number (`int`): The signal.
        """
        self._signals += 1
        if self._signals > 1:
            self.kill()
        else:
            self._send(number)

    def end(self, grace_s: float = 30.0) -> int:
        """
        Ask it to end, and insist after a while.

        Args:
            grace_s (`float`, *optional*, defaults to 30.0): How long it may take.

        Returns:
            `int`: its exit code.
        """
        self._send(signal.SIGTERM)
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            logger.warning("The server does not end within %.0f s; it is killed.", grace_s)
        self.kill()
        return self.wait()

    def kill(self) -> None:
        """End it and all processes it has started, at once."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def _send(self, number: int) -> None:
        if self.exit_code is None:
            self._process.send_signal(number)


def run_server(
    command: LaunchCommand,
    health_url: str,
    *,
    start_timeout_s: float = 1800.0,
    on_healthy: Callable[[], Any] = lambda: None,
) -> int:
    """
    Run a server until it ends, in the main thread.

    Args:
        command (`LaunchCommand`): What to run.
        health_url (`str`): Answers 200 once requests can be sent.
        start_timeout_s (`float`, *optional*, defaults to 1800.0): How long it may take until then.
        on_healthy (`Callable`, *optional*): Called then.

    Returns:
        `int`: its exit code, 128 and the signal's number if a signal ended it.
    """
    if _answers(health_url):
        raise ServerError(f"{health_url} is answered by another server already; end that one, or choose another port.")
    server = ServerProcess(command, health_url)
    with _forwarding(server):
        try:
            if server.wait_until_healthy(start_timeout_s):
                on_healthy()
            code = server.wait()
        finally:
            # Schedulers outlive a server that was killed, and would keep the GPU's memory.
            server.kill()
    return code


def _answers(url: str) -> bool:
    try:
        with _OPENER.open(url, timeout=_HEALTH_TIMEOUT_S) as response:
            return bool(response.status == 200)
    except (OSError, http.client.HTTPException):  # the latter of somebody who does not speak HTTP
        return False


@contextmanager
def _forwarding(server: ServerProcess, signals: Sequence[signal.Signals] = FORWARDED) -> Iterator[None]:
    def forward(number: int, frame: FrameType | None) -> None:
        del frame
        server.forward(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, forward) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
