"""Clients, the collector and a server, all of them real, over HTTP."""

from __future__ import annotations

import gzip
import http.client
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import uvicorn
from openai_server import StreamingServer
from sglang_server import TOKENIZER, SGLangServer

from adaflash_hf.errors import InvalidInputError
from adaflash_hf.online.recorded_trajectory import RecordedTrajectory
from adaflash_hf.online.recorder import TrajectoryRecorder
from adaflash_hf.online.replay_buffer import ReplayBuffer
from adaflash_hf.serving.collector import DOMAIN_HEADER, RECORD_HEADER, Collector, CollectorSettings
from adaflash_hf.serving.response_tokens import ResponseTokens


CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello there"}]}
SAID = "you said hello there"


class Running:
    """A collector in front of a server."""

    def __init__(self, url: str, collector: Collector, buffer: str) -> None:
        self.url, self.collector, self._buffer = url, collector, buffer

    def post(self, path: str, body: dict[str, Any], **kwargs: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=600, trust_env=False, **kwargs)

    def recorded(self) -> list[RecordedTrajectory]:
        """Flushed first."""
        assert self.collector.recorder.flush(600)
        return ReplayBuffer(self._buffer).newest(99)

    def wait_for(self, name: str, count: int = 1) -> None:
        """Until so many answers have ended in a way."""
        deadline = time.monotonic() + 600
        while self.collector.tokens.counts.get(name, 0) < count:
            assert time.monotonic() < deadline, self.collector.status
            time.sleep(0.01)


@contextmanager
def collecting(upstream: str, tmp_path: Any, *, tokenizer: Any = TOKENIZER, **settings: Any) -> Iterator[Running]:
    path = str(tmp_path / "buffer")
    with TrajectoryRecorder(path, flush_interval_s=0.01) as recorder:
        collector = Collector(
            CollectorSettings(upstream, **{"version_poll_s": 0.02, **settings}), recorder, ResponseTokens(tokenizer)
        )
        server = uvicorn.Server(uvicorn.Config(collector.application(), port=0, log_config=None))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        try:
            yield Running(f"http://127.0.0.1:{port}", collector, path)
        finally:
            server.should_exit = True
            thread.join(600)


def ids_of(text: str) -> list[int]:
    return [*TOKENIZER(text, add_special_tokens=False)["input_ids"], TOKENIZER.eos_token_id]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["chat/completions", "completions"])
def test_answers_are_those_of_the_server_and_are_recorded(tmp_path, route, stream):
    body = CHAT if route.startswith("chat") else {"model": "tiny", "prompt": "hello there"}
    body = {**body, "stream": stream, "temperature": 0.5}
    with SGLangServer().run() as server, collecting(server.url, tmp_path) as running:
        direct = httpx.post(f"{server.url}/v1/{route}", json=body, timeout=600, trust_env=False)
        passed = running.post(f"/v1/{route}", body, headers={DOMAIN_HEADER: "greetings"})
        assert passed.status_code == 200
        (one,) = running.recorded()
        status = running.collector.status
    # The same but for the number of the request.
    assert re.sub(r"id-\d+", "", passed.text) == re.sub(r"id-\d+", "", direct.text)
    assert "sglext" not in passed.text and "token_ids" not in passed.text
    assert passed.headers["content-type"] == direct.headers["content-type"]
    sent = server.calls[-1][1] if server.paths[-1].startswith("/v1") else dict(server.calls)[f"/v1/{route}"]
    assert sent["temperature"] == 0.5
    assert one.token_ids[one.prompt_length :].tolist() == ids_of(SAID)
    prompt = "<|user|>hello there<|assistant|>" if route.startswith("chat") else "hello there"
    assert TOKENIZER.decode(one.token_ids[: one.prompt_length]) == prompt
    assert (one.domain, one.finished, one.drafter_version, one.version_spans) == ("greetings", True, 0, ())
    # 21 tokens in rounds of two drafts and the target's own, of a block of four rows.
    assert one.rounds.tolist() == [[4, 2]] * 7
    assert status["answers"] == {"ids": 1} and status["dialect"] == "sglang"


