from __future__ import annotations

import json

from adaflash_hf.training.run_records import read_run_record, write_run_record
from adaflash_hf.training.run_stages import earlier_stages, stages_of


def make_run(directory, name, earlier=None, **more):
    more = {"outcome": {"step": 3}, **more, **(earlier or {})}
    write_run_record(directory / "run.json", ["adaflash", "train"], {"name": name}, more)
    return directory


def names(stages):
    return [stage["settings"]["name"] for stage in stages]


def test_each_run_keeps_those_before_it_the_oldest_first(tmp_path):
    made = make_run(tmp_path / "0", "0")
    for number in range(1, 4):
        out = tmp_path / str(number)
        made = make_run(out, str(number), earlier_stages(made, out))
    record = read_run_record(made)
    assert names(record["previous"]) == ["0", "1", "2"] and record["previous_omitted"] == 0
    assert names(stages_of(record)) == ["0", "1", "2", "3"]
    assert all("previous" not in stage and stage["outcome"] == {"step": 3} for stage in stages_of(record))


def test_records_of_earlier_versions_are_read(tmp_path):
    nested = {"settings": {"name": "1"}, "previous": {"settings": {"name": "0"}, "previous": None}}
    made = make_run(tmp_path / "2", "2", {"previous": nested})
    assert names(stages_of(read_run_record(made))) == ["0", "1", "2"]
    assert names(earlier_stages(made, tmp_path / "3")["previous"]) == ["0", "1", "2"]


def test_a_long_chain_loses_its_oldest_and_says_how_many(tmp_path):
    bulk = {"data": "x" * 50_000}
    made = make_run(tmp_path / "0", "0", **bulk)
    for number in range(1, 9):
        made = make_run(tmp_path / str(number), str(number), earlier_stages(made, tmp_path / "other"), **bulk)
    earlier = earlier_stages(made, tmp_path / "other")
    assert names(earlier["previous"]) == ["4", "5", "6", "7", "8"] and earlier["previous_omitted"] == 4
    assert len(json.dumps(earlier)) < 300_000


def test_checkpoints_and_adapters_have_the_record_of_their_run(tmp_path):
    run = make_run(tmp_path / "run", "run")
    (run / "adapter").mkdir()
    checkpoint = run / "checkpoints" / "checkpoint-25"
    checkpoint.mkdir(parents=True)
    (stage,) = earlier_stages(checkpoint, tmp_path)["previous"]
    assert stage["settings"]["name"] == "run" and stage["checkpoint"] == "checkpoint-25"
    (stage,) = earlier_stages(run / "adapter", tmp_path)["previous"]
    assert stage["settings"]["name"] == "run" and "checkpoint" not in stage


def test_without_a_record_there_is_nothing_before(tmp_path):
    for init in (tmp_path, "org/drafter"):
        assert earlier_stages(init, tmp_path / "out") == {"previous": [], "previous_omitted": 0}


def test_a_run_in_the_drafters_own_directory_is_not_its_own_predecessor(tmp_path):
    made = make_run(tmp_path, "1", {"previous": [{"settings": {"name": "0"}}]})
    assert names(earlier_stages(made, tmp_path)["previous"]) == ["0", "1"]
    write_run_record(tmp_path / "run.json", [], {"name": "2"}, earlier_stages(made, tmp_path))  # and killed
    assert names(earlier_stages(made, tmp_path)["previous"]) == ["0", "1"]
    # Its checkpoints are of the run itself, and another run goes on from what is there.
    assert names(earlier_stages(made, tmp_path / "out")["previous"]) == ["0", "1", "2"]
