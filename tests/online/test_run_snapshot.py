from __future__ import annotations

import json
import time

import pytest
from online_traffic import recorded
from published_drafters import adapted_drafter, publish
from snapshots import example_snapshot

from adaflash_hf.errors import InvalidInputError
from adaflash_hf.online.publisher import Publisher
from adaflash_hf.online.replay_buffer import ReplayBuffer
from adaflash_hf.online.run_snapshot import RunSnapshots
from adaflash_hf.online.run_status import StatusFile


def test_it_tells_of_buffer_versions_and_both_sides(tmp_path):
    publisher = Publisher(tmp_path / "published")
    publish(publisher, adapted_drafter())
    publish(publisher, adapted_drafter(1))
    publisher.rollback()
    buffer = ReplayBuffer(tmp_path / "buffer")
    buffer.append([recorded(seed, drafter_version=1) for seed in range(3)])
    StatusFile(tmp_path / "published", "trainer").update(phase="waiting", error="disk full")
    snapshots = RunSnapshots(tmp_path / "published", tmp_path / "buffer")
    snapshots.check()
    snapshot = json.loads(json.dumps(snapshots.take()))
    assert (snapshot["versions"]["served"], snapshot["versions"]["withdrawn"]) == (0, [1])
    assert snapshot["buffer"]["rows"] == 3
    # Two rounds each, one and three drafts accepted.
    (acceptance,) = snapshot["acceptance"]
    assert (acceptance["domain"], acceptance["drafter_version"], acceptance["acceptance_length"]) == ("math", 1, 3.0)
    assert snapshot["errors"] == ["trainer: disk full"]
    assert snapshot["server"] == {}
    assert snapshot.keys() | {"processes"} == example_snapshot().keys() | {"processes"}


def test_what_is_not_there_or_damaged_is_told_and_not_made(tmp_path):
    (tmp_path / "published").mkdir()
    snapshots = RunSnapshots(tmp_path / "published", tmp_path / "buffer")
    assert snapshots.take()["buffer"] == {}
    assert not (tmp_path / "buffer").exists()
    with pytest.raises(InvalidInputError, match="--buffer"):
        snapshots.check()
    with pytest.raises(InvalidInputError, match="--publish-dir"):
        RunSnapshots(tmp_path / "none").check()
    (tmp_path / "published" / "latest.json").write_text("{")
    (tmp_path / "buffer").write_text("not a database at all")
    messages = snapshots.take()["errors"]
    assert "latest.json" in messages[0]
    assert "SQLite" in messages[1]


def test_what_is_left_of_a_round_is_told_until_it_should_be_over(tmp_path):
    status = StatusFile(tmp_path, "trainer")
    status.update(phase="training", expected_end_s=time.time() + 1000)
    assert 900 < RunSnapshots(tmp_path).take()["trainer"]["remaining_s"] <= 1000
    for end_s in (time.time() - 1, None):
        status.update(expected_end_s=end_s)
        assert "remaining_s" not in RunSnapshots(tmp_path).take()["trainer"]
