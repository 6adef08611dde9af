"""`adaflash online`: a drafter that learns from the traffic it serves, and is swapped while it serves."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import InvalidInputError
from ..stop_signals import call_on_signals
from . import online_options as options
from .help_pages import SectionedCommand
from .options import (
    DeviceOption,
    DrafterOption,
    Dtype,
    DtypeOption,
    LengthPolicy,
    LengthPolicyOption,
    PrepackOption,
    PrivateOption,
    TargetOption,
)


if TYPE_CHECKING:
    from rich.console import Console

    from ..online.run_settings import InferenceSettings, SideSettings, TrainerSettings
    from ..training.prompts import Prompt


__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Adapt a drafter to live traffic, and swap it while it serves.")

_LINE_INTERVAL_S = 30.0
_STOPPING = (signal.SIGTERM, signal.SIGINT)


@app.command(cls=SectionedCommand)
def run(
    buffer: options.BufferOption,
    publish_dir: options.PublishDirOption,
    target: TargetOption = "smollm2-135m",
    drafter: DrafterOption = None,
    attach: options.AttachOption = False,
    prompts: options.PromptsOption = None,
    domain: options.DomainOption = None,
    once: options.OnceOption = False,
    concurrency: options.ConcurrencyOption = 8,
    max_new_tokens: options.MaxNewTokensOption = 256,
    max_prompt_tokens: options.MaxPromptTokensOption = 1024,
    temperature: options.TemperatureOption = 0.0,
    length_policy: LengthPolicyOption = None,
    round_size: options.RoundSizeOption = 128,
    epochs: options.EpochsOption = 2,
    max_tokens: options.MaxTokensOption = 2048,
    anchors: options.AnchorsOption = 512,
    learning_rate: options.LearningRateOption = 3e-4,
    length_head_learning_rate: options.LengthHeadLearningRateOption = 2e-4,
    learning_rate_backoff: options.LearningRateBackoffOption = 0.5,
    objective: options.ObjectiveOption = "mixture",
    lora_rank: options.LoraRankOption = None,
    balanced: options.BalancedOption = False,
    held_out: options.HeldOutOption = 64,
    min_held_out: options.MinHeldOutOption = 8,
    tolerance: options.ToleranceOption = 0.0,
    max_rounds: options.MaxRoundsOption = None,
    keep_versions: options.KeepVersionsOption = 5,
    buffer_rows: options.BufferRowsOption = 20_000,
    held_out_share: options.HeldOutShareOption = 0.125,
    seed: options.SeedOption = 0,
    dtype: DtypeOption = Dtype.AUTO,
    device: DeviceOption = None,
    trainer_device: options.TrainerDeviceOption = None,
    inference_threads: options.InferenceThreadsOption = None,
    trainer_threads: options.TrainerThreadsOption = None,
    prepack: PrepackOption = True,
    metrics_port: options.MetricsPortOption = None,
    metrics_host: options.MetricsHostOption = "127.0.0.1",
) -> None:
    """Serve prompts and train on them, in two processes; Ctrl-C or SIGTERM ends it, repeating it goes on."""
    from ..online.online_arguments import OnlineTrainingArguments
    from ..online.replay_buffer import BufferSettings
    from ..online.run_settings import InferenceSettings, SideSettings, TrainerSettings
    from ..online.supervisor import check_goes_on, check_places
    from .loading import check_checkpoint, check_target, find_drafter

    # All that can be wrong is found before a process is started.
    arguments = OnlineTrainingArguments(
        round_size=round_size,
        epochs=epochs,
        max_tokens=max_tokens,
        anchors_per_trajectory=anchors,
        learning_rate=learning_rate,
        length_head_learning_rate=length_head_learning_rate,
        learning_rate_backoff=learning_rate_backoff,
        objective=objective,
        lora_rank=lora_rank,
        balanced=balanced,
        held_out=held_out,
        min_held_out=min_held_out,
        tolerance=tolerance,
        seed=seed,
    )
    served = _read_prompts(prompts, domain, attach)
    given_drafter, drafter = drafter, find_drafter(target, drafter)
    check_target(target)
    config = check_checkpoint(drafter, length_policy=length_policy, target=target)
    buffer_settings = BufferSettings(buffer_rows, held_out_share=held_out_share, target=target)
    if not buffer.exists():  # else it stays as it is
        arguments.check_buffer(buffer_settings)
    half = max((os.cpu_count() or 2) // 2, 1)

    def side(on: str | None, threads: int | None) -> SideSettings:
        return SideSettings(
            target=target,
            drafter=drafter,
            buffer=buffer.absolute(),
            publish_dir=publish_dir.absolute(),
            dtype=dtype.value,
            device=on,
            threads=threads or (half if _is_cpu(on) else None),
            buffer_settings=buffer_settings,
        )

    trainer = TrainerSettings(side(trainer_device or device, trainer_threads), arguments, max_rounds, keep_versions)
    inference = None
    if served:
        inference = InferenceSettings(
            side(device, inference_threads),
            served,
            is_once=once,
            concurrency=concurrency,
            max_new_tokens=max_new_tokens,
            max_prompt_tokens=max_prompt_tokens,
            temperature=temperature,
            seed=seed,
            length_policy=(length_policy or LengthPolicy.FIXED).value,
            prepack=prepack,
            run_id=uuid.uuid4().hex,
        )
    check_places(trainer.side.buffer, trainer.side.publish_dir)
    version = check_goes_on(trainer.side.buffer, None if attach else buffer_settings, trainer.side.publish_dir, config)
    if version is not None and given_drafter is not None:
        typer.echo(
            f"Going on from version {version} in {publish_dir}: `--drafter` is only what a new directory begins with.",
            err=True,
        )
    _run(trainer, inference, metrics_port, metrics_host)


def _is_cpu(device: str | None) -> bool:
    if device is not None:
        return device == "cpu"
    import torch

    return not torch.cuda.is_available()


def _read_prompts(files: list[Path] | None, domain: str | None, attach: bool) -> tuple[Prompt, ...]:
    from ..training.prompts import read_prompt_file
    from .trajectories import interleave

    if attach and files:
        raise InvalidInputError("`--attach` and `--prompts` exclude each other: attached, another process serves.")
    if not attach and not files:
        raise InvalidInputError("`--prompts` was not given; give a file of prompts to serve, or --attach.")
    return tuple(interleave([read_prompt_file(path, domain) for path in files or []]))


def _run(
    trainer: TrainerSettings, inference: InferenceSettings | None, metrics_port: int | None, metrics_host: str
) -> None:
    from rich.console import Console

    from ..online.metrics_exporter import MetricsExporter
    from ..online.supervisor import Supervisor

    console = Console()
    supervisor = Supervisor(trainer, inference)
    exporter = None
    if metrics_port is not None:
        exporter = MetricsExporter(lambda: supervisor.snapshot, metrics_port, metrics_host)
        console.print(f"Metrics at http://{metrics_host}:{exporter.port}/metrics", highlight=False)
    undo = call_on_signals(_STOPPING, supervisor.stopping.set)
    try:
        with _Page(console) as page:
            supervisor.run(page.show)
    finally:
        undo()
        if exporter is not None:
            exporter.stop()
    console.print(
        f"Ended; repeat the command to go on. Status: {supervisor.status_path}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


class _Page:
    """The status page on a terminal; elsewhere a line now and then, and whenever something has changed."""

    def __init__(self, console: Console) -> None:
        from rich.live import Live

        self._console = console
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._shown_s = float("-inf")
        self._shown: tuple[Any, ...] = ()

    def __enter__(self) -> _Page:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, snapshot: Mapping[str, Any]) -> None:
        from ..online.run_display import build_page, describe_in_a_line

        if self._live is not None:
            self._live.update(build_page(snapshot), refresh=True)
            return
        server, trainer = snapshot["server"], snapshot["trainer"]
        state = (
            snapshot["versions"].get("served"),
            server.get("version"),
            server.get("phase"),
            trainer.get("phase"),
            tuple(snapshot["errors"]),
        )
        if state != self._shown or time.monotonic() - self._shown_s > _LINE_INTERVAL_S:
            self._shown, self._shown_s = state, time.monotonic()
            self._console.print(describe_in_a_line(snapshot), highlight=False, markup=False, soft_wrap=True)
            for message in snapshot["errors"]:
                self._console.print(message, highlight=False, markup=False, soft_wrap=True)


@app.command(cls=SectionedCommand)
def status(
    publish_dir: options.ExistingPublishDirOption,
    buffer: options.OptionalBufferOption = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again and again, until Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    prometheus: Annotated[bool, typer.Option("--prometheus", help="Print Prometheus metrics, once.")] = False,
) -> None:
    """Show what an adaptation is doing: acceptance by domain, buffer, rounds, versions and reloads."""
    from rich.console import Console

    from ..online.run_display import build_page
    from ..online.run_snapshot import RunSnapshots

    snapshots = RunSnapshots(publish_dir, buffer)
    snapshots.check()
    if as_json:
        typer.echo(json.dumps(snapshots.take(), indent=2))
    elif prometheus:
        from ..online.metrics_exporter import metrics_text

        typer.echo(metrics_text(snapshots.take()), nl=False)
    elif watch:
        stopping = threading.Event()
        undo = call_on_signals(_STOPPING, stopping.set)
        try:
            with _Page(Console()) as page:
                while not stopping.is_set():
                    page.show(snapshots.take())
                    stopping.wait(1.0)
        finally:
            undo()
    else:
        Console().print(build_page(snapshots.take()))


@app.command(cls=SectionedCommand)
def rollback(
    publish_dir: options.ExistingPublishDirOption,
    to: Annotated[int | None, typer.Option("--to", min=0, help="Version; default: the one before.")] = None,
) -> None:
    """Serve an earlier version again; the serving process swaps it in by itself, the trainer goes on from there."""
    version = _on_existing(publish_dir, lambda publisher: publisher.rollback(to))
    typer.echo(f"Version {version.version} is served now; it is in {version.path}.")


@app.command(cls=SectionedCommand)
def prune(
    publish_dir: options.ExistingPublishDirOption,
    keep: Annotated[int, typer.Option("--keep", min=1, help="Newest versions that stay.")] = 5,
) -> None:
    """Remove old versions; never the one in use, the one before it, or version 0."""
    removed = _on_existing(publish_dir, lambda publisher: publisher.prune(keep))
    typer.echo(f"Removed: {', '.join(map(str, removed)) or 'nothing'}.")


@app.command(cls=SectionedCommand)
def push(
    repo_id: Annotated[str, typer.Argument(metavar="REPO", help="Repository on the Hub, as org/name.")],
    publish_dir: options.ExistingPublishDirOption,
    version: Annotated[int | None, typer.Option("--version", min=0, help="Default: the one that is served.")] = None,
    private: PrivateOption = False,
    license_name: Annotated[str | None, typer.Option("--license", help="Default: the target's.")] = None,
) -> None:
    """Push a published version to the Hub, with a card of what it was adapted on and what that gained."""
    from ..online.version_upload import push_version

    url = push_version(_existing(publish_dir), repo_id, version=version, private=private, license=license_name)
    typer.echo(f"Pushed to {url}")


def _existing(publish_dir: Path) -> Path:
    """Not made by a slip of the keyboard."""
    if not publish_dir.is_dir():
        raise InvalidInputError(f"`--publish-dir` is {str(publish_dir)!r}, which is not there.")
    return publish_dir


def _on_existing(publish_dir: Path, action: Callable[[Any], Any]) -> Any:
    from ..online.publisher import Publisher

    return action(Publisher(_existing(publish_dir)))
