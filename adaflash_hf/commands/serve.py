"""`adaflash serve`: SGLang with an exported drafter, drafters of running servers kept new, and their traffic kept."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from ..errors import InvalidInputError, MissingDependencyError
from ..stop_signals import call_on_signals
from .help_pages import SectionedCommand


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


__all__ = ["app", "collect", "reload", "sglang"]

app = typer.Typer(
    no_args_is_help=True, help="Serve an export with SGLang, keep its drafter new, and learn from its traffic."
)

ApiKeyOption = Annotated[
    str | None,
    typer.Option("--api-key", envvar="ADAFLASH_API_KEY", show_envvar=True, help="Key of the server's --api-key."),
]


@app.command(cls=SectionedCommand, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def sglang(
    context: typer.Context,
    export: Annotated[str, typer.Argument(help="Directory of an export for SGLang or for the plugin.")],
    target: Annotated[
        str | None,
        typer.Option("--target", help="Directory or Hub id of the target; default: the drafter says."),
    ] = None,
    python: Annotated[
        str,
        typer.Option("--python", help="Python that SGLang is installed for.", show_default="this one"),
    ] = sys.executable,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port to listen on.")] = 30000,
    attention_backend: Annotated[
        str | None, typer.Option("--attention-backend", help="Of the target, as fa3; default: SGLang's choice.")
    ] = None,
    max_running_requests: Annotated[
        int | None, typer.Option("--max-running-requests", min=1, help="Requests at a time; SGLang's default is 48.")
    ] = None,
    mem_fraction_static: Annotated[
        float | None,
        typer.Option("--mem-fraction-static", min=0.01, max=0.99, help="Share of the memory for weights and cache."),
    ] = None,
    tp_size: Annotated[int, typer.Option("--tp-size", min=1, help="GPUs that share the target.")] = 1,
    metrics: Annotated[bool, typer.Option("--metrics/--no-metrics", help="Prometheus metrics at /metrics.")] = True,
    verify_mode: Annotated[
        str | None,
        typer.Option(
            "--verify-mode",
            help="Plugin: compact saves rows, cap-accept only counts, static leaves the length head out; default: "
            "SGLang's, which is static.",
        ),
    ] = None,
    length_scale: Annotated[
        float | None,
        typer.Option("--length-scale", help="Plugin: scale of the length head, the paper's gamma; default: 1.3."),
    ] = None,
    min_verify_length: Annotated[
        int | None,
        typer.Option("--min-verify-length", min=1, help="Plugin: least rows, the anchor included; default: 2."),
    ] = None,
    activation_concurrency: Annotated[
        int | None,
        typer.Option("--activation-concurrency", min=1, help="Plugin: least requests for the head; default: 16."),
    ] = None,
    start_timeout: Annotated[
        float, typer.Option("--start-timeout", min=1.0, help="Seconds until it must answer.")
    ] = 1800.0,
    print_only: Annotated[bool, typer.Option("--print", help="Show the command and stop.")] = False,
) -> None:
    """Serve EXPORT with SGLang. What this command does not know is passed on to SGLang, best after `--`."""
    from ..serving.formats import ReadOptions
    from ..serving.inspection import inspect_drafter
    from ..serving.server_process import run_server
    from ..serving.sglang_launch import SGLangOptions, assumed_sglang, find_sglang, plan_launch
    from .checkpoint_options import open_target

    options = SGLangOptions(
        host=host,
        port=port,
        attention_backend=attention_backend,
        max_running_requests=max_running_requests,
        mem_fraction_static=mem_fraction_static,
        tp_size=tp_size,
        enable_metrics=metrics,
        verify_mode=verify_mode,
        length_scale=length_scale,
        min_verify_length=min_verify_length,
        activation_concurrency=activation_concurrency,
        extra=tuple(context.args),
    )
    try:
        installation = find_sglang(python)
    except (InvalidInputError, MissingDependencyError) as error:
        if not print_only:
            raise
        installation = assumed_sglang(python)
        typer.echo(f"note: the command was not checked against an installation: {error}", err=True)
    files = open_target(target)
    inspection = inspect_drafter(export, ReadOptions(target=files))
    command = plan_launch(inspection, None if files is None else files.path, installation, options)
    if print_only:
        typer.echo(str(command))
        for note in command.notes:
            typer.echo(f"note: {note}", err=True)
        return
    for note in command.notes:
        typer.echo(f"adaflash: {note}", err=True)
    typer.echo(f"adaflash: {command}", err=True)
    address = options.address
    code = run_server(
        command,
        f"{address}/health",
        start_timeout_s=start_timeout,
        on_healthy=lambda: typer.echo(f"adaflash: ready at {address}", err=True),
    )
    raise typer.Exit(code)


@app.command(cls=SectionedCommand)
def reload(
    publish_dir: Annotated[Path, typer.Option("--publish-dir", help="Directory that `adaflash online` publishes to.")],
    replica: Annotated[
        list[str], typer.Option("--replica", help="Address of a server; once for each, never that of a router.")
    ],
    base: Annotated[
        Path | None, typer.Option("--base", help="Drafter the servers were started with; default: what they name.")
    ] = None,
    buffer: Annotated[
        Path | None, typer.Option("--buffer", help="Replay buffer whose held-out prompts new versions are tried on.")
    ] = None,
    probe_prompts: Annotated[
        int, typer.Option("--probe-prompts", min=0, help="Prompts that a version is tried on; 0 tries none.")
    ] = 8,
    min_relative_acceptance: Annotated[
        float,
        typer.Option(
            "--min-relative-acceptance",
            min=0.0,
            max=1.0,
            help="Share of the accepted drafts of the version before that a new one must reach.",
        ),
    ] = 0.5,
    poll: Annotated[float, typer.Option("--poll", min=0.1, help="Seconds between two looks.")] = 2.0,
    api_key: ApiKeyOption = None,
    admin_api_key: Annotated[
        str | None,
        typer.Option(
            "--admin-api-key", envvar="ADAFLASH_ADMIN_API_KEY", show_envvar=True, help="Key of its --admin-api-key."
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Update what is behind, and stop; 1 if it fails.")] = False,
) -> None:
    """Give running SGLang servers each new version of their drafter, checked, and the one before if it is bad."""
    from ..serving.acceptance_probe import ServerProbe
    from ..serving.reload_client import ReloadClient, ReloadClientSettings
    from ..serving.replica import ReplicaAddress

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    client = ReloadClient(
        publish_dir,
        [ReplicaAddress(url, api_key, admin_api_key) for url in replica],
        ReloadClientSettings(poll_s=poll, min_relative_acceptance=min_relative_acceptance, base=base),
        ServerProbe(buffer, num_prompts=probe_prompts),
    )
    try:
        if once:
            done = client.run_once()
            for one in client.status["replicas"]:
                typer.echo(f"{one['url']}: version {one['version']}{': ' if one['error'] else ''}{one['error']}")
            raise typer.Exit(0 if done else 1)
        call_on_signals([signal.SIGINT, signal.SIGTERM], client.stop)
        client.run()
    finally:
        client.close()


@app.command(cls=SectionedCommand)
def collect(
    buffer: Annotated[Path, typer.Option("--buffer", help="File of the replay buffer; made if it is not there.")],
    upstream: Annotated[str, typer.Option("--upstream", help="Address of the server, as http://host:30000.")],
    target: Annotated[
        str | None,
        typer.Option("--target", help="Directory or Hub id of the target, whose tokenizer reads text without ids."),
    ] = None,
    dialect: Annotated[
        str | None, typer.Option("--dialect", help="sglang, vllm or other; default: the server is asked.")
    ] = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port to listen on.")] = 30080,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=3, help="Longer trajectories are cut.")] = 2048,
    buffer_rows: Annotated[
        int | None,
        typer.Option(
            "--buffer-rows",
            min=2,
            help="Most trajectories the buffer keeps.",
            show_default="as it has; 20000 in a new one",
        ),
    ] = None,
    max_rows: Annotated[int | None, typer.Option("--max-rows", min=2, hidden=True)] = None,
    api_key: ApiKeyOption = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Log each request.")] = False,
) -> None:
    """Pass the traffic of a server with the OpenAI interface on, and keep it for `adaflash online` to learn from."""
    from ..online.recorder import TrajectoryRecorder
    from ..online.replay_buffer import BufferSettings
    from ..serving.collector import Collector, CollectorSettings, serve_collector
    from ..serving.response_tokens import ResponseTokens

    if buffer_rows is not None and max_rows is not None:
        raise InvalidInputError("`--max-rows` is an earlier name of `--buffer-rows`; pass one of them.")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    settings = CollectorSettings(upstream, dialect, api_key)
    tokenizer = None if target is None else _tokenizer_of(target)
    tokens = ResponseTokens(tokenizer, vocab_size=None if tokenizer is None else len(tokenizer))
    rows = max_rows if buffer_rows is None else buffer_rows
    limits = None if rows is None else BufferSettings(max_rows=rows)
    with TrajectoryRecorder(buffer, limits, max_tokens=max_tokens) as recorder, _sigterm_ends_orderly():
        collector = Collector(settings, recorder, tokens)
        typer.echo(f"adaflash: http://{host}:{port}/v1 passes on to {settings.root} and keeps in {buffer}", err=True)
        serve_collector(collector, host, port, verbose=verbose)


@contextmanager
def _sigterm_ends_orderly() -> Iterator[None]:
    """
    uvicorn raises a signal anew once it has shut down; SIGTERM would then end the process before the recorder has
    written what is left.
    """

    def leave(number: int, frame: object) -> NoReturn:
        raise SystemExit(0)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _tokenizer_of(target: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    from ..embedded_target import EMBEDDED_TARGET_NAME, embedded_target_directory
    from ..error_text import first_line
    from ..hub_connection import hub_or_cache

    place = embedded_target_directory() if target == EMBEDDED_TARGET_NAME else target
    try:
        with hub_or_cache(place):
            return AutoTokenizer.from_pretrained(place)
    except (OSError, ValueError) as error:
        raise InvalidInputError(
            f"`--target` is {target!r}, whose tokenizer cannot be loaded ({first_line(error)}). Pass the Hub id or "
            "directory of the server's model, or leave it out."
        ) from error