def test_a_client_that_asks_for_ids_itself_gets_them(tmp_path):
    body = {**CHAT, "return_output_ids_in_sglext": True}
    with SGLangServer().run() as server, collecting(server.url, tmp_path) as running:
        answer = running.post("/v1/chat/completions", body).json()
        assert answer["sglext"] == {"output_ids": [ids_of(SAID)]}
        assert len(running.recorded()) == 1


def test_other_servers_are_asked_for_nothing_and_their_text_is_tokenized(tmp_path):
    with StreamingServer(counts_tokens=False).run() as server, collecting(server.url, tmp_path) as running:
        body = {**CHAT, "stream": True}
        text = running.post("/v1/chat/completions", body).text
        assert text.startswith(": a comment, as some servers send") and text.endswith("data: [DONE]\n\n")
        assert server.bodies == [body]
        running.wait_for("broken_off")  # it never says how an answer ended
        assert running.recorded() == []
        assert running.collector.status["dialect"] == "other"


def test_text_that_does_not_become_itself_is_dropped_and_counted(tmp_path):
    # Counts one token more than there are bytes, as a tokenizer with other merges would.
    with SGLangServer().run() as server, collecting(server.url, tmp_path, dialect="other") as running:
        running.post("/v1/chat/completions", CHAT)
        assert len(running.recorded()) == 1
        usage = {"prompt_tokens": 32, "completion_tokens": 4}
        running.collector.tokens.history.saw(0)
        from adaflash_hf.serving.observed_response import ObservedResponse
        from adaflash_hf.serving.response_tokens import PendingResponse

        response = ObservedResponse("chat/completions", CHAT)
        choice = {"index": 0, "message": {"content": SAID}, "finish_reason": "stop"}
        response.add({"id": "x", "choices": [choice], "usage": usage})
        running.collector.recorder.record(PendingResponse(running.collector.tokens, response, 0))
        running.wait_for("no_round_trip")
        assert running.collector.tokens.counts == {"text": 1, "no_round_trip": 1}


def test_versions_per_token(tmp_path):
    server = SGLangServer(weight_version="adaflash-2", faults={"updated_meanwhile"})
    with server.run(), collecting(server.url, tmp_path) as running:
        running.post("/v1/chat/completions", CHAT)
        (one,) = running.recorded()
    assert one.drafter_version == 1
    assert one.version_spans == ((1, 0, 10), (2, 10, 21))


def test_streams_take_the_version_that_serves(tmp_path):
    server = SGLangServer(weight_version="adaflash-7")
    with server.run(), collecting(server.url, tmp_path) as running:
        while running.collector.tokens.history.current != 7:
            time.sleep(0.01)
        running.post("/v1/chat/completions", {**CHAT, "stream": True})
        (one,) = running.recorded()
    assert (one.drafter_version, one.version_spans) == (7, ())


def test_errors_of_the_server_reach_the_client(tmp_path):
    with SGLangServer().run() as server, collecting(server.url, tmp_path) as running:
        for stream in (False, True):
            body = {"messages": [{"role": "user", "content": "impossible"}], "stream": stream}
            answer = running.post("/v1/chat/completions", body)
            assert answer.status_code == 400
            assert answer.json() == {"object": "error", "message": "impossible", "code": 400}
            assert answer.headers["x-served-by"] == "stand-in"
        assert running.recorded() == []


def test_a_server_that_is_not_there(tmp_path):
    with collecting("http://127.0.0.1:9", tmp_path) as running:
        answer = running.post("/v1/chat/completions", CHAT)
    assert answer.status_code == 502
    assert "http://127.0.0.1:9 cannot be reached" in answer.json()["error"]["message"]


