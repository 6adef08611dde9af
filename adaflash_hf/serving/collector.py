"""A proxy in front of a running server with the OpenAI interface, which turns its traffic into trajectories.

    client -> adaflash serve collect -> SGLang, vLLM or another server
                        |
                  replay buffer -> adaflash online

Requests and answers go through as they are, streamed ones as they come. Chat and completions are listened to; SGLang
and vLLM are asked for token ids on the way, which are taken out again. What goes wrong with recording never reaches a
client, and a client that leaves is left by the upstream request too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Coroutine
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..error_text import install_hint
from ..errors import InvalidInputError, MissingDependencyError
from ..online.recorder import TrajectoryRecorder
from .answer_listener import AnswerListener, as_event, events_of, json_object
from .collector_metrics import prometheus_text
from .observed_response import ObservedResponse
from .response_tokens import ResponseTokens
from .served_versions import version_of_label
from .upstream_dialects import DIALECTS, Dialect


if TYPE_CHECKING:
    import httpx
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response


__all__ = ["DOMAIN_HEADER", "RECORD_HEADER", "Collector", "CollectorSettings", "serve_collector"]

logger = logging.getLogger(__name__)

DOMAIN_HEADER = "x-adaflash-domain"
RECORD_HEADER = "x-adaflash-record"
OWN_PATH = "/adaflash"
_RECORDED_ROUTES = ("chat/completions", "completions")
# Belong to one connection, or are set anew for the next one.
_PER_CONNECTION = frozenset(
    "connection content-length host keep-alive proxy-authenticate proxy-authorization te trailer transfer-encoding "
    "upgrade".split()
)
_GRACE_S = 60
_OWN_HEADERS = frozenset((DOMAIN_HEADER, RECORD_HEADER))


@dataclass(frozen=True)
class CollectorSettings:
    """
    Settings of [`Collector`].

    Attributes:
        upstream: Address of the server, with or without `/v1`.
        dialect: `"sglang"`, `"vllm"`, `"other"`, or None to ask the server.
        api_key: For the collector's own questions to the server; clients send theirs.
        connect_timeout_s: Give a server that does not answer up after this long. Answers may take any time.
        version_poll_s: Seconds between two looks at which drafter version serves.
    """

    upstream: str
    dialect: str | None = None
    api_key: str | None = None
    connect_timeout_s: float = 10.0
    version_poll_s: float = 1.0

    def __post_init__(self) -> None:
        if not self.upstream.startswith(("http://", "https://")):
            raise InvalidInputError(f"`upstream` is {self.upstream!r}, expected an address as 'http://host:30000'.")
        if self.dialect is not None and self.dialect not in DIALECTS:
            raise InvalidInputError(f"`dialect` is {self.dialect!r}; choose one of {', '.join(sorted(DIALECTS))}.")

    @property
    def root(self) -> str:
        """Address without `/v1`."""
        return self.upstream.rstrip("/").removesuffix("/v1")


class Collector:
    """
    The proxy.

    Args:
        settings (`CollectorSettings`): Where the server is, and how to ask it.
        recorder (`TrajectoryRecorder`): Where trajectories go.
        tokens (`ResponseTokens`): Makes token ids of what went by.
    """

    def __init__(self, settings: CollectorSettings, recorder: TrajectoryRecorder, tokens: ResponseTokens) -> None:
        self.settings, self.recorder, self.tokens = settings, recorder, tokens
        self._http_module = _import_httpx()
        self._http: httpx.AsyncClient | None = None
        self._dialect: Dialect | None = None if settings.dialect is None else DIALECTS[settings.dialect]

    @property
    def status(self) -> dict[str, Any]:
        """What has been done so far, for JSON."""
        return {
            "upstream": self.settings.root,
            "dialect": None if self._dialect is None else self._dialect.name,
            "drafter_version": self.tokens.history.current,
            "answers": self.tokens.counts,
            "recorder": asdict(self.recorder.counts),
        }

    def application(self) -> Starlette:
        """The ASGI application."""
        try:
            from starlette.applications import Starlette
            from starlette.responses import JSONResponse, PlainTextResponse
            from starlette.routing import Route
        except ImportError as error:
            raise _missing("starlette") from error

        async def status(request: Request) -> Response:
            return JSONResponse(self.status)

        async def metrics(request: Request) -> Response:
            return PlainTextResponse(prometheus_text(self.status), media_type="text/plain; version=0.0.4")

        methods = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
        routes = [
            Route(f"{OWN_PATH}/status", status),
            Route(f"{OWN_PATH}/metrics", metrics),
            Route("/{path:path}", self._pass, methods=methods),
        ]
        return Starlette(routes=routes, lifespan=self._lifespan)

    @contextlib.asynccontextmanager
    async def _lifespan(self, application: Starlette) -> AsyncIterator[None]:
        httpx = self._http_module
        # Answers may take any time, and as many may run at once as the server takes.
        timeout = httpx.Timeout(None, connect=self.settings.connect_timeout_s)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        async with httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False) as self._http:
            watch = asyncio.create_task(self._watch_version())
            try:
                yield
            finally:
                watch.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await watch

    # What is asked of the server for ourselves

    async def _watch_version(self) -> None:
        while True:
            info = await self._ask("/model_info", self._own_key)
            version = version_of_label((info or {}).get("weight_version"))
            if version is not None:
                self.tokens.history.saw(version)
            await asyncio.sleep(self.settings.version_poll_s)

    @property
    def _own_key(self) -> str | None:
        return None if self.settings.api_key is None else f"Bearer {self.settings.api_key}"

    async def _found_dialect(self, authorization: str | None) -> Dialect:
        """Asks once which server it is; one that cannot be reached is asked again by the next request."""
        if self._dialect is None:
            authorization = self._own_key or authorization
            if "weight_version" in (await self._ask("/model_info", authorization) or {}):
                self._dialect = DIALECTS["sglang"]
            elif (models := await self._ask("/v1/models", authorization)) is not None:
                self._dialect = DIALECTS["vllm" if _is_vllm(models) else "other"]
            else:
                return DIALECTS["other"]
            logger.info("The server at %s is of the kind %s.", self.settings.root, self._dialect.name)
        return self._dialect

    async def _ask(self, path: str, authorization: str | None) -> dict[str, Any] | None:
        assert self._http is not None
        headers = {} if authorization is None else {"Authorization": authorization}
        try:
            response = await self._http.get(f"{self.settings.root}{path}", headers=headers, timeout=5.0)
        except self._http_module.HTTPError:
            return None
        return json_object(response.content) if response.is_success else None

    # What clients ask

    async def _pass(self, request: Request) -> Response:
        from starlette.requests import ClientDisconnect
        from starlette.responses import Response

        try:
            body = await request.body()
        except ClientDisconnect:  # in the middle of its question: nobody is there to be answered
            return Response(status_code=400)
        route = request.url.path.removeprefix("/v1/")
        if request.method == "POST" and request.url.path.startswith("/v1/") and route in _RECORDED_ROUTES:
            fields = json_object(body)
            if fields is not None and request.headers.get(RECORD_HEADER, "").lower() not in ("no", "false", "0"):
                return await self._pass_recorded(request, route, fields)
        return await self._forward(request, body)

    async def _pass_recorded(self, request: Request, route: str, fields: dict[str, Any]) -> Response:
        added = (await self._found_dialect(request.headers.get("authorization"))).added_to(route, fields)
        body = json.dumps(fields | dict.fromkeys(added, True)).encode() if added else await request.body()
        observed = ObservedResponse(route, fields, request.headers.get(DOMAIN_HEADER))
        return await self._forward(request, body, AnswerListener(self.recorder, self.tokens, observed, added))

    async def _forward(self, request: Request, body: bytes, listener: AnswerListener | None = None) -> Response:
        from starlette.responses import Response, StreamingResponse

        assert self._http is not None
        # Not the client's own `build_request`, which would add headers that nobody sent.
        outgoing = self._http_module.Request(
            request.method,
            self._http_module.URL(self.settings.root).copy_with(raw_path=_raw_path(request)),
            headers=_passed_on(request.headers.raw, is_readable=listener is not None),
            content=body,
        )
        try:
            answer = await _while_connected(request, self._http.send(outgoing, stream=True))
        except self._http_module.HTTPError as error:
            return self._unreachable(error)
        if answer is None:
            return self._left(listener)
        if answer.is_error:
            listener = None
        headers = _passed_on(answer.headers.raw)
        if listener is None:
            headers += [(name, value) for name, value in answer.headers.raw if name.lower() == b"content-length"]
        else:  # what is read is unpacked, also where the server compresses unasked
            headers = [(name, value) for name, value in headers if name != b"content-encoding"]
        if listener is None or answer.headers.get("content-type", "").startswith("text/event-stream"):
            response: Response = StreamingResponse(self._streamed(answer, listener), answer.status_code)
        else:
            try:
                read = await _while_connected(request, _read_whole(answer))
            except self._http_module.HTTPError as error:
                self.tokens.count("broken_off")
                return self._unreachable(error)
            if read is None:
                return self._left(listener)
            content = listener.whole(read)
            response = Response(content, answer.status_code)
            headers.append((b"content-length", str(len(content)).encode()))
        response.raw_headers = headers
        return response

    async def _streamed(self, answer: httpx.Response, listener: AnswerListener | None) -> AsyncIterator[bytes]:
        import anyio

        try:
            if listener is None:
                async for piece in answer.aiter_raw():
                    yield piece
                return
            async for event in events_of(answer.aiter_bytes()):
                if (passed := listener.event(event)) is not None:
                    yield passed
        except self._http_module.HTTPError as error:
            logger.warning("The server at %s broke off an answer: %s", self.settings.root, error)
            if listener is None:
                raise  # so that the client sees that it is not whole
            yield as_event({"error": {"message": f"the server broke off: {error}", "type": "upstream_error"}})
        finally:
            if listener is not None:
                listener.ended()
            # The server is to learn that nobody reads any more, even though this task is being cancelled for that.
            with anyio.CancelScope(shield=True):
                await answer.aclose()

    def _left(self, listener: AnswerListener | None) -> Response:
        from starlette.responses import Response

        if listener is not None:
            self.tokens.count("client_left")
        return Response(status_code=499)  # nobody is there to read it

    def _unreachable(self, error: Exception) -> Response:
        from starlette.responses import JSONResponse

        message = (
            f"The server at {self.settings.root} cannot be reached, or broke off: {type(error).__name__}: {error}"
        )
        return JSONResponse({"error": {"message": message, "type": "upstream_error", "code": 502}}, 502)


def serve_collector(collector: Collector, host: str, port: int, *, verbose: bool = False) -> None:
    """
    Listen until the process is asked to end; answers that are under way are finished first.

    Args:
        collector (`Collector`): The proxy.
        host (`str`): Address to listen on.
        port (`int`): Port to listen on.
        verbose (`bool`, *optional*, defaults to `False`): Whether to log each request.
    """
    try:
        import uvicorn
    except ImportError as error:
        raise _missing("uvicorn") from error
    uvicorn.run(
        collector.application(),
        host=host,
        port=port,
        access_log=verbose,
        log_config=None,
        server_header=False,
        date_header=False,
        timeout_graceful_shutdown=_GRACE_S,
    )


async def _while_connected(request: Request, work: Coroutine[Any, Any, Any]) -> Any:
    """What comes of the work; None if the client leaves first, and the work is then given up."""

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(left())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        for task in (working, leaving):
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task


async def _read_whole(answer: httpx.Response) -> bytes:
    try:
        return await answer.aread()
    finally:
        await answer.aclose()


def _is_vllm(models: dict[str, Any]) -> bool:
    listed = models.get("data")
    return isinstance(listed, list) and any(
        isinstance(model, dict) and model.get("owned_by") == "vllm" for model in listed
    )


def _raw_path(request: Request) -> bytes:
    query: bytes = request.scope.get("query_string", b"")
    path: bytes = request.scope.get("raw_path") or request.url.path.encode()
    return path + (b"?" + query if query else b"")


def _passed_on(headers: list[tuple[bytes, bytes]], *, is_readable: bool = False) -> list[tuple[bytes, bytes]]:
    """Headers for the other side; `is_readable` keeps the server from compressing what we have to read."""
    left_out = _PER_CONNECTION | _OWN_HEADERS | ({"accept-encoding"} if is_readable else set())
    kept = [(name.lower(), value) for name, value in headers if name.lower().decode("latin-1") not in left_out]
    return [*kept, (b"accept-encoding", b"identity")] if is_readable else kept


def _import_httpx() -> Any:
    try:
        import httpx
    except ImportError as error:
        raise _missing("httpx") from error
    return httpx


def _missing(name: str) -> MissingDependencyError:
    return MissingDependencyError(
        f"`adaflash serve` needs {name}, which is not installed. Run: {install_hint('serve')}."
    )
