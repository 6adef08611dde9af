"""Servers are measured over real HTTP, streaming."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from openai_server import StreamingServer

from adaflash_hf import InvalidInputError
from adaflash_hf.evaluation.bench import BenchReport, BenchSettings
from adaflash_hf.evaluation.bench_server import BenchServer, bench_servers, parse_server
from adaflash_hf.evaluation.workloads import Workload
from adaflash_hf.training.prompts import Prompt


WORKLOAD = Workload("w", tuple(Prompt((("user", f"q{n}"),), "chat") for n in range(6)))


def measure(servers: Sequence[BenchServer], **kwargs: Any) -> BenchReport:
    settings = BenchSettings(
        **{"concurrencies": [3], "num_requests": 6, "max_new_tokens": 16, "repeats": 2, "warm_up_tokens": 1, **kwargs}
    )
    return bench_servers(servers, [WORKLOAD], settings, environment={"here": True})


def test_counts_times_and_concurrency() -> None:
    pause_s = 0.2
    with StreamingServer(pause_s=pause_s).run() as server:
        report = measure([BenchServer("only", server.url, api_key="secret")])
    (row,) = report.rows
    assert (row.method, row.workload, row.concurrency, row.requests) == ("only", "w", 3, 6)
    assert row.generated_tokens == 6 * 9
    assert row.speedup is None and row.identical is None and row.acceptance_length is None
    # Pieces come a pause after each other and hold three of the nine tokens; a busy client may see the first one late.
    assert row.first_token_p50_s is not None and row.first_token_p50_s >= pause_s
    assert row.token_latency_p50_s is not None and row.token_latency_p50_s >= pause_s / 8
    assert 1 < server.most_at_once <= 3
    assert server.keys == {"Bearer secret"}
    timed = [body for body in server.bodies if body["max_tokens"] == 16]
    assert len(timed) == 12
    assert {(body["model"], body["temperature"], body["stream"]) for body in timed} == {("tiny", 0, True)}
    assert report.environment["servers"] == {"only": server.url}
    assert "secret" not in str(report.as_dict())


def test_pieces_are_counted_where_usage_is_missing() -> None:
    with StreamingServer(counts_tokens=False).run() as server:
        (row,) = measure([BenchServer("only", server.url)]).rows
    assert row.generated_tokens == 6 * 3


def test_servers_are_compared_with_the_first() -> None:
    slow = StreamingServer(pause_s=0.4)
    fast = StreamingServer(pause_s=0.0, answer=lambda text: [f"<{text}>", " and", " so on" if text != "q2" else "?"])
    with slow.run(), fast.run():
        plain, quick = measure([BenchServer("plain", slow.url), BenchServer("quick", fast.url)]).rows
    assert plain.speedup == 1 and plain.identical is True
    assert quick.speedup is not None and quick.speedup > 1
    assert quick.identical is False and quick.identical_requests == 5
    assert quick.different_requests is None  # of a server nobody can tell whether it was a near-tie


def test_acceptance_from_metrics() -> None:
    vllm = StreamingServer(
        metrics=lambda n: (
            f'vllm:spec_decode_num_drafts_total{{engine="0"}} {10.0 * n}\n'
            f'vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {70.0 * n}\n'
            f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {15.0 * n}\n'
        )
    )
    sglang = StreamingServer(metrics=lambda n: "# HELP x\nsglang:spec_accept_length 3.0\n")
    with vllm.run(), sglang.run():
        counted, shown = measure([BenchServer("a", vllm.url), BenchServer("b", sglang.url)], repeats=1).rows
    assert counted.acceptance_length == pytest.approx(2.5)
    assert counted.mean_verify_length == pytest.approx(8.0)
    assert shown.acceptance_length == pytest.approx(3.0)
    assert shown.mean_verify_length is None
    assert counted.draft_time_share is None and shown.draft_time_share is None


def test_ignore_eos_is_passed_on_where_asked_for() -> None:
    with StreamingServer().run() as server:
        measure([BenchServer("only", server.url)], ignore_eos=True, repeats=1)
    assert sum(body.get("ignore_eos", False) for body in server.bodies) == 6


@pytest.mark.parametrize(
    ("server", "message"),
    [
        (StreamingServer(fail_with=404), "answered 404 to /v1/chat/completions.*no such model"),
        (StreamingServer(break_off=True), "in the middle of an answer.*out of memory"),
        (StreamingServer(page="<html>Welcome</html>"), "no stream of chat completions"),
        (StreamingServer(page='data: {"choices": []}\n\ndata: [DONE]\n\n'), "no stream of chat completions"),
        (StreamingServer(page="data: [1]\n\n"), "which is no event of an answer"),
        (StreamingServer(answer=lambda text: []), "answered 3 prompts without a single token"),
        (StreamingServer(models="<html>Welcome</html>"), "answered to /models '<html>Welcome</html>', which is no"),
        (StreamingServer(models="[1]"), "no list of models"),
        (StreamingServer(models='{"data": []}'), "lists no model; name one with --model"),
    ],
)
def test_failures_are_explained(server: StreamingServer, message: str) -> None:
    with server.run(), pytest.raises(InvalidInputError, match=message):
        measure([BenchServer("only", server.url)])


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_counts_as_much_as_the_answer(name: str) -> None:
    with StreamingServer(piece_name=name, counts_tokens=False).run() as server:
        (row,) = measure([BenchServer("only", server.url)]).rows
    assert row.generated_tokens == 6 * 3


def test_nobody_there() -> None:
    with pytest.raises(InvalidInputError, match="cannot be reached"):
        measure([BenchServer("only", "http://127.0.0.1:9/v1")])


@pytest.mark.parametrize(
    ("text", "name", "url"),
    [
        ("http://localhost:8000", "server", "http://localhost:8000/v1"),
        ("http://localhost:8000/v1/", "server", "http://localhost:8000/v1"),
        ("plain=https://host/v1", "plain", "https://host/v1"),
        ("http://[::1]:8000", "server", "http://[::1]:8000/v1"),
    ],
)
def test_parse_server(text: str, name: str, url: str) -> None:
    server = parse_server(text, "m", "k")
    assert (server.name, server.url, server.model, server.api_key) == (name, url, "m", "k")


@pytest.mark.parametrize(
    "text",
    [
        "localhost:8000", "=http://host", "name=ftp://host", "http://host:99999", "http://host:0", "http://[::1",
        "http://a:1,http://b:2", "http:///v1", "http://:80",
    ],
)  # fmt: skip
def test_parse_server_refuses(text: str) -> None:
    with pytest.raises(InvalidInputError, match="`base_url`"):
        parse_server(text)


def test_names_must_differ() -> None:
    server = BenchServer("a", "http://localhost/v1")
    with pytest.raises(InvalidInputError, match="each differently"):
        measure([server, server])