def test_a_server_that_is_killed_in_the_middle_of_a_whole_answer(tmp_path):
    half = SGLangServer(raw=b'{"choices": [', raw_headers={"Content-Length": "1000"})
    with half.run() as server, collecting(server.url, tmp_path) as running:
        answer = running.post("/v1/chat/completions", CHAT)
        assert answer.status_code == 502
        assert "broke off" in answer.json()["error"]["message"]
        assert running.collector.tokens.counts == {"broken_off": 1}
        # What is passed on unread must not look whole either.
        with pytest.raises(httpx.RemoteProtocolError):
            running.post("/v1/chat/completions", CHAT, headers={RECORD_HEADER: "no"})


@pytest.mark.parametrize(("fault", "message"), [("fails_midway", "out of memory"), ("breaks_off", "broke off")])
def test_answers_that_fail_midway(tmp_path, fault, message):
    with SGLangServer(faults={fault}).run() as server, collecting(server.url, tmp_path) as running:
        text = running.post("/v1/chat/completions", {**CHAT, "stream": True}).text
        assert '"you sa"' in text and message in text and "[DONE]" not in text
        assert running.recorded() == []


@pytest.mark.parametrize("stream", [False, True])
def test_answers_that_make_no_sense_reach_the_client(tmp_path, stream):
    with SGLangServer().run() as server, collecting(server.url, tmp_path) as running:
        for raw in (
            b'{"choices": [1]}',
            b'{"sglext": 7}',
            b"[" * 5000,
            b'{"choices": [{"delta": {"content": "\\ud800"}}]}',
        ):
            server.raw = b"data: " + raw + b"\n\n" if stream else raw
            answer = running.post("/v1/chat/completions", {**CHAT, "stream": stream})
            assert (answer.status_code, answer.content) == (200, server.raw)
        server.raw = None
        running.post("/v1/chat/completions", CHAT)
        assert len(running.recorded()) == 1, "and the next one is recorded"


@pytest.mark.parametrize("kind", ["application/json", "text/event-stream"])
def test_a_server_that_compresses_unasked(tmp_path, kind):
    plain = b'data: {"choices": []}\n\n' if "event" in kind else b'{"choices": []}'
    with SGLangServer(raw=gzip.compress(plain)).run() as server, collecting(server.url, tmp_path) as running:
        server.raw_headers = {"Content-Type": kind, "Content-Encoding": "gzip"}
        assert running.post("/v1/chat/completions", CHAT).content == plain
        assert running.post("/v1/chat/completions", CHAT, headers={RECORD_HEADER: "no"}).content == plain


def test_requests_that_make_no_sense_are_the_servers_to_refuse(tmp_path):
    with SGLangServer(raw=b'{"error": "what?"}').run() as server, collecting(server.url, tmp_path) as running:
        for body in (b"[" * 5000, b'{"a":' * 5000, b"{", b"\xff\xfe", b"", b"null", b'{"messages": 5}'):
            url = f"{running.url}/v1/chat/completions"
            answer = httpx.post(url, content=body, timeout=600, trust_env=False)
            assert (answer.status_code, answer.content) == (200, server.raw)


def test_odd_answers_about_the_server_itself(tmp_path):
    with SGLangServer(weight_version=5).run() as server, collecting(server.url, tmp_path) as running:
        assert running.post("/v1/chat/completions", CHAT).status_code == 200
        server.weight_version = "adaflash-3"
        while running.collector.tokens.history.current != 3:
            time.sleep(0.01)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_left(tmp_path, stream):
    with SGLangServer(faults={"slow"}).run() as server, collecting(server.url, tmp_path) as running:
        body = json.dumps({"prompt": "hello there", "stream": stream}).encode()
        connection = http.client.HTTPConnection(running.url.removeprefix("http://"), timeout=600)
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        if stream:
            answer, line = connection.getresponse(), b"begun"
            while b"id hel" not in line:  # the second piece, after which the server sends none
                assert line
                line = answer.readline()
        else:
            while "/v1/completions" not in dict(server.calls):
                time.sleep(0.01)
        connection.sock.shutdown(socket.SHUT_RDWR)
        connection.close()
        assert server.gone.wait(600)
        if stream:
            running.wait_for("ids")
            (one,) = running.recorded()
            # What had come by then is the target's own, whether or not anybody wanted more of it.
            assert one.token_ids[one.prompt_length :].tolist() == ids_of(SAID)[:12]
            assert not one.finished
        else:
            running.wait_for("client_left")
            assert running.recorded() == []


