from __future__ import annotations

from train_requests import make_request


def test_one_of_several_processes_speaks(tmp_path, monkeypatch):
    request = make_request(tmp_path, tmp_path / "out")
    assert request.is_main and request.num_processes == 1
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not request.is_main and request.num_processes == 2


def test_a_head_beside_the_drafter_is_no_part_of_it(tmp_path):
    assert make_request(tmp_path, tmp_path, only="confidence-head").trains_confidence_head
    assert not make_request(tmp_path, tmp_path, only="length-head").trains_confidence_head
    assert make_request(tmp_path, tmp_path / "out").checkpoints == tmp_path / "out" / "checkpoints"
