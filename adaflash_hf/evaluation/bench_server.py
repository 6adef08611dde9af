"""Measures running servers with the OpenAI interface: the same workloads, as many of the same columns as can be seen.

Tokens are counted by the server (`usage`), times are those of the chunks that arrive here. What only the inside of a
server knows stays empty, except tau, where the server publishes counters of SGLang's or vLLM's names.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ..error_text import install_hint
from ..errors import InvalidInputError, MissingDependencyError
from ..generation.statistics import GenerationStats
from ..training.prompts import Prompt
from .bench import BenchReport, BenchSettings
from .bench_results import Agreement, Latency, MethodRun, summarise
from .workloads import Workload


if TYPE_CHECKING:
    import httpx


__all__ = ["BenchServer", "ServerRun", "bench_servers", "parse_server"]

_TIMEOUT_S = 600.0
_SHOWN_ERROR = 300


@dataclass(frozen=True)
class BenchServer:
    """
    A server to measure.

    Attributes:
        name: As it appears in results.
        url: Base of the interface, up to `/v1`.
        model: Name to ask for; the first that the server lists if None.
        api_key: Sent as a bearer token.
    """

    name: str
    url: str
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)


def parse_server(text: str, model: str | None = None, api_key: str | None = None) -> BenchServer:
    """
    Reads `name=url`, or a URL alone.

    Args:
        text (`str`):
            Value of `--base-url`.
        model (`str`, *optional*):
            Name of the model.
        api_key (`str`, *optional*):
            Bearer token.
    """
    name, separator, url = text.partition("=")
    if not separator or "/" in name:
        name, url = "server", text
    url = url.rstrip("/")
    if not name or not _is_address(url):
        raise InvalidInputError(
            f"`base_url` is {text!r}, expected 'http://host:port/v1' or 'name=http://host:port/v1'; repeat the option "
            "for several."
        )
    return BenchServer(name, url if url.endswith("/v1") else f"{url}/v1", model, api_key)


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and "," not in url
    except ValueError:  # a port that is none, or half an IPv6 address
        return False


@dataclass(frozen=True)
class _Answer:
    """One request: text, tokens, and when they came."""

    text: str
    num_tokens: int
    first_token_s: float
    last_token_s: float
    begin_s: float


@dataclass(frozen=True)
class ServerRun:
    """
    One run on one server.

    Attributes:
        run: Counts and times.
        texts: The answers.
    """

    run: MethodRun
    texts: list[str]


def bench_servers(
    servers: Sequence[BenchServer],
    workloads: Sequence[Workload],
    settings: BenchSettings,
    *,
    environment: dict[str, Any],
    on_step: Callable[[str], None] = lambda message: None,
    on_cell: Callable[[BenchReport], None] = lambda report: None,
) -> BenchReport:
    """
    Measures servers in turn; speedup and identity are against the first.

    Args:
        servers (`Sequence[BenchServer]`):
            One or more, with different names.
        workloads (`Sequence[Workload]`):
            What to ask.
        settings (`BenchSettings`):
            How; its `methods` and `via_generate` have no meaning here.
        environment (`dict[str, Any]`):
            Recorded as it is.
        on_step (`Callable[[str], None]`, *optional*):
            Called before every run.
        on_cell (`Callable[[BenchReport], None]`, *optional*):
            Called with all results so far after every workload and concurrency.

    Returns:
        `BenchReport`: all results.
    """
    names = [server.name for server in servers]
    if not servers or len(set(names)) < len(names):
        raise InvalidInputError(f"`servers` are named {names}; name at least one, and each differently.")
    recorded = {name: value for name, value in asdict(settings).items() if name not in ("methods", "via_generate")}
    report = BenchReport(
        {**environment, "servers": {server.name: server.url for server in servers}},
        {**recorded, "workloads": [workload.name for workload in workloads]},
    )
    asyncio.run(_run_all(servers, workloads, settings, report, on_step, on_cell))
    return report


async def _run_all(
    servers: Sequence[BenchServer],
    workloads: Sequence[Workload],
    settings: BenchSettings,
    report: BenchReport,
    on_step: Callable[[str], None],
    on_cell: Callable[[BenchReport], None],
) -> None:
    clients = [_Client(server) for server in servers]
    try:
        for client in clients:
            await client.find_model()
        for workload in workloads:
            for concurrency in settings.concurrencies:
                prompts = workload.take(settings.requests_at(concurrency))
                where = f"{workload.name}, concurrency {concurrency}"
                runs: dict[str, list[ServerRun]] = {server.name: [] for server in servers}
                for client in clients:
                    on_step(f"{where}: warming up {client.server.name}")
                    await client.run(prompts[:concurrency], concurrency, max(settings.warm_up_tokens, 1))
                for repeat in range(settings.repeats):
                    for client in clients if repeat % 2 == 0 else reversed(clients):
                        on_step(f"{where}: {client.server.name}, {repeat + 1} of {settings.repeats}")
                        runs[client.server.name].append(
                            await client.run(prompts, concurrency, settings.max_new_tokens, settings.ignore_eos)
                        )
                _add_rows(report, workload.name, concurrency, len(prompts), runs)
                on_cell(report)
    finally:
        for client in clients:
            await client.close()


def _add_rows(
    report: BenchReport, workload: str, concurrency: int, num_requests: int, runs: dict[str, list[ServerRun]]
) -> None:
    baseline = next(iter(runs.values()))
    expected = baseline[0].texts
    for name, own in runs.items():
        identical = sum(all(run.texts[index] == expected[index] for run in own) for index in range(num_requests))
        report.rows.append(
            summarise(
                name,
                workload,
                concurrency,
                [run.run for run in own],
                num_requests,
                baseline=[run.run for run in baseline] if len(runs) > 1 else None,
                agreement=Agreement(num_requests, identical, None) if len(runs) > 1 else None,
            )
        )


class _Client:
    """One server and the connections to it."""

    def __init__(self, server: BenchServer) -> None:
        try:
            import httpx
        except ImportError as error:
            raise MissingDependencyError(
                f"`base_url` needs httpx, which is not installed. Run: {install_hint('bench')}."
            ) from error
        self.server = server
        self.model = server.model
        headers = {} if server.api_key is None else {"Authorization": f"Bearer {server.api_key}"}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(headers=headers, timeout=_TIMEOUT_S, limits=limits)
        self._error = httpx.HTTPError

    async def close(self) -> None:
        await self._http.aclose()

    async def find_model(self) -> None:
        """Asks which model there is, and thereby whether anybody listens."""
        response = await self._checked(self._http.get(f"{self.server.url}/models"))
        if self.model is None:
            try:
                models = response.json()["data"]
                self.model = models[0]["id"] if models else None
            except (ValueError, LookupError, TypeError) as error:
                raise InvalidInputError(
                    f"The server at {self.server.url} answered to /models {response.text[:_SHOWN_ERROR]!r}, which is "
                    "no list of models of the OpenAI interface. Correct --base-url, or name a model with --model."
                ) from error
        if self.model is None:
            raise InvalidInputError(f"The server at {self.server.url} lists no model; name one with --model.")

    async def _checked(self, pending: Any) -> httpx.Response:
        try:
            response: httpx.Response = await pending
        except self._error as error:
            raise InvalidInputError(
                f"The server at {self.server.url} cannot be reached ({type(error).__name__}: {error}). Start it, or "
                "correct --base-url."
            ) from error
        await self._check_status(response)
        return response

    async def _check_status(self, response: httpx.Response) -> None:
        if response.is_success:
            return
        body = (await response.aread()).decode(errors="replace")[:_SHOWN_ERROR]
        raise InvalidInputError(
            f"The server at {self.server.url} answered {response.status_code} to {response.request.url.path}: {body} "
            "Check --model and --api-key."
        )

    async def run(
        self, prompts: Sequence[Prompt], concurrency: int, max_new_tokens: int, ignore_eos: bool = False
    ) -> ServerRun:
        """Sends all prompts, never more than `concurrency` at once."""
        before = await self._acceptance_counters()
        gate = asyncio.Semaphore(concurrency)

        async def ask(prompt: Prompt) -> _Answer:
            async with gate:
                return await self._ask(prompt, max_new_tokens, ignore_eos)

        begin_s = time.perf_counter()
        answers = await asyncio.gather(*(ask(prompt) for prompt in prompts))
        seconds = time.perf_counter() - begin_s
        after = await self._acceptance_counters()
        pace = [
            (answer.last_token_s - answer.first_token_s) / (answer.num_tokens - 1)
            for answer in answers
            if answer.num_tokens > 1
        ]
        generated = sum(answer.num_tokens for answer in answers)
        if not generated:
            raise InvalidInputError(
                f"The server at {self.server.url} answered {len(answers)} prompts without a single token, so there is "
                "nothing to measure. Ask it by hand what it answers, and correct --base-url or --model."
            )
        run = MethodRun(
            token_ids=None,
            generated_tokens=generated,
            seconds=seconds,
            token_latency=Latency.of(pace),
            first_token=Latency.of([answer.first_token_s - answer.begin_s for answer in answers]),
            stats=_stats_between(before, after, generated),
        )
        return ServerRun(run, [answer.text for answer in answers])

    async def _ask(self, prompt: Prompt, max_new_tokens: int, ignore_eos: bool) -> _Answer:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": role, "content": content} for role, content in prompt.messages],
            "max_tokens": max_new_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if ignore_eos:
            body["ignore_eos"] = True
        begin_s = time.perf_counter()
        pieces: list[str] = []
        times: list[float] = []
        counted: int | None = None
        is_chat = False
        try:
            async with self._http.stream("POST", f"{self.server.url}/chat/completions", json=body) as response:
                await self._check_status(response)
                async for event in _server_sent_events(response.aiter_lines()):
                    counted = (event.get("usage") or {}).get("completion_tokens", counted)
                    choices = event.get("choices") or []
                    is_chat |= bool(choices)
                    if piece := "".join(map(_text_of, choices)):
                        pieces.append(piece)
                        times.append(time.perf_counter())
        except self._error as error:
            raise InvalidInputError(
                f"The server at {self.server.url} broke off an answer ({type(error).__name__}: {error}); its log says "
                "why."
            ) from error
        if not is_chat:
            raise InvalidInputError(
                f"The server at {self.server.url} answered a prompt, but with no stream of chat completions. Correct "
                "--base-url: it must speak the OpenAI interface, with streams."
            )
        end_s = time.perf_counter()
        first_s, last_s = (times[0], times[-1]) if times else (end_s, end_s)
        return _Answer("".join(pieces), len(times) if counted is None else counted, first_s, last_s, begin_s)

    async def _acceptance_counters(self) -> dict[str, float]:
        """Prometheus metrics that tell what was accepted, if the server has any."""
        root = self.server.url.removesuffix("/v1")
        try:
            response = await self._http.get(f"{root}/metrics")
        except self._error:
            return {}
        return _parse_metrics(response.text) if response.is_success else {}


def _text_of(choice: dict[str, Any]) -> str:
    """What a piece of an answer adds; servers that tell reasoning from the answer send it under one name or both."""
    delta = choice.get("delta") or {}
    return (delta.get("reasoning_content") or delta.get("reasoning") or "") + (delta.get("content") or "")


async def _server_sent_events(lines: AsyncIterator[str]) -> AsyncIterator[dict[str, Any]]:
    """JSON objects of a stream; comments, blank lines and the end marker are left out."""
    async for line in lines:
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError as error:
            raise InvalidInputError(f"The server sent {data[:_SHOWN_ERROR]!r}, which is not JSON.") from error
        if not isinstance(event, dict):
            raise InvalidInputError(f"The server sent {data[:_SHOWN_ERROR]!r}, which is no event of an answer.")
        if "error" in event:
            raise InvalidInputError(f"The server failed in the middle of an answer: {event['error']}")
        yield event


_ACCEPTED, _ROUNDS = "vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_drafts_total"
_DRAFTED, _SGLANG_LENGTH = "vllm:spec_decode_num_draft_tokens_total", "sglang:spec_accept_length"


def _parse_metrics(text: str) -> dict[str, float]:
    """Values of the metrics we know, summed over their labels."""
    values: dict[str, float] = {}
    for name, value in re.findall(r"^([a-zA-Z_:]+)(?:\{[^}]*\})? ([0-9.eE+-]+)", text, flags=re.MULTILINE):
        if name in (_ACCEPTED, _ROUNDS, _DRAFTED, _SGLANG_LENGTH):
            values[name] = values.get(name, 0.0) + float(value)
    return values


def _stats_between(before: dict[str, float], after: dict[str, float], generated_tokens: int) -> GenerationStats | None:
    """vLLM counts; SGLang shows its latest mean, which stands for the run."""
    if _ROUNDS in after:
        rounds, accepted, drafted = (
            int(after.get(name, 0) - before.get(name, 0)) for name in (_ROUNDS, _ACCEPTED, _DRAFTED)
        )
        if rounds > 0:
            return GenerationStats(
                rounds=rounds,
                accepted_tokens=accepted,
                drafted_tokens=drafted,
                committed_tokens=rounds + accepted,
            )
    if after.get(_SGLANG_LENGTH, 0) >= 1:
        rounds = round(generated_tokens / after[_SGLANG_LENGTH])
        return GenerationStats(
            rounds=rounds, accepted_tokens=generated_tokens - rounds, committed_tokens=generated_tokens
        )
    return None