def test_a_client_that_leaves_before_it_has_asked_is_no_fault(tmp_path, caplog):
    with SGLangServer().run() as server, collecting(server.url, tmp_path) as running:
        host, _, port = running.url.removeprefix("http://").partition(":")
        head = b"\r\n".join([b"POST /v1/completions HTTP/1.1", b"Host: here", b"Content-Length: 999", b"\r\n"])
        with socket.create_connection((host, int(port)), timeout=600) as connection:
            connection.sendall(head + b'{"prompt": "hel')
        # Answered after the other's end was noticed, one loop serves both.
        assert running.post("/v1/completions", {"model": "tiny", "prompt": "hello there"}).status_code == 200
    assert "Exception in ASGI application" not in caplog.text


def test_what_is_not_to_be_recorded(tmp_path):
    with SGLangServer().run() as server, collecting(server.url, tmp_path) as running:
        answer = running.post("/v1/chat/completions", CHAT, headers={RECORD_HEADER: "no"})
        assert answer.json()["choices"][0]["message"]["content"] == SAID
        assert dict(server.calls)["/v1/chat/completions"] == CHAT
        assert RECORD_HEADER not in server.headers[-1]
        assert running.recorded() == []


def test_everything_else_goes_through(tmp_path):
    with SGLangServer(api_key="secret").run() as server, collecting(server.url, tmp_path) as running:
        refused = httpx.get(f"{running.url}/v1/models", timeout=600, trust_env=False)
        assert refused.status_code == 401
        models = httpx.get(
            f"{running.url}/v1/models?x=1", headers={"Authorization": "Bearer secret"}, timeout=600, trust_env=False
        )
        assert models.status_code == 404 and "/v1/models?x=1" in server.paths
        assert httpx.get(f"{running.url}/nowhere", timeout=600, trust_env=False).status_code == 401


def test_status_and_metrics(tmp_path):
    with SGLangServer().run() as server, collecting(server.url, tmp_path) as running:
        running.post("/v1/chat/completions", CHAT)
        assert len(running.recorded()) == 1
        status = httpx.get(f"{running.url}/adaflash/status", timeout=600, trust_env=False).json()
        metrics = httpx.get(f"{running.url}/adaflash/metrics", timeout=600, trust_env=False).text
    assert status["recorder"]["written"] == 1
    assert 'adaflash_collector_answers_total{outcome="ids"} 1.0' in metrics
    assert "adaflash_collector_drafter_version 0.0" in metrics


def test_many_at_once(tmp_path):
    with SGLangServer().run() as server, collecting(server.url, tmp_path) as running:
        answers: dict[int, str] = {}

        def ask(number: int) -> None:
            body = {"messages": [{"role": "user", "content": f"number {number}"}], "stream": number % 2 == 0}
            answers[number] = running.post("/v1/chat/completions", body).text

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        texts = sorted(TOKENIZER.decode(one.token_ids[one.prompt_length : -1]) for one in running.recorded())
    assert texts == sorted(f"you said number {number}" for number in range(16))
    pieces = [json.loads(line[6:]) for line in answers[4].splitlines() if line.startswith("data: {")]
    assert "".join(p["choices"][0]["delta"].get("content", "") for p in pieces) == "you said number 4"


@pytest.mark.parametrize("settings", [{"upstream": "localhost:30000"}, {"upstream": "http://x", "dialect": "tgi"}])
def test_settings(settings):
    with pytest.raises(InvalidInputError, match="`upstream`|`dialect`"):
        CollectorSettings(**settings)
