from __future__ import annotations

import json
from types import SimpleNamespace

import torch

from adaflash_hf.training.run_records import JsonLinesCallback, write_run_record


def state(step):
    return SimpleNamespace(global_step=step, is_world_process_zero=True)


def test_a_record_says_how_and_with_what(tmp_path):
    write_run_record(tmp_path / "new" / "run.json", ["adaflash", "train"], {"seed": 3, "path": tmp_path})
    record = json.loads((tmp_path / "new" / "run.json").read_text())
    assert record["argv"] == ["adaflash", "train"] and record["settings"] == {"seed": 3, "path": str(tmp_path)}
    assert record["versions"]["torch"] == torch.__version__
    assert record["git_commit"] is None or len(record["git_commit"].removesuffix("-dirty")) == 40


def test_a_resumed_log_has_each_step_once(tmp_path):
    path = tmp_path / "log.jsonl"
    callback = JsonLinesCallback(path)
    callback.on_train_begin(None, state(0), None)
    for step in (10, 20, 30):
        callback.on_log(None, state(step), None, logs={"loss": torch.tensor(1.5)})
    path.write_text(path.read_text() + '{"step": 4', encoding="utf-8")  # killed while writing
    callback.on_train_begin(None, state(20), None)
    callback.on_log(None, state(30), None, logs={"loss": 2.0})
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    assert entries == [{"step": 10, "loss": 1.5}, {"step": 20, "loss": 1.5}, {"step": 30, "loss": 2.0}]
    callback.on_train_begin(None, state(0), None)
    assert path.read_text() == ""
