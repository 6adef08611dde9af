"""A real HTTP server with the routes of SGLang 0.5.23 that this package uses, its silent failures included.

It holds real tensors of a target and a drafter. Without a selector, an update goes to both; names it does not know are
skipped and success is reported; an update from disk always goes to both. Answers are those of `answer`; how many
drafts are accepted follows from the drafter's tensors through `skill`.
"""

from __future__ import annotations

import base64
import hashlib
import io
import itertools
import json
import pickle
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from safetensors.torch import load_file
from stand_ins import byte_tokenizer


# No two responses share an id, however many threads answer at once: a buffer takes each id once.
_RESPONSE_NUMBERS = itertools.count()


_FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
_FUSED |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
_ALLOWED = {
    ("torch._utils", "_rebuild_tensor_v2"),
    ("collections", "OrderedDict"),
    ("torch", "BFloat16Storage"),
    ("torch", "FloatStorage"),
}


class _SafeUnpickler(pickle.Unpickler):
    """As SGLang's: tensors by value, and nothing that runs."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return lambda data: torch.load(io.BytesIO(data), weights_only=True)
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        raise RuntimeError(f"Blocked unsafe global ({module}.{name}) during pickle deserialization")


@dataclass
class SGLangServer:
    """
    What it does, and what it saw.

    Attributes:
        answer (`Callable[[str], str]`): The answer to a prompt.
        draft (`dict`): Tensors of the drafter, under the names of its checkpoint.
        target (`dict`): The same of the target; names may be those of the drafter.
        skill (`Callable[[dict], int]`): Drafts accepted per round, from the drafter's tensors.
        faults (`set[str]`): "ignores_selector", "skips_names", "loses_connection" (at the next update), "goes_down"
            (after the next bucket; then "is_down", and no call is answered), "slow".
        tp_size (`int`): Ranks, each of which reads its own entry of an update.
        block_size (`int`): Rows verified in each round.
        raw (`bytes`, *optional*): What every request for text is answered with instead.
        raw_headers (`dict`): And under which headers.
    """

    answer: Callable[[str], str] = lambda text: f"you said {text}"
    draft: dict[str, torch.Tensor] = field(default_factory=dict)
    target: dict[str, torch.Tensor] = field(default_factory=dict)
    skill: Callable[[dict[str, torch.Tensor]], int] = lambda draft: 2
    faults: set[str] = field(default_factory=set)
    tp_size: int = 1
    block_size: int = 4
    algorithm: str | None = "DFLASH"
    draft_path: str | None = None
    api_key: str | None = None
    admin_api_key: str | None = None
    weight_version: str = "default"
    is_paused: bool = False
    session: str | None = None
    url: str = ""
    raw: bytes | None = None
    raw_headers: dict[str, str] = field(default_factory=dict)
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    gone: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def run(self) -> Iterator[SGLangServer]:
        """Listens on a free port of this machine."""
        httpd = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        httpd.daemon_threads = True
        threading.Thread(target=httpd.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{httpd.server_port}"
        try:
            yield self
        finally:
            httpd.shutdown()
            httpd.server_close()

    @property
    def paths(self) -> list[str]:
        """Routes that were called, in order."""
        return [path for path, _ in self.calls]

    # Weights

    def control(self, path: str, body: dict[str, Any]) -> tuple[bool, str] | dict[str, Any]:
        if path == "/begin_weight_update":
            if self.session is not None:
                return False, "a weight-update session is already open; call end_weight_update() first"
            self.session = body.get("selector", "all")
        elif path == "/end_weight_update":
            if self.session is None:
                return False, "no weight-update session is open; call begin_weight_update() first"
            self.session = None
        elif path == "/update_weights_from_tensor":
            return self._update_from_tensor(body)
        elif path == "/update_weights_from_disk":
            named = list(load_file(f"{body['model_path']}/model.safetensors").items())
            self._load("all", named)
        elif path == "/pause_generation":
            self.is_paused = True
        elif path == "/continue_generation":
            self.is_paused = False
        elif path == "/weights_checker":
            return self._checksums(body.get("selector", "all"))
        return True, "Success"

    def _update_from_tensor(self, body: dict[str, Any]) -> tuple[bool, str]:
        if self.session is None:
            return False, "update_weights_from_tensor must run between begin_weight_update() and end_weight_update()"
        payloads = body["serialized_named_tensors"]
        for rank in range(self.tp_size):
            named = _SafeUnpickler(io.BytesIO(base64.b64decode(payloads[rank], validate=True))).load()
        selector = "all" if "ignores_selector" in self.faults else body.get("selector", "all")
        self._load(selector, named)
        if body.get("weight_version") is not None:
            self.weight_version = body["weight_version"]
        if body.get("flush_cache", True):
            return False, "Weights were updated, but the cache was not flushed because requests are still running"
        return True, "Success"

    def _load(self, selector: str, named: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in named:
            for side in ("target", "draft"):
                tensors = getattr(self, side)
                if selector not in (side, "all") or name not in tensors:
                    continue
                if not ("skips_names" in self.faults and name.startswith("layers.1.")):
                    tensors[name] = tensor.clone()

    def _checksums(self, selector: str) -> dict[str, Any]:
        sums: dict[str, str] = {}
        for side in ("target", "draft"):
            if selector not in (side, "all"):
                continue
            fused: dict[str, hashlib._Hash] = {}
            for name, tensor in getattr(self, side).items():
                parts = name.split(".")
                if len(parts) > 1:
                    parts[-2] = _FUSED.get(parts[-2], parts[-2])
                key = ("draft." if side == "draft" else "") + ".".join(parts)
                digest = fused.setdefault(key, hashlib.sha256())
                digest.update(tensor.float().numpy().tobytes())
            sums |= {name: digest.hexdigest()[:16] for name, digest in fused.items()}
        return {"success": True, "message": "", "ranks": [{"checksums": sums}] * self.tp_size}

    # Answers

    def details(self, num_tokens: int) -> dict[str, Any]:
        """Figures of speculation for an answer."""
        accepted = min(self.skill(self.draft), self.block_size - 1)
        rounds = max(num_tokens // (accepted + 1), 1)
        return {
            "spec_verify_ct": rounds,
            "spec_num_correct_drafts": rounds * accepted,
            "spec_num_proposed_drafts": rounds * (self.block_size - 1),
            "spec_correct_drafts_histogram": [0] * accepted + [rounds],
            "spec_cap_lens_histogram": [],
        }


TOKENIZER = byte_tokenizer()


def prompt_ids(body: dict[str, Any]) -> list[int]:
    """What a request's prompt is to the server."""
    if "messages" in body:
        encoded = TOKENIZER.apply_chat_template(body["messages"], add_generation_prompt=True, return_dict=True)
        return list(encoded["input_ids"])
    prompt = body["prompt"]
    return TOKENIZER(prompt)["input_ids"] if isinstance(prompt, str) else list(prompt)


