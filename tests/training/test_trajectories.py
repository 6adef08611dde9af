from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from tiny_models import tiny_drafter, tiny_target
from tiny_trajectories import make_trajectories, random_prompts, run_until_killed

from adaflash_hf.errors import InvalidInputError
from adaflash_hf.training import trajectories
from adaflash_hf.training.batched_decoding import DecodingSettings, decode_batch
from adaflash_hf.training.drafted_decoding import DraftedDecoder
from adaflash_hf.training.trajectories import (
    TrajectorySettings,
    find_trajectory_shards,
    generate_trajectories,
    plan_batches,
    read_settings,
    trajectory_path,
)
from adaflash_hf.training.trajectory_dataset import TrajectoryDataset


SAMPLED = {"temperature": 1.0, "seed": 3, "teacher_top_k": 2, "capture_layer_ids": (0, 2)}


def stored_tables(directory):
    return [pq.read_table(path) for path in find_trajectory_shards(directory)]


def test_batches_hold_every_prompt_once_and_neighbours_in_length():
    lengths = [(7 * i) % 101 for i in range(500)]
    batches = plan_batches(lengths, 8, seed=0)
    assert sorted(sum(batches, [])) == list(range(500))
    assert all(len(batch) == 8 for batch in batches[:-1] if len(batch) == 8) and len(batches) == 63
    spreads = [max(lengths[i] for i in batch) - min(lengths[i] for i in batch) for batch in batches]
    assert sum(spreads) / len(spreads) < 15  # 101 lengths, and 16 batches in a window
    assert batches == plan_batches(lengths, 8, seed=0) != plan_batches(lengths, 8, seed=1)


def test_shards_hold_what_the_target_says(tmp_path):
    target = tiny_target("llama")
    target.generation_config.eos_token_id = 5
    prompts, domains = random_prompts(6)
    generate_trajectories(target, prompts, domains, tmp_path, TrajectorySettings(max_new_tokens=9, batch_size=4))
    rows = [row for table in stored_tables(tmp_path) for row in table.to_pylist()]
    assert sorted(row["prompt_ids"] for row in rows) == sorted(prompts)
    for row in rows:
        assert row["domain"] == domains[prompts.index(row["prompt_ids"])]
        (expected,) = decode_batch(target, [row["prompt_ids"]], DecodingSettings(9, eos_token_ids=(5,)))
        assert row["response_ids"] == expected.response_ids.tolist() and row["finished"] == expected.finished


def test_datasets_reads_the_shards(tmp_path):
    datasets = pytest.importorskip("datasets")
    make_trajectories(tmp_path / "made", tiny_target("llama"), teacher_top_k=3)
    files = [str(path) for path in find_trajectory_shards(tmp_path / "made")]
    loaded = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=str(tmp_path / "cache"))
    assert len(loaded) == 12
    assert set(loaded.column_names) == {
        "prompt_ids", "response_ids", "domain", "finished", "teacher_ids", "teacher_log_probs"
    }  # fmt: skip
    assert [len(row) for row in loaded[0]["teacher_ids"]] == [3] * 10
    # Greedy: the target's likeliest token is what it said.
    assert [row[0] for row in loaded[0]["teacher_ids"]] == loaded[0]["response_ids"]


def test_a_killed_run_continues_to_the_same_set(tmp_path, monkeypatch):
    whole = make_trajectories(tmp_path / "whole", tiny_target("llama"), **SAMPLED)
    killed, write = tmp_path / "killed", trajectories._write_shard

    def write_or_die(path, *rest):
        if path == trajectory_path(killed, 1):
            path.with_suffix(".partial").write_bytes(b"half a shard")
            os.kill(os.getpid(), signal.SIGKILL)
        write(path, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(trajectories, "_write_shard", write_or_die)
        run_until_killed(lambda: make_trajectories(killed, tiny_target("llama"), **SAMPLED))
    assert [path.name for path in find_trajectory_shards(killed)] == [trajectory_path(killed, 0).name]
    make_trajectories(killed, tiny_target("llama"), **SAMPLED)
    assert all(a.equals(b) for a, b in zip(stored_tables(whole), stored_tables(killed), strict=True))
    assert sorted(path.name for path in whole.iterdir()) == sorted(path.name for path in killed.iterdir())


def test_a_complete_run_decodes_nothing_again(tmp_path):
    target, reports = tiny_target("llama"), []
    make_trajectories(tmp_path, target)
    target.forward = None
    prompts, domains = random_prompts(12)
    settings = TrajectorySettings(max_new_tokens=10, batch_size=4)
    generate_trajectories(target, prompts, domains, tmp_path, settings, reports.append)
    assert [report.was_stored for report in reports] == [True] * 3
    assert sum(report.trajectories for report in reports) == 12


def test_other_settings_or_prompts_are_refused(tmp_path):
    target = tiny_target("llama")
    make_trajectories(tmp_path, target)
    with pytest.raises(InvalidInputError, match="temperature: 0.0 there, 0.5 now"):
        make_trajectories(tmp_path, target, temperature=0.5)
    with pytest.raises(InvalidInputError, match="prompts_sha256"):
        make_trajectories(tmp_path, target, count=11)
    assert read_settings(tmp_path)["max_new_tokens"] == 10


def test_a_place_that_is_no_directory_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InvalidInputError, match="cannot be made one"):
            trajectories._claim_directory(out, {}, {})


