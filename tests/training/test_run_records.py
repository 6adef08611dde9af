from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from tiny_models import tiny_target
from tiny_trajectories import make_trajectories
from torch.utils.data import Subset

from adaflash_hf.errors import InvalidInputError, MissingDependencyError
from adaflash_hf.training import run_records
from adaflash_hf.training.run_records import (
    JsonLinesCallback,
    check_reporting,
    data_record,
    machine_record,
    read_run_record,
    write_outcome,
    write_run_record,
)
from adaflash_hf.training.trajectory_dataset import TrajectoryDataset


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
    times = [entry.pop("elapsed_s") for entry in entries]
    assert times == sorted(times) and times[0] >= 0
    assert entries == [{"step": 10, "loss": 1.5}, {"step": 20, "loss": 1.5}, {"step": 30, "loss": 2.0}]
    callback.on_train_begin(None, state(0), None)
    assert path.read_text() == ""


def test_seconds_go_on_where_a_run_was_stopped(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 20, "elapsed_s": 1000.0, "loss": 1.0}\n')
    callback = JsonLinesCallback(path)
    callback.on_train_begin(None, state(20), None)
    callback.on_log(None, state(30), None, logs={"loss": 2.0})
    assert json.loads(path.read_text().splitlines()[-1])["elapsed_s"] >= 1000.0


def test_the_outcome_goes_into_the_record(tmp_path):
    write_run_record(tmp_path / "run.json", ["adaflash"], {"seed": 3}, {"machine": {"device": "x"}})
    log = [
        {"step": 10, "elapsed_s": 5.0, "loss": 2.0},
        {"step": 10, "elapsed_s": 6.0, "eval_acceptance_length": 1.5, "eval_loss": 2.0},
        {"step": 20, "elapsed_s": 12.5, "eval_acceptance_length": 1.75},
    ]
    (tmp_path / "training_log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in log) + '{"step"')
    write_outcome(tmp_path, {"eval_acceptance_length": 1.75})
    assert json.loads((tmp_path / "metrics.json").read_text()) == {"eval_acceptance_length": 1.75}
    record = read_run_record(tmp_path)
    assert record["settings"] == {"seed": 3} and record["machine"] == {"device": "x"}
    outcome = record["outcome"]
    assert outcome["step"] == 20 and outcome["elapsed_s"] == 12.5
    assert [point["eval_acceptance_length"] for point in outcome["curve"]] == [1.5, 1.75]
    assert outcome["curve"][0].keys() == {"step", "elapsed_s", "eval_acceptance_length"}
    assert read_run_record(tmp_path / "nowhere") is None


def test_data_and_machine_are_described(tmp_path):
    directory = make_trajectories(tmp_path / "t", tiny_target("llama"))
    dataset = TrajectoryDataset(directory)
    record = data_record(Subset(dataset, range(8)), Subset(dataset, range(8, 12)), [directory, tmp_path])
    counts = {domain: entry["trajectories"] for domain, entry in record["train"].items()}
    assert set(counts) == {"code", "math"} and sum(counts.values()) == 8
    assert sum(entry["response_tokens"] for entry in record["train"].values()) == 80
    assert record["held_out_trajectories"] == 4
    assert [source["max_new_tokens"] for source in record["sources"]] == [10]
    machine = machine_record(torch.device("cpu"), 2)
    assert machine["processes"] == 2 and machine["device"].endswith("cpu") and machine["threads"] >= 1


def test_loggers_that_are_not_there_are_refused(monkeypatch):
    check_reporting(["tensorboard", "none"])
    with pytest.raises(InvalidInputError, match="'tensorbord'"):
        check_reporting(["tensorbord"])
    monkeypatch.setattr(run_records.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"adaflash-hf\[train\]"):
        check_reporting(["tensorboard"])
