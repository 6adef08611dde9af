"""The status page of `adaflash online` for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ..training.estimates import format_duration


__all__ = ["build_page", "describe_in_a_line"]

_SHOWN_ROUNDS = 8
_NONE = "-"


def build_page(snapshot: Mapping[str, Any]) -> RenderableType:
    """
    The whole page.

    Args:
        snapshot (`Mapping[str, Any]`):
            From [`RunSnapshots.take`].
    """
    parts: list[RenderableType] = [Panel(_overview(snapshot), title="AdaFlash online")]
    if snapshot["acceptance_history"].get("domains"):
        parts.append(_acceptance_table(snapshot))
    if snapshot["trainer"].get("history"):
        parts.append(_rounds_table(snapshot["trainer"]["history"][-_SHOWN_ROUNDS:]))
    parts += [Text(message, style="red") for message in snapshot["errors"]]
    return Group(*parts)


def describe_in_a_line(snapshot: Mapping[str, Any]) -> str:
    """
    The same for a log.

    Args:
        snapshot (`Mapping[str, Any]`):
            From [`RunSnapshots.take`].
    """
    buffer, server = snapshot["buffer"], snapshot["server"]
    taus = "  ".join(f"{domain} {tau:.2f}" for domain, tau in newest_acceptance(snapshot).items())
    served = server.get("version", snapshot["versions"].get("served"))
    return (
        f"version {_NONE if served is None else served}  waiting {buffer.get('waiting', 0)} of "
        f"{buffer.get('rows', 0)}  trainer: {_trainer_line(snapshot['trainer'])}  server: {_server_line(server)}  "
        f"tau {taus or _NONE}"
    )


def newest_acceptance(snapshot: Mapping[str, Any]) -> dict[str, float]:
    """
    Acceptance length of each domain in its newest piece of time.

    Args:
        snapshot (`Mapping[str, Any]`):
            From [`RunSnapshots.take`].
    """
    domains = snapshot["acceptance_history"].get("domains", {})
    known = {domain: [value for value in values if value is not None] for domain, values in domains.items()}
    return {domain: values[-1] for domain, values in known.items() if values}


def _overview(snapshot: Mapping[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2))
    versions, buffer, server = snapshot["versions"], snapshot["buffer"], snapshot["server"]
    withdrawn = versions.get("withdrawn")
    served = versions.get("served")
    published = "nothing yet" if served is None else f"{served} ({versions.get('reason', _NONE)})"
    table.add_row("published", published + (f", withdrawn {withdrawn}" if withdrawn else ""))
    if server:
        reload = server.get("reload", {})
        waiting = reload.get("waiting_for")
        table.add_row("serving", f"version {server.get('version', _NONE)}, {_server_line(server)}")
        table.add_row(
            "reloads",
            f"{reload.get('reloads', 0)}; read and tried in {reload.get('prepare_s', 0):.2f} s, paused "
            f"{reload.get('pause_s', 0) * 1e3:.1f} ms, longest {reload.get('longest_pause_s', 0) * 1e3:.1f} ms"
            + (f"; waiting for {waiting}" if waiting else ""),
        )
        for version, reason in reload.get("refused", {}).items():
            table.add_row("refused", Text(f"version {version}: {reason}", style="yellow"))
    if buffer:
        table.add_row(
            "buffer",
            f"{buffer['rows']} trajectories, {buffer['waiting']} new, {buffer['held_out']} held out, "
            f"{buffer['bytes'] / 1e6:.1f} MB, {buffer['appended']} ever",
        )
    table.add_row("trainer", _trainer_line(snapshot["trainer"]))
    return table


def _server_line(server: Mapping[str, Any]) -> str:
    if not server:
        return "none"
    requests = server.get("requests", {})
    answered = sum(count for reason, count in requests.items() if reason != "refused")
    return (
        f"{server.get('phase', _NONE)}, {server.get('active_requests', 0)} running, {answered} answered, "
        f"{server.get('tok_per_s', 0.0):.1f} tok/s"
    )


def _trainer_line(trainer: Mapping[str, Any]) -> str:
    if not trainer:
        return "none"
    phase = str(trainer.get("phase", _NONE))
    remaining_s = trainer.get("remaining_s")
    about = "" if remaining_s is None else f", about {format_duration(remaining_s)}"
    if phase == "waiting" and trainer.get("waiting_for"):
        return f"waiting for {trainer['waiting_for']}{about}"
    left = about and f"{about} left of the round"
    if phase == "training" and trainer.get("updates_total"):
        return f"training, update {trainer.get('updates_done', 0)} of {trainer['updates_total']}{left}"
    return phase + left


def _acceptance_table(snapshot: Mapping[str, Any]) -> Table:
    history = snapshot["acceptance_history"]
    pieces = len(next(iter(history["domains"].values())))
    # Ten pieces of time fit into 80 columns without lines between them.
    title = "Served acceptance length (tau) by domain, oldest to newest"
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("domain", no_wrap=True)
    for piece in range(pieces):
        ago_s = snapshot["time_s"] - history["first_s"] - piece * history["piece_s"]
        table.add_column(f"-{format_duration(max(ago_s, 0))}", justify="right", overflow="fold")
    for domain, values in history["domains"].items():
        table.add_row(domain, *(_NONE if value is None else f"{value:.2f}" for value in values))
    return table


def _rounds_table(history: list[Mapping[str, Any]]) -> Table:
    table = Table(title="Rounds", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("round", "outcome", "version", "trajectories", "held-out tau", "loss", "training", "round in all"):
        table.add_column(heading, overflow="fold")
    for entry in history:
        before, after = (entry.get(name, {}).get("all") for name in ("held_out_before", "held_out_after"))
        tau = _NONE if before is None or after is None else f"{before:.3f} -> {after:.3f}"
        loss = _NONE if entry.get("loss") is None else f"{entry['loss']:.3f}"
        trajectories = ", ".join(f"{count} {domain}" for domain, count in sorted(entry["trajectories"].items()))
        times = (format_duration(entry["train_s"]), format_duration(entry["round_s"]))
        table.add_row(str(entry["round"]), entry["outcome"], str(entry["version"]), trajectories, tau, loss, *times)
    return table