def _handler(server: SGLangServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            pass

        def _reply_raw(self, data: bytes, is_stream: bool) -> None:
            self.close_connection = True
            self.send_response(200)
            kind = {"Content-Type": "text/event-stream" if is_stream else "application/json", "Connection": "close"}
            for name, value in {**kind, "Content-Length": str(len(data)), **server.raw_headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def _reply(self, status: int, fields: Any, kind: str = "application/json") -> None:
            data = fields.encode() if isinstance(fields, str) else json.dumps(fields).encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("X-Served-By", "stand-in")
            self.end_headers()
            self.wfile.write(data)

        def _is_let_in(self, *keys: str | None) -> bool:
            given = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
            if all(key is None for key in keys) or given in [key for key in keys if key is not None]:
                return True
            self._reply(401, {"error": "Unauthorized"})
            return False

        def _is_down(self) -> bool:
            if "is_down" in server.faults:
                self._break_off()
                return True
            return False

        def do_GET(self) -> None:
            if self._is_down():
                return
            server.calls.append((self.path, {}))
            if self.path == "/health":
                self._reply(200, "")
            elif not self._is_let_in(server.api_key):
                return
            elif self.path == "/model_info":
                self._reply(200, {"model_path": "tiny", "weight_version": server.weight_version})
            elif self.path == "/server_info":
                fields = {"speculative_algorithm": server.algorithm, "tp_size": server.tp_size, "device": "cpu"}
                self._reply(200, {**fields, "speculative_draft_model_path": server.draft_path})
            elif self.path == "/v1/models":
                self._reply(200, {"object": "list", "data": [{"id": "tiny", "owned_by": "sglang"}]})
            else:
                self._reply(404, {"detail": "Not Found"})

        def do_POST(self) -> None:
            if self._is_down():
                return
            read = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if server.raw is not None and self.path.startswith("/v1"):
                self._reply_raw(server.raw, re.search(rb'"stream": ?true', read) is not None)
                return
            body = json.loads(read or "{}")
            server.calls.append((self.path, body))
            server.headers.append({name.lower(): value for name, value in self.headers.items()})
            if self.path in ("/v1/chat/completions", "/v1/completions"):
                if self._is_let_in(server.api_key):
                    self._generate(body)
                return
            if not self._is_let_in(server.admin_api_key or server.api_key):
                return
            if self.path == "/update_weights_from_tensor" and "loses_connection" in server.faults:
                server.faults.discard("loses_connection")
                self._break_off()
                return
            if self.path == "/flush_cache":
                self._reply(200, "Cache flushed.\n", "text/plain")
                return
            answer = server.control(self.path, body)
            if self.path == "/update_weights_from_tensor" and "goes_down" in server.faults:
                server.faults = {"is_down"}
            if isinstance(answer, dict):
                self._reply(200, answer)
            else:
                self._reply(200 if answer[0] else 400, {"success": answer[0], "message": answer[1]})

        def _generate(self, body: dict[str, Any]) -> None:
            ids = prompt_ids(body)
            said = body["messages"][-1]["content"] if "messages" in body else str(body["prompt"])
            if "impossible" in said:
                self._reply(400, {"object": "error", "message": "impossible", "code": 400})
                return
            text = server.answer(said)
            output = [*TOKENIZER(text, add_special_tokens=False)["input_ids"], TOKENIZER.eos_token_id]
            if body.get("stream"):
                self._stream(body, ids, text, output)
            else:
                if "slow" in server.faults:
                    self._wait_for_the_client_to_leave()
                    return
                self._whole(body, ids, text, output)

        def _whole(self, body: dict[str, Any], ids: list[int], text: str, output: list[int]) -> None:
            is_chat = "messages" in body
            choice: dict[str, Any] = {"index": 0, "finish_reason": "stop", "matched_stop": output[-1]}
            choice |= {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
            if body.get("return_token_ids") and not is_chat:
                choice |= {"token_ids": output, "prompt_token_ids": ids}
            half = len(output) // 2
            spans = [{"version": server.weight_version, "start": 0, "end": len(output)}]
            if "updated_meanwhile" in server.faults:
                spans = [{"version": "adaflash-1", "start": 0, "end": half}, {**spans[0], "start": half}]
            fields = {
                "id": f"id-{next(_RESPONSE_NUMBERS)}",
                "choices": [choice],
                "usage": self._usage(ids, output),
                "metadata": {"weight_version": server.weight_version, "weight_versions": spans},
            }
            if extension := self._extension(body, ids, output):
                fields["sglext"] = extension
            self._reply(200, fields)

        def _usage(self, ids: list[int], output: list[int]) -> dict[str, int]:
            return {"prompt_tokens": len(ids), "completion_tokens": len(output)}

        def _extension(self, body: dict[str, Any], ids: list[int], output: list[int]) -> dict[str, Any]:
            extension: dict[str, Any] = {}
            if body.get("return_spec_tokens_details") and server.algorithm:
                extension["spec_tokens_details"] = server.details(len(output))
            if body.get("return_input_ids_in_sglext"):
                extension["input_ids"] = ids
            if body.get("return_output_ids_in_sglext"):
                extension["output_ids"] = [output]
            return extension

        def _stream(self, body: dict[str, Any], ids: list[int], text: str, output: list[int]) -> None:
            is_chat, name = "messages" in body, f"id-{next(_RESPONSE_NUMBERS)}"
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream; charset=utf-8")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            pieces = [text[start : start + 6] for start in range(0, len(text), 6)]
            try:
                for number, piece in enumerate(pieces):
                    if "slow" in server.faults and number == 2:
                        self._wait_for_the_client_to_leave()
                    choice: dict[str, Any] = {"index": 0, "finish_reason": None}
                    choice |= {"delta": {"content": piece}} if is_chat else {"text": piece}
                    if body.get("return_token_ids") and not is_chat:
                        last = number == len(pieces) - 1
                        choice["token_ids"] = output[6 * number :] if last else output[6 * number : 6 * number + 6]
                        choice |= {"prompt_token_ids": ids} if number == 0 else {}
                    self._event({"id": name, "choices": [choice]})
                    if "fails_midway" in server.faults and number == 1:
                        self._event({"error": {"message": "out of memory", "code": 500}})
                        self._send("")
                        return
                    if "breaks_off" in server.faults and number == 1:
                        self._break_off()
                        return
                final = {"index": 0, "finish_reason": "stop", "matched_stop": output[-1]}
                self._event({"id": name, "choices": [final | ({"delta": {}} if is_chat else {"text": ""})]})
                if extension := self._extension(body, ids, output):
                    self._event({"id": name, "choices": [], "sglext": extension})
                if (body.get("stream_options") or {}).get("include_usage"):
                    self._event({"id": name, "choices": [], "usage": self._usage(ids, output)})
                self._send("data: [DONE]\n\n")
                self._send("")
            except OSError:
                server.gone.set()

        def _wait_for_the_client_to_leave(self) -> None:
            self.connection.settimeout(1200)
            try:
                if self.connection.recv(1) == b"":
                    server.gone.set()
            except OSError:
                server.gone.set()
            self.close_connection = True

        def _break_off(self) -> None:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)

        def _event(self, content: dict[str, Any]) -> None:
            self._send(f"data: {json.dumps(content)}\n\n")
            time.sleep(0.001)

        def _send(self, text: str) -> None:
            data = text.encode()
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            self.wfile.flush()

    return Handler
