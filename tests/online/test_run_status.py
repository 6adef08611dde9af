from __future__ import annotations

from adaflash_hf.online.run_status import StatusFile, read_status


def test_what_is_written_is_read(tmp_path):
    status = StatusFile(tmp_path, "trainer")
    status.update(phase="training", version=3)
    found = read_status(tmp_path, "trainer")
    assert (found["phase"], found["version"]) == ("training", 3)
    assert found["updated_s"] >= found["started_s"]


def test_progress_is_not_written_every_time(tmp_path):
    status = StatusFile(tmp_path, "trainer")
    status.update(done=0)
    for done in range(1, 50):
        status.update(now=False, done=done)
    assert read_status(tmp_path, "trainer")["done"] == 0
    status.update(phase="saving")
    assert read_status(tmp_path, "trainer")["done"] == 49


def test_no_status_and_damaged_status_are_empty(tmp_path):
    assert read_status(tmp_path, "server") == {}
    (tmp_path / "status").mkdir()
    for text in ("{", "[1]"):
        (tmp_path / "status" / "server.json").write_text(text)
        assert read_status(tmp_path, "server") == {}


def test_a_place_that_cannot_be_written_fails_nobody(tmp_path, caplog):
    (tmp_path / "status").write_text("a file where a directory should be")
    status = StatusFile(tmp_path, "trainer")
    for phase in ("waiting", "training", "waiting"):
        status.update(phase=phase)
    assert len(caplog.records) == 1
