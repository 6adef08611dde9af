"""The status of an adaptation as Prometheus metrics, served over HTTP or as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..error_text import install_hint
from ..errors import InvalidInputError, MissingDependencyError


if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Metric


__all__ = ["MetricsExporter", "metrics_registry", "metrics_text"]

_PREFIX = "adaflash_online_"
Snapshot = Mapping[str, Any]
Values = Mapping[Any, float]  # by tuples of label values


def metrics_registry(snapshot: Callable[[], Snapshot]) -> CollectorRegistry:
    """
    A registry whose metrics are those of the newest snapshot.

    Args:
        snapshot (`Callable[[], Mapping]`):
            Called at every scrape; what [`RunSnapshots.take`] returned last.

    Raises:
        MissingDependencyError: prometheus-client is not installed.
    """
    try:
        from prometheus_client import CollectorRegistry
    except ImportError as error:
        raise MissingDependencyError(
            f"Metrics need prometheus-client, which is not installed; run: {install_hint('serve')}."
        ) from error

    class Figures:
        def collect(self) -> Iterator[Metric]:
            yield from _metrics(snapshot())

    registry = CollectorRegistry()
    registry.register(Figures())
    return registry


def metrics_text(snapshot: Snapshot) -> str:
    """
    In Prometheus' text format.

    Args:
        snapshot (`Mapping[str, Any]`):
            From [`RunSnapshots.take`].
    """
    registry = metrics_registry(lambda: snapshot)
    from prometheus_client import generate_latest

    return generate_latest(registry).decode()


class MetricsExporter:
    """
    Serves metrics at `http://host:port/metrics`.

    Args:
        snapshot (`Callable[[], Mapping]`):
            See [`metrics_registry`].
        port (`int`):
            Port; 0 takes a free one.
        host (`str`, *optional*, defaults to `"127.0.0.1"`):
            Address to listen at.

    Attributes:
        port: The port in use.

    Raises:
        InvalidInputError: The port is taken.
        MissingDependencyError: prometheus-client is not installed.
    """

    def __init__(self, snapshot: Callable[[], Snapshot], port: int, host: str = "127.0.0.1") -> None:
        registry = metrics_registry(snapshot)
        from prometheus_client import start_http_server

        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise InvalidInputError(
                f"`--metrics-port` is {port}, and {host}:{port} cannot be listened at ({error}); give another port."
            ) from error
        self.port: int = self._server.server_port

    def stop(self) -> None:
        """End serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _metrics(snapshot: Snapshot) -> Iterator[Metric]:
    yield from _buffer_metrics(snapshot["buffer"])
    yield from _acceptance_metrics(snapshot)
    yield from _trainer_metrics(snapshot["trainer"])
    yield from _server_metrics(snapshot["server"])
    served = snapshot["versions"].get("served")
    yield _gauge("published_version", "Version that is to be served", {} if served is None else {(): served})
    yield _gauge("errors", "Things that are wrong now, see the status page", {(): len(snapshot["errors"])})


def _buffer_metrics(buffer: Snapshot) -> Iterator[Metric]:
    if not buffer:
        return
    counts = {(state,): buffer[state] for state in ("rows", "waiting", "held_out")}
    yield _gauge("buffer_trajectories", "Trajectories in the replay buffer", counts, ["state"])
    by_domain = {(domain,): count for domain, count in buffer["by_domain"].items()}
    yield _gauge("buffer_domain_trajectories", "Trajectories in the replay buffer, by domain", by_domain, ["domain"])
    yield _gauge("buffer_bytes", "Payload of the replay buffer", {(): buffer["bytes"]})
    yield _counter("buffer_appended", "Trajectories that ever came in", {(): buffer["appended"]})


def _acceptance_metrics(snapshot: Snapshot) -> Iterator[Metric]:
    by_version = {
        (one["domain"], str(one["drafter_version"])): one["acceptance_length"] for one in snapshot["acceptance"]
    }
    yield _gauge(
        "acceptance_length",
        "Tokens per verification in the traffic that is in the buffer",
        by_version,
        ["domain", "drafter_version"],
    )


def _trainer_metrics(trainer: Snapshot) -> Iterator[Metric]:
    history = trainer.get("history", [])
    outcomes = {(outcome,): count for outcome, count in Counter(entry["outcome"] for entry in history).items()}
    yield _gauge("recent_rounds", "Rounds in the trainer's status, by outcome", outcomes, ["outcome"])
    yield _counter("rounds", "Rounds done", {(): trainer.get("rounds_done", 0)})
    yield _counter("updates", "Optimizer steps done", {(): trainer.get("updates", 0)})
    remaining = {(trainer.get("phase", ""),): trainer["remaining_s"]} if "remaining_s" in trainer else {}
    text = "Estimated time until the round that runs has ended, or the wait for one"
    yield _gauge("remaining_seconds", text, remaining, ["phase"])
    if not history:
        return
    last = history[-1]
    yield _gauge("train_seconds", "Training time of the last round", {(): last["train_s"]})
    yield _gauge("round_seconds", "Time of the last round with its judgements", {(): last["round_s"]})
    for moment in ("before", "after"):
        taus = {(domain,): tau for domain, tau in last.get(f"held_out_{moment}", {}).items()}
        name, text = f"held_out_acceptance_length_{moment}", f"On held-out traffic, {moment} the last round"
        yield _gauge(name, text, taus, ["domain"])


def _server_metrics(server: Snapshot) -> Iterator[Metric]:
    if not server:
        return
    reload, recorder = server.get("reload", {}), server.get("recorder", {})
    requests = {(reason,): count for reason, count in server.get("requests", {}).items()}
    yield _counter("requests", "Requests that ended", requests, ["reason"])
    yield _gauge("active_requests", "Requests that run", {(): server.get("active_requests", 0)})
    yield _counter("generated_tokens", "Tokens generated", {(): server.get("generated_tokens", 0)})
    yield _gauge("served_version", "Version that drafts now", {(): server.get("version", 0)})
    yield _counter("reloads", "Versions swapped in", {(): reload.get("reloads", 0)})
    yield _gauge("refused_versions", "Versions not taken", {(): len(reload.get("refused", {}))})
    yield _gauge("reload_seconds", "Time of reading and trying the newest version", {(): reload.get("prepare_s", 0)})
    yield _gauge("reload_pause_seconds", "Pause of the newest swap", {(): reload.get("pause_s", 0)})
    yield _gauge("longest_reload_pause_seconds", "Longest such pause", {(): reload.get("longest_pause_s", 0)})
    outcomes = {(name,): value for name, value in recorder.items() if isinstance(value, int)}
    yield _counter("recorded", "Requests handed to the recorder, by what became of them", outcomes, ["outcome"])


def _gauge(name: str, text: str, values: Values, labels: list[str] | None = None) -> Metric:
    from prometheus_client.core import GaugeMetricFamily

    return _filled(GaugeMetricFamily(_PREFIX + name, text, labels=labels or []), values)


def _counter(name: str, text: str, values: Values, labels: list[str] | None = None) -> Metric:
    from prometheus_client.core import CounterMetricFamily

    return _filled(CounterMetricFamily(_PREFIX + name, text, labels=labels or []), values)


def _filled(metric: Any, values: Values) -> Metric:
    for labels, value in values.items():
        metric.add_metric(list(labels), value)
    return metric
