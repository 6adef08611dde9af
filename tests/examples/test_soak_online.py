from __future__ import annotations

import importlib.util
import multiprocessing
import sys
from pathlib import Path

import pytest

from adaflash_hf.online import supervisor


ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def soak():
    spec = importlib.util.spec_from_file_location("soak_online", ROOT / "examples" / "soak_online.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["soak_online"] = module
    spec.loader.exec_module(module)
    return module


def test_reloads_under_load_change_no_answer(soak, tmp_path):
    report = soak.soak_reloads(soak.save_tiny_models(tmp_path), tmp_path, reloads=5, seconds=0.0)
    assert report.wrong == []
    assert len(report.pauses_s) == 5
    assert report.answers > 0


def test_killed_in_turn_everything_is_served_and_trained_on_once(soak, tmp_path, monkeypatch):
    # Forks of this process have all imports already.
    monkeypatch.setattr(supervisor, "_context", lambda: multiprocessing.get_context("fork"))
    models = soak.save_tiny_models(tmp_path)
    models.prompts = models.prompts[:16]
    (tmp_path / "place").mkdir()
    report = soak.soak_kills(models, tmp_path / "place", kills=2, longest_s=2.0)
    assert report.wrong == []
    assert report.kills == {"trainer": 1, "server": 1}
    assert report.rounds > 0
