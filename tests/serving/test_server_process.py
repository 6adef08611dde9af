"""A real child process is started, waited for, signalled and cleaned up after."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from free_ports import free_port

from adaflash_hf.errors import ServerError
from adaflash_hf.serving.launch_commands import LaunchCommand
from adaflash_hf.serving.server_process import ServerProcess, run_server


# Answers /health with 503 at first, starts a grandchild as SGLang starts schedulers, and says what it was sent.
SERVER = """
import http.server, os, signal, subprocess, sys
port, folder, mode = int(sys.argv[1]), sys.argv[2], sys.argv[3]
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(folder + "/grandchild", "w").write(str(child.pid))
asked = []
def end(number, frame):
    open(folder + "/signals", "a").write(signal.Signals(number).name + " ")
    if mode != "stubborn":
        os._exit(7)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, end)
class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *args): pass
    def do_GET(self):
        asked.append(self.path)
        self.send_response(200 if len(asked) > 2 and mode != "ill" else 503)
        self.send_header("Content-Length", "0")
        self.end_headers()
if mode == "fails":
    sys.exit(3)
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
RUNNER = """
import sys
from adaflash_hf.serving.launch_commands import LaunchCommand
from adaflash_hf.serving.server_process import run_server
sys.exit(run_server(LaunchCommand(sys.argv[2:]), sys.argv[1], on_healthy=lambda: print("ready", flush=True)))
"""


def command(folder: Path, mode: str = "") -> tuple[LaunchCommand, str]:
    port = free_port()
    arguments = [sys.executable, "-c", SERVER, str(port), str(folder), mode]
    return LaunchCommand(arguments), f"http://127.0.0.1:{port}/health"


@contextmanager
def running(launch: LaunchCommand, health: str) -> Iterator[ServerProcess]:
    server = ServerProcess(launch, health)
    try:
        assert server.wait_until_healthy(600, poll_s=0.01)
        yield server
    finally:
        server.kill()
        server.wait()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def assert_nothing_is_left(folder: Path) -> None:
    pid = int((folder / "grandchild").read_text())
    deadline = time.monotonic() + 600
    while is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_reach_the_server_and_its_exit_code_is_ours(tmp_path, number):
    launch, health = command(tmp_path)
    arguments = [sys.executable, "-c", RUNNER, health, *launch.arguments]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.wait(600) == 7
    assert (tmp_path / "signals").read_text() == f"{signal.Signals(number).name} "
    assert_nothing_is_left(tmp_path)


def test_the_second_signal_does_not_ask(tmp_path):
    launch, health = command(tmp_path, "stubborn")
    arguments = [sys.executable, "-c", RUNNER, health, *launch.arguments]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        while not (tmp_path / "signals").exists():
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.wait(600) == 128 + signal.SIGKILL
    assert_nothing_is_left(tmp_path)


def test_a_server_that_ends_by_itself(tmp_path):
    launch, health = command(tmp_path, "fails")
    healthy: list[bool] = []
    assert run_server(launch, health, on_healthy=lambda: healthy.append(True)) == 3
    assert not healthy
    assert_nothing_is_left(tmp_path)


def test_a_server_that_never_gets_well(tmp_path):
    launch, health = command(tmp_path, "ill")
    with pytest.raises(ServerError, match="within 2 s.*--start-timeout"):
        run_server(launch, health, start_timeout_s=2)
    if (tmp_path / "grandchild").exists():  # a busy machine may not have come so far
        assert_nothing_is_left(tmp_path)


def test_a_port_that_somebody_else_answers_on(tmp_path):
    launch, health = command(tmp_path)
    with running(launch, health):
        with pytest.raises(ServerError, match="answered by another server already.*another port"):
            run_server(LaunchCommand([sys.executable, "-c", "raise SystemExit(0)"]), health)


def test_a_proxy_of_the_environment_and_a_server_that_speaks_no_http(tmp_path, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    launch, health = command(tmp_path)
    with running(launch, health) as server:
        assert server.is_healthy()
    with socket.create_server(("127.0.0.1", 0)) as place:

        def greet() -> None:
            connection, _ = place.accept()
            with connection:
                connection.recv(1024)
                connection.sendall(b"220 mail.example.org ESMTP\r\n")

        thread = threading.Thread(target=greet)
        thread.start()
        server.health_url = f"http://127.0.0.1:{place.getsockname()[1]}/health"
        assert not server.is_healthy()
        thread.join()


def test_variables_and_programs_that_are_not_there(tmp_path):
    with pytest.raises(ServerError, match="'/nowhere/sglang' cannot be started"):
        ServerProcess(LaunchCommand(["/nowhere/sglang"]), "http://127.0.0.1:9")
    code = "import os, sys; sys.exit(int(os.environ['ANSWER']))"
    launch = LaunchCommand([sys.executable, "-c", code], environment={"ANSWER": "42"})
    results: list[int] = []
    # Outside the main thread, where signals are nobody's business.
    thread = threading.Thread(target=lambda: results.append(run_server(launch, "http://127.0.0.1:9")))
    thread.start()
    thread.join(600)
    assert results == [42]
    assert "ANSWER" not in os.environ
