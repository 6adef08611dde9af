from __future__ import annotations

import builtins
import sys
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families
from snapshots import example_snapshot

from adaflash_hf.errors import InvalidInputError, MissingDependencyError
from adaflash_hf.online.metrics_exporter import MetricsExporter, metrics_registry, metrics_text
from adaflash_hf.online.run_snapshot import RunSnapshots


def values(text):
    return {
        (sample.name.removeprefix("adaflash_online_"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_all_that_the_page_shows_is_a_metric():
    found = values(metrics_text(example_snapshot()))
    expected = {
        ("acceptance_length", "math", "2"): 1.75,
        ("buffer_trajectories", "waiting"): 7,
        ("buffer_domain_trajectories", "code"): 10,
        ("buffer_bytes",): 5_000_000,
        ("buffer_appended_total",): 55,
        ("published_version",): 3,
        ("served_version",): 2,
        ("rounds_total",): 2,
        ("remaining_seconds", "training"): 42,
        ("recent_rounds", "rejected"): 1,
        ("train_seconds",): 30,
        ("round_seconds",): 125,
        ("held_out_acceptance_length_before", "all"): 2.0,
        ("held_out_acceptance_length_after", "math"): 2.75,
        ("requests_total", "stop"): 20,
        ("generated_tokens_total",): 4096,
        ("reloads_total",): 2,
        ("refused_versions",): 1,
        ("reload_seconds",): 0.5,
        ("reload_pause_seconds",): 0.002,
        ("longest_reload_pause_seconds",): 0.004,
        ("recorded_total", "written"): 29,
        ("errors",): 1,
    }
    assert {name: found.get(name) for name in expected} == expected


def test_each_scrape_sees_the_newest_status(tmp_path):
    snapshots = [RunSnapshots(tmp_path).take()]
    exporter = MetricsExporter(lambda: snapshots[-1], port=0)
    try:
        address = f"http://127.0.0.1:{exporter.port}/metrics"
        with urllib.request.urlopen(address, timeout=600) as response:
            assert ("served_version",) not in values(response.read().decode())
        snapshots.append(example_snapshot())
        with urllib.request.urlopen(address, timeout=600) as response:
            assert values(response.read().decode())[("served_version",)] == 2
        with pytest.raises(InvalidInputError, match="another port"):
            MetricsExporter(lambda: snapshots[-1], port=exporter.port)
    finally:
        exporter.stop()


def test_a_missing_package_is_named(monkeypatch):
    load = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "prometheus_client":
            raise ImportError(name)
        return load(name, *args, **kwargs)

    monkeypatch.delitem(sys.modules, "prometheus_client", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingDependencyError, match=r"adaflash-hf\[serve\]"):
        metrics_registry(example_snapshot)
