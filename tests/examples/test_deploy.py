"""The deployment files are well formed, and what they run is what the command line understands."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from adaflash_hf import cli


FOLDER = Path(__file__).resolve().parents[2] / "examples" / "deploy"


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def filled_in(command: str) -> list[str]:
    return shlex.split(re.sub(r"\$\{(\w+)[^}]*\}", r"\1", command))


def commands() -> list[tuple[str, list[str]]]:
    """Arguments of `adaflash` in all files."""
    (compose,) = documents("compose.yaml")
    found = [(name, filled_in(s["command"])) for name, s in compose["services"].items() if "command" in s]
    for document in documents("kubernetes.yaml"):
        if document["kind"] in ("Deployment", "StatefulSet"):
            containers = document["spec"]["template"]["spec"]["containers"]
            found += [(f"kubernetes {container['name']}", container["args"]) for container in containers]
    return found


def parse(group: Any, arguments: list[str]) -> Any:
    """The context of the command that is called; raises if its options are not understood."""
    context = group.make_context("adaflash", list(arguments))
    while hasattr(group, "resolve_command"):
        _, group, rest = group.resolve_command(context, [*context._protected_args, *context.args])
        context = group.make_context(group.name, rest, parent=context)
    return context


@pytest.mark.parametrize(("name", "arguments"), commands(), ids=[name for name, _ in commands()])
def test_commands_are_understood(name: str, arguments: list[str]) -> None:
    context = parse(typer.main.get_command(cli.app), arguments)
    assert context.command.name in ("sglang", "collect", "reload", "run"), name
    if context.command.name == "sglang":
        assert [word.partition("=")[0] for word in context.args if word.startswith("--")] == [
            "--api-key",
            "--admin-api-key",
        ]


def test_the_pieces_name_each_other() -> None:
    (compose,), (prometheus,) = documents("compose.yaml"), documents("prometheus.yaml")
    targets = [target for job in prometheus["scrape_configs"] for target in job["static_configs"][0]["targets"]]
    assert {target.partition(":")[0] for target in targets} <= compose["services"].keys()
    for service in compose["services"].values():
        for place in service.get("volumes", []):
            if place.startswith("./"):
                assert (FOLDER / place.split(":")[0]).exists()
    dashboard = json.loads((FOLDER / "grafana" / "dashboards" / "adaflash.json").read_text())
    (source,) = documents("grafana/provisioning/datasources/prometheus.yaml")[0]["datasources"]
    assert {panel["datasource"]["uid"] for panel in dashboard["panels"]} == {source["uid"]}


def test_panels_show_metrics_that_there_are() -> None:
    from adaflash_hf.serving.collector_metrics import prometheus_text

    ours = prometheus_text({"answers": {"ids": 1}, "recorder": {"written": 1}, "drafter_version": 2})
    dashboard = (FOLDER / "grafana" / "dashboards" / "adaflash.json").read_text()
    for name in set(re.findall(r"adaflash_\w+", dashboard)):
        assert f"\n{name}" in ours, name
