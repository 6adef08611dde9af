"""A real HTTP server that streams answers as OpenAI-compatible servers do: one event per piece, slowly."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class StreamingServer:
    """
    What it does, and what it saw.

    Attributes:
        answer (`Callable[[str], list[str]]`): Pieces of the answer to the last message.
        pause_s (`float`): Before each piece.
        counts_tokens (`bool`): Whether it sends `usage`: three tokens for each piece.
        fail_with (`int`, *optional*): Status of every answer.
        break_off (`bool`): Whether it sends an error in the middle.
        page (`str`, *optional*): What it answers to every prompt, as a server that is no language model's.
        models (`str`): What it answers to `/v1/models`.
        piece_name (`str`): Under which a piece is sent.
        metrics (`Callable[[int], str]`, *optional*): Text of `/metrics`, by requests answered.
    """

    answer: Callable[[str], list[str]] = lambda text: [f"<{text}>", " and", " so on"]
    pause_s: float = 0.002
    counts_tokens: bool = True
    fail_with: int | None = None
    break_off: bool = False
    page: str | None = None
    models: str = '{"data": [{"id": "tiny"}]}'
    piece_name: str = "content"
    metrics: Callable[[int], str] | None = None
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: set[str | None] = field(default_factory=set)
    most_at_once: int = 0
    _now: int = 0
    _lock: Any = field(default_factory=threading.Lock)

    @contextmanager
    def run(self) -> Iterator[StreamingServer]:
        """Listens on a free port of this machine."""
        httpd = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        httpd.daemon_threads = True
        thread = threading.Thread(target=httpd.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        self.url = f"http://127.0.0.1:{httpd.server_port}/v1"
        try:
            yield self
        finally:
            httpd.shutdown()
            httpd.server_close()

    @contextmanager
    def _counted(self, body: dict[str, Any], key: str | None) -> Iterator[None]:
        with self._lock:
            self.bodies.append(body)
            self.keys.add(key)
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
        try:
            yield
        finally:
            with self._lock:
                self._now -= 1


def _handler(server: StreamingServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            pass

        def _reply(self, status: int, content: str, kind: str = "application/json") -> None:
            data = content.encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            if self.path == "/v1/models":
                self._reply(200, server.models)
            elif self.path == "/metrics" and server.metrics is not None:
                self._reply(200, server.metrics(len(server.bodies)), "text/plain")
            else:
                self._reply(404, "{}")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with server._counted(body, self.headers.get("Authorization")):
                if server.fail_with is not None:
                    self._reply(server.fail_with, json.dumps({"error": "no such model"}))
                    return
                if server.page is not None:
                    self._reply(200, server.page, "text/html")
                    return
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                self._stream(body)

        def _stream(self, body: dict[str, Any]) -> None:
            pieces = server.answer(body["messages"][-1]["content"])
            self._send(": a comment, as some servers send to keep the line open\n\n")
            self._event({"choices": [{"delta": {"role": "assistant"}}]})
            for index, piece in enumerate(pieces):
                time.sleep(server.pause_s)
                if server.break_off and index == 1:
                    self._event({"error": {"message": "out of memory"}})
                    break
                self._event({"choices": [{"delta": {"content": None, server.piece_name: piece}}]})
            if server.counts_tokens and body.get("stream_options", {}).get("include_usage"):
                self._event({"choices": [], "usage": {"completion_tokens": 3 * len(pieces)}})
            self._send("data: [DONE]\n\n")
            self._send("")

        def _event(self, content: dict[str, Any]) -> None:
            self._send(f"data: {json.dumps(content)}\n\n")

        def _send(self, text: str) -> None:
            data = text.encode()
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            self.wfile.flush()

    return Handler
