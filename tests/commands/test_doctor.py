from __future__ import annotations

import json

import pytest

from adaflash_hf import install_routing, installation_checks, uninstall_routing
from adaflash_hf.cli import main
from adaflash_hf.installation_checks import Check, Outcome


def test_help(capsys):
    assert main(["doctor", "--help"]) == 0
    assert "Exits with 1 on problems" in " ".join(capsys.readouterr().out.split())


def test_a_sound_installation(capsys):
    assert main(["doctor", "--no-speed"]) == 0
    shown = capsys.readouterr().out
    assert "ok routing: generate(assistant_model=drafter) reaches AdaFlash" in shown
    assert "speed" not in shown.replace("the speed check only", "")


def test_problems_reach_the_shell(capsys):
    uninstall_routing()
    try:
        assert main(["doctor", "--no-speed", "--json"]) == 1
    finally:
        install_routing()
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)}
    assert checks["routing"]["outcome"] == "problem"
    assert "install_routing()" in checks["routing"]["hint"]


@pytest.mark.parametrize("installed", [True, False])
def test_speed_is_measured_where_the_target_is_installed(installed, monkeypatch, capsys):
    budgets = []

    def check_speed(budget_s, console):
        budgets.append(budget_s)
        return Check("speed", Outcome.GOOD, "plain 1.0 tok/s")

    outcome = Outcome.GOOD if installed else Outcome.NOTE
    monkeypatch.setattr(
        installation_checks, "check_installation", lambda: iter([Check("embedded target", outcome, "")])
    )
    monkeypatch.setattr(installation_checks, "check_speed", check_speed)
    assert main(["doctor", "--budget", "3"]) == 0
    assert budgets == ([3.0] if installed else [])
    assert ("plain 1.0 tok/s" in capsys.readouterr().out) is installed