def test_what_an_older_version_did_not_record_had_its_default(tmp_path):
    target, prompts = tiny_target("llama"), random_prompts(12)
    make_trajectories(tmp_path, target)
    path = tmp_path / "trajectories.json"
    record = json.loads(path.read_text())
    assert record.pop("provenance") == {}
    path.write_text(json.dumps({name: value for name, value in record.items() if name != "top_p"}))
    make_trajectories(tmp_path, target)
    # Where the prompts came from is kept, but another name for the same prompts does no harm.
    settings = TrajectorySettings(max_new_tokens=10, batch_size=4)
    for name in ("a.json", "b.json"):
        generate_trajectories(target, *prompts, tmp_path / "new", settings, provenance={"files": [name]})
    assert read_settings(tmp_path / "new")["provenance"] == {"files": ["a.json"]}


def test_a_drafter_changes_nothing_of_what_is_stored(tmp_path):
    target, (prompts, domains) = tiny_target("llama"), random_prompts(12)
    settings = TrajectorySettings(max_new_tokens=10, batch_size=4, teacher_top_k=2, capture_layer_ids=(0, 2))
    generate_trajectories(target, prompts, domains, tmp_path / "plain", settings)
    decoder = DraftedDecoder(target, tiny_drafter(target), batch_size=4, length_policy="fixed")
    generate_trajectories(target, prompts, domains, tmp_path / "drafted", settings, decode=decoder.decode)
    names = ["prompt_ids", "response_ids", "domain", "finished", "teacher_ids"]
    for plain, drafted in zip(stored_tables(tmp_path / "plain"), stored_tables(tmp_path / "drafted"), strict=True):
        assert plain.select(names).equals(drafted.select(names))
    assert read_settings(tmp_path / "plain") == read_settings(tmp_path / "drafted")
    one, two = (TrajectoryDataset(tmp_path / name, feature_layer_ids=(0, 2)) for name in ("plain", "drafted"))
    for row in range(len(one)):
        torch.testing.assert_close(
            one[row]["context_hidden_states"], two[row]["context_hidden_states"], atol=1e-5, rtol=1e-4
        )


def test_directories_without_trajectories_are_refused(tmp_path):
    for call in (find_trajectory_shards, read_settings):
        with pytest.raises(InvalidInputError, match="trajectories"):
            call(tmp_path)
    (tmp_path / "trajectories-00000.parquet").touch()
    with pytest.raises(InvalidInputError, match="no trajectories.json"):
        make_trajectories(tmp_path, tiny_target("llama"))


def test_settings_out_of_range_are_refused():
    with pytest.raises(InvalidInputError, match="batch_size"):
        TrajectorySettings(batch_size=0)
    with pytest.raises(InvalidInputError, match="domains"):
        generate_trajectories(tiny_target("llama"), [[1]], [], Path("nowhere"), TrajectorySettings())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"capture_layer_ids": (1, 99)}, r"has \[99\], but the target's layers are 0 to 3"),
        ({"capture_layer_ids": (-1,)}, r"has \[-1\]"),
        ({"teacher_top_k": 9999}, "is 9999, but the target knows"),
        ({"max_new_tokens": 9999}, r"is 9999, but the target's context ends at 512\. Lower that"),
    ],
)
def test_what_the_target_does_not_have_is_refused_before_anything_is_written(tmp_path, settings, message):
    with pytest.raises(InvalidInputError, match=message):
        make_trajectories(tmp_path / "out", tiny_target("llama"), **settings)
    assert not (tmp_path / "out").exists()


def test_random_state_of_the_process_is_left_alone(tmp_path):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    target = tiny_target("llama")
    before = torch.get_rng_state()
    make_trajectories(tmp_path, target, temperature=1.0)
    assert torch.equal(before, torch.get_rng_state())
