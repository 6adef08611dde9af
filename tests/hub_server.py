"""A stand-in for the Hugging Face Hub on 127.0.0.1, for `push_to_hub` and `from_pretrained` without a network.

It speaks the handful of endpoints that huggingface_hub uses to create a repository, commit small files and download
them, and those with which `datasets` finds and reads a data set. Not covered: LFS and Xet uploads (every file is asked
for inline), several revisions, and authentication.

`python tests/hub_server.py` serves one for a shell, which CONTRIBUTING.md shows.
"""

from __future__ import annotations

import base64
import hashlib
import json
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, unquote, urlparse

from huggingface_hub import constants


if TYPE_CHECKING:
    import pytest


class HubServer(ThreadingHTTPServer):
    """
    Keeps repositories as `{"org/name": {"path": bytes}}`, data sets as `"datasets/org/name"`, and the requests it saw
    as "METHOD /path".
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), HubRequestHandler)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.requests_seen: list[str] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def environment(self, home: Path) -> dict[str, str]:
        """Variables for a process that is to use this server with an empty cache under `home`."""
        return {
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": str(home),
            "HF_TOKEN": "hf_stand_in",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_OFFLINE": "0",  # whatever this process was started with: it is no network that is asked
        }

    def serve_this_process(self, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
        """Let huggingface_hub, which is loaded already, use this server and an empty cache."""
        monkeypatch.setattr(constants, "ENDPOINT", self.endpoint)
        template = self.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", "hf_stand_in")
        # transformers keeps a client, which would go on asking the server it was made for.
        monkeypatch.setattr("transformers.utils.hub._hf_api", None, raising=False)

    def commit_id(self, repository: str) -> str:
        """Forty hexadecimal digits that change with the content."""
        digest = hashlib.sha1()
        for path, content in sorted(self.repositories[repository].items()):
            digest.update(path.encode() + b"\0" + content)
        return digest.hexdigest()


class HubRequestHandler(BaseHTTPRequestHandler):
    """One request to the stand-in."""

    server: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Keeps test output free of access logs; `requests_seen` has them."""

    def do_HEAD(self) -> None:
        self._download()

    def do_GET(self) -> None:
        path = self._path()
        if "/resolve/" in path:
            self._download()
        elif path.startswith("/api/models/"):
            self._describe(*self._split(path.removeprefix("/api/models/")))
        elif path.startswith("/api/datasets/"):
            repository, rest = self._split(path.removeprefix("/api/datasets/"))
            self._describe(f"datasets/{repository}", rest)
        else:
            self._answer(404)

    def do_POST(self) -> None:
        path = self._path()
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if path == "/api/repos/create":
            fields = json.loads(body)
            name = f"{fields['organization']}/{fields['name']}" if fields.get("organization") else fields["name"]
            self.server.repositories.setdefault(name, {})
            self._answer(200, {"url": f"{self.server.endpoint}/{name}"})
        elif path == "/api/validate-yaml":
            self._answer(200, {"errors": [], "warnings": []})
        elif "/preupload/" in path:
            files = json.loads(body)["files"]
            modes = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None} for f in files]
            self._answer(200, {"files": modes})
        elif "/paths-info/" in path:
            self._describe_paths(path.removeprefix("/api/").partition("/paths-info/")[0], body)
        elif "/commit/" in path:
            self._commit(path.removeprefix("/api/models/").split("/commit/")[0], body)
        else:
            self._answer(404)

    def _commit(self, repository: str, body: bytes) -> None:
        files = self.server.repositories[repository]
        for line in body.splitlines():
            entry = json.loads(line)
            if entry["key"] == "header" and entry["value"].get("parentCommit") not in (
                None,
                self.server.commit_id(repository),
            ):
                self._answer(412, {"error": "A commit has happened since. Please refresh and try again."})
                return
            if entry["key"] == "file":
                files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            elif entry["key"] == "deletedFile":
                files.pop(entry["value"]["path"], None)
        commit = self.server.commit_id(repository)
        url = f"{self.server.endpoint}/{repository}/commit/{commit}"
        self._answer(200, {"success": True, "commitOid": commit, "commitUrl": url})

    def _describe(self, repository: str, rest: str) -> None:
        files = self.server.repositories.get(repository)
        if files is None:
            self._answer(404, headers={"X-Error-Code": "RepoNotFound"})
        elif rest.startswith("tree/"):
            self._answer(200, self._tree(files, rest.partition("/")[2].partition("/")[2]))
        else:
            siblings = [{"rfilename": path} for path in files]
            sha = self.server.commit_id(repository)
            self._answer(200, {"id": repository, "sha": sha, "siblings": siblings, "tags": [], "private": False})

    def _tree(self, files: dict[str, bytes], folder: str) -> list[dict[str, object]]:
        """Files and folders in `folder`, at any depth if the request says so."""
        is_recursive = parse_qs(urlparse(self.path).query).get("recursive", ["false"])[0].lower() in ("true", "1")
        prefix = f"{folder}/" if folder else ""
        entries: dict[str, dict[str, object]] = {}
        for path, content in files.items():
            name, slash, _ = path.removeprefix(prefix).partition("/")
            if not path.startswith(prefix):
                continue
            if slash:
                entries[prefix + name] = {"type": "directory", "path": prefix + name, "size": 0, "oid": "1" * 40}
            if not slash or is_recursive:
                entries[path] = {"type": "file", "path": path, "size": len(content), "oid": "0" * 40}
        return list(entries.values())

    def _describe_paths(self, repository: str, body: bytes) -> None:
        wanted = parse_qs(body.decode())["paths"] if not body.startswith(b"{") else json.loads(body)["paths"]
        files = self.server.repositories.get(repository, {})
        known = [path for path in wanted if path in files]
        self._answer(
            200, [{"type": "file", "path": path, "size": len(files[path]), "oid": "0" * 40} for path in known]
        )

    def _download(self) -> None:
        repository, _, rest = self._path().lstrip("/").partition("/resolve/")
        files = self.server.repositories.get(repository)
        content = None if files is None else files.get(rest.partition("/")[2])
        if content is None:
            code = "RepoNotFound" if files is None else "EntryNotFound"
            self._answer(404, headers={"X-Error-Code": code})
            return
        headers = {
            "ETag": f'"{hashlib.sha1(content).hexdigest()}"',
            "X-Repo-Commit": self.server.commit_id(repository),
        }
        if range_header := self.headers.get("Range"):
            first, _, last = range_header.removeprefix("bytes=").partition("-")
            headers["Content-Range"] = f"bytes {first}-{last or len(content) - 1}/{len(content)}"
            self._answer(206, content[int(first) : int(last) + 1 if last else None], headers)
            return
        self._answer(200, content, headers)

    def _path(self) -> str:
        path = unquote(urlparse(self.path).path)
        self.server.requests_seen.append(f"{self.command} {path}")
        return path

    @staticmethod
    def _split(path: str) -> tuple[str, str]:
        """("org/name", what follows it)."""
        organization, name, *rest = path.split("/")
        return f"{organization}/{name}", "/".join(rest)

    def _answer(self, status: int, content: object = None, headers: dict[str, str] | None = None) -> None:
        body = content if isinstance(content, bytes) else json.dumps({} if content is None else content).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        kind = "application/octet-stream" if isinstance(content, bytes) else "application/json"
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def running_hub() -> Iterator[HubServer]:
    """The stand-in, serving on a free port until the block is left."""
    server = HubServer()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def main() -> None:
    """A stand-in for a shell, with what the shell has to say to use it."""
    with tempfile.TemporaryDirectory() as home, running_hub() as server:
        for name, value in server.environment(Path(home)).items():
            sys.stdout.write(f"export {name}={value}\n")
        sys.stdout.flush()
        is_over = threading.Event()
        # By handlers, for what was started in the background has inherited that it ignores SIGINT.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: is_over.set())
        is_over.wait()


if __name__ == "__main__":
    main()
