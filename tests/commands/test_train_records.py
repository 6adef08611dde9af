from __future__ import annotations

import json

import pytest
from tiny_models import tiny_drafter
from train_requests import make_request

from adaflash_hf.commands.train_records import check_same_run, recorded_settings, stages_before
from adaflash_hf.errors import InvalidInputError
from adaflash_hf.training.recipes import Decision
from adaflash_hf.training.run_records import write_run_record


def record_run(request, settings, **more):
    """As a run leaves it that was killed after a checkpoint."""
    write_run_record(request.out / "run.json", ["adaflash", "train"], settings, more)
    checkpoint = request.checkpoints / "checkpoint-25"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer_state.json").write_text('{"global_step": 25}')


def test_a_run_is_the_same_as_far_as_its_settings_are_known(tmp_path):
    request = make_request(tmp_path, tmp_path / "out")
    decisions = [Decision("layers", 2, "given"), Decision("target_layer_ids", (0, 2), "by default")]
    settings = recorded_settings(request, 9, tiny_drafter().config, decisions)
    assert settings["trajectories"] == [str(tmp_path)] and settings["target_layer_ids"] == [0, 2]
    assert settings["drafter"] == {"num_hidden_layers": 2, "block_size": 4, "is_causal": None}
    assert check_same_run(request, settings) is None
    record_run(request, settings)
    assert check_same_run(request, settings)["settings"] == settings
    early = recorded_settings(request, 9, None, decisions[:1])
    assert check_same_run(request, early)["settings"] == settings
    other = make_request(tmp_path, tmp_path / "out", seed=1)
    with pytest.raises(InvalidInputError, match="seed: 0 there, 1 now"):
        check_same_run(other, recorded_settings(other, 9, None, ()))
    assert check_same_run(make_request(tmp_path, tmp_path / "out", resume=False), {"seed": 1}) is None


def test_a_run_that_nobody_can_know_is_not_gone_on_with(tmp_path):
    request = make_request(tmp_path, tmp_path / "out")
    record_run(request, {})
    for text in ("{", "[]"):
        (request.out / "run.json").write_text(text)
        with pytest.raises(InvalidInputError, match="run.json cannot be read.*--no-resume"):
            check_same_run(request, {})


def test_the_records_before_are_kept_when_their_place_is_gone(tmp_path):
    write_run_record(tmp_path / "first" / "run.json", [], {"name": "first"}, {"outcome": {}})
    request, told = make_request(tmp_path, tmp_path / "out", init=str(tmp_path / "first")), []
    stages = stages_before(request, None, told.append)
    assert [stage["settings"]["name"] for stage in stages["previous"]] == ["first"] and not told
    (tmp_path / "first" / "run.json").unlink()
    assert stages_before(request, json.loads(json.dumps(stages)), told.append) == stages and not told
    assert stages_before(request, None, told.append)["previous"] == []
    assert "has no run.json of its training" in told[0]
    assert stages_before(make_request(tmp_path, tmp_path), None, told.append) == {}
