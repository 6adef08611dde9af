from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adaflash_hf import install_routing, installation_checks, uninstall_routing
from adaflash_hf.error_text import install_hint
from adaflash_hf.evaluation.comparison import Comparison, DecodedRun, FirstDifference
from adaflash_hf.installation_checks import Check, Outcome, check_installation


def named(checks: list[Check], name: str) -> Check:
    return next(check for check in checks if check.name == name)


def test_this_installation_has_no_problem() -> None:
    checks = list(check_installation())
    assert [check for check in checks if check.outcome is Outcome.PROBLEM] == []
    assert metadata.version("adaflash-hf") in named(checks, "adaflash-hf").found
    assert named(checks, "torch").found == torch.__version__
    assert "sdpa" in named(checks, "attention").found
    assert {check.name for check in checks} >= {"CPU", "extra demo", "extra train", "extra serve", "extra bench"}
    assert "extra dev" not in {check.name for check in checks}


def test_unsupported_versions_are_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"transformers": "4.57.0"}
    real = metadata.version
    monkeypatch.setattr(installation_checks.metadata, "version", lambda name: versions.get(name) or real(name))
    check = named(list(installation_checks._versions()), "transformers")
    assert check.outcome is Outcome.PROBLEM
    assert "4.57.0" in check.found
    assert check.hint.startswith("pip install 'transformers")
    assert ">=5.19" in check.hint


def test_missing_extras_say_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.version

    def version(name: str) -> str:
        if name == "datasets":
            raise metadata.PackageNotFoundError(name)
        return "0.1" if name == "tensorboard" else real(name)

    monkeypatch.setattr(installation_checks.metadata, "version", version)
    check = named(list(installation_checks._extras()), "extra train")
    assert check == Check("extra train", Outcome.NOTE, "without datasets, tensorboard", install_hint("train"))


def test_extras_that_cannot_be_loaded_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "__init__.py").write_text("raise RuntimeError('built for another numpy')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "gguf", raising=False)
    found = named(list(installation_checks._extras()), "extra demo")
    assert found.outcome is Outcome.NOTE
    assert found.found == "installed, but cannot be loaded: gguf (built for another numpy)"


def test_routing_that_was_taken_off_is_a_problem() -> None:
    uninstall_routing()
    try:
        check = installation_checks._routing()
    finally:
        install_routing()
    assert check.outcome is Outcome.PROBLEM
    assert "install_routing()" in check.hint
    assert installation_checks._routing().outcome is Outcome.GOOD


def test_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ADAFLASH_CACHE", str(tmp_path / "new" / "cache"))
    assert installation_checks._cache_directory().outcome is Outcome.GOOD
    assert list(tmp_path.iterdir()) == []  # looking leaves nothing behind

    def refuse(dir: Path) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(installation_checks.tempfile, "TemporaryFile", refuse)
    check = installation_checks._cache_directory()
    assert check.outcome is Outcome.PROBLEM
    assert "Permission denied" in check.found


def comparison(plain_s: float, drafted_s: float, difference: FirstDifference | None = None) -> Comparison:
    stats = SimpleNamespace(acceptance_length=2.0)
    tokens = tuple(range(20))
    return Comparison(
        (DecodedRun(tokens, plain_s),), (DecodedRun(tokens, drafted_s, stats),), first_difference=difference
    )


def test_speed_is_judged_against_plain_decoding() -> None:
    check = installation_checks._judge_speed(comparison(2.0, 1.0), torch.float32)
    assert check.outcome is Outcome.GOOD
    assert check.found == "plain 10.0 tok/s, AdaFlash 20.0 tok/s, 2.00x, tau 2.00, 20 tokens, float32"
    slow = installation_checks._judge_speed(comparison(1.0, 2.0), torch.float32)
    assert slow.outcome is Outcome.NOTE and "cost_aware" in slow.hint


def test_other_tokens_are_a_problem_unless_they_are_a_near_tie() -> None:
    near = FirstDifference(4, 1, 2, 1e-4, True)
    wrong = FirstDifference(4, 1, 2, 3.0, False)
    assert installation_checks._judge_speed(comparison(2, 1, near), torch.bfloat16).outcome is Outcome.GOOD
    check = installation_checks._judge_speed(comparison(2, 1, wrong), torch.bfloat16)
    assert check.outcome is Outcome.PROBLEM and "position 4" in check.hint
