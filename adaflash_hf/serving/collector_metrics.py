"""A collector's figures for Prometheus."""

from __future__ import annotations

from typing import Any

from ..error_text import install_hint
from ..errors import MissingDependencyError


__all__ = ["prometheus_text"]


def prometheus_text(status: dict[str, Any]) -> str:
    """
    In Prometheus' text format.

    Args:
        status (`dict`): Status of a [`Collector`].
    """
    try:
        from prometheus_client import CollectorRegistry, generate_latest
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    except ImportError as error:
        raise MissingDependencyError(
            f"Metrics need prometheus-client, which is not installed. Run: {install_hint('serve')}."
        ) from error

    answers = CounterMetricFamily(
        "adaflash_collector_answers",
        "Answers by where their token ids came from, or by why they were not recorded",
        labels=["outcome"],
    )
    for outcome, count in sorted(status["answers"].items()):
        answers.add_metric([outcome], count)
    trajectories = CounterMetricFamily(
        "adaflash_collector_trajectories", "Answers handed to the recorder, by what became of them", labels=["outcome"]
    )
    for outcome, value in status["recorder"].items():
        if isinstance(value, int):
            trajectories.add_metric([outcome], value)
    version = GaugeMetricFamily("adaflash_collector_drafter_version", "Drafter version that the server reports")
    version.add_metric([], status["drafter_version"])

    class Figures:
        def collect(self) -> list[Any]:
            return [answers, trajectories, version]

    registry = CollectorRegistry()
    registry.register(Figures())
    return generate_latest(registry).decode()
