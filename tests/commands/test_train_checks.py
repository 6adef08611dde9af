from __future__ import annotations

import shutil

import pytest
from full_disk import full_disk
from stand_ins import byte_target, load_byte_target
from tiny_models import tiny_drafter
from tiny_trajectories import byte_trajectories, make_trajectories, run_train

from adaflash_hf import embedded_target, hub_upload
from adaflash_hf.cli import main
from adaflash_hf.training.run_records import write_run_record


@pytest.fixture(autouse=True)
def tiny_targets(monkeypatch):
    load_byte_target(monkeypatch)


@pytest.fixture
def no_target(monkeypatch):
    """Neither the target is loaded nor anything else done that takes time or is seen."""

    def refuse(*args, **kwargs):
        pytest.fail("it was not refused before")

    monkeypatch.setattr(embedded_target, "load_target", refuse)
    monkeypatch.setattr(hub_upload, "reserve_repository", refuse)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return byte_trajectories(tmp_path_factory.mktemp("trajectories"))


@pytest.fixture(scope="module")
def drafter(tmp_path_factory):
    """Without a length head; a target is beside it."""
    path = tmp_path_factory.mktemp("drafters")
    target = byte_target()
    target.save_pretrained(path / "target")
    tiny_drafter(target, target_layer_ids=[2]).save_pretrained(path / "drafter")
    return path / "drafter"


@pytest.fixture(scope="module")
def plain_directory(tmp_path_factory):
    """Trajectories without soft targets and features."""
    return make_trajectories(tmp_path_factory.mktemp("plain"), byte_target())


def run(directory, out, *extra):
    fixed = ["--layers", 2, "--block-size", 4] if "--init" not in extra else []
    return run_train(directory, out, *fixed, *extra)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--report-to", "tensorbord"], "tensorbord"),
        (["--device", "nowhere"], "`device` is 'nowhere'"),
        (["--held-out", "12"], "(--held-out) is 12, but there are 12 trajectories"),
        (["--init", "no/such/drafter"], "`--init` is 'no/such/drafter' and cannot be loaded (there is no"),
        (["--init", "DRAFTER/../target"], "target"),
        (["--init", "DRAFTER", "--layers", "3"], "`layers`"),
        (["--init", "DRAFTER", "--lora-rank", "2"], "has no length head"),
        (["--init", "DRAFTER", "--only", "length-head", "--length-head", "none"], "`--length-head` is 'none'"),
        (["--only", "confidence-head", "--init", "DRAFTER", "--push-to-hub", "o/n"], "--push-to-hub"),
        (["--push-to-hub", "org/new", "--init", "no/such/drafter"], "`--init` is 'no/such/drafter'"),
        (["--objective", "cross_entropy", "--clip", "sum"], "clip"),
        (["--lr", "0"], "`learning_rate` is 0"),
        (["--init", "DRAFTER", "--position-decay", "-1"], "`position_decay` is -1"),
        (["--teacher", "none"], "`teacher` is 'none'"),
        (["--target-layer-ids", "0,1"], "holds features of the layers [2]"),
    ],
)
def test_what_needs_no_target_is_refused_before_it_is_loaded(
    directory, drafter, tmp_path, capsys, no_target, arguments, message
):
    arguments = [argument.replace("DRAFTER", str(drafter)) for argument in arguments]
    assert run(directory, tmp_path / "out", *arguments) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--features", "stored"], "these trajectories were made without --features"),
        (["--teacher", "top_k", "--objective", "forward_kl"], "without the target's likeliest tokens"),
    ],
)
def test_what_trajectories_lack_is_told_before_the_target_is_loaded(
    plain_directory, tmp_path, capsys, no_target, arguments, message
):
    assert run(plain_directory, tmp_path / "out", *arguments) == 2
    assert message in capsys.readouterr().err


def test_a_run_with_other_settings_is_refused_before_the_target_is_loaded(
    directory, drafter, tmp_path, capsys, no_target
):
    write_run_record(tmp_path / "run.json", [], {"seed": 0})
    checkpoint = tmp_path / "checkpoints" / "checkpoint-25"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer_state.json").write_text('{"global_step": 25}')
    for arguments in (["--init", drafter], ["--objective", "forward_kl"]):
        assert run(directory, tmp_path, "--seed", 1, *arguments) == 2
        error = capsys.readouterr().err
        assert "seed: 0 there, 1 now" in error
    assert "layers: None there, 2 now" in error and "objective: None there, 'forward_kl' now" in error


def test_too_few_trajectories_are_refused_before_the_target_is_loaded(directory, tmp_path, capsys, no_target):
    assert main(["train", "--trajectories", str(directory), "--out", str(tmp_path / "out")]) == 2
    assert "(--held-out) is 64, but there are 12 trajectories" in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_refused_before_the_target_is_loaded(directory, tmp_path, capsys, no_target):
    (tmp_path / "file").touch()
    assert run(directory, tmp_path / "file" / "out") == 2
    assert "nothing was done yet" in capsys.readouterr().err
    with full_disk(100):
        assert run(directory, tmp_path / "out") == 2
    assert "Make room" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_too_little_room_is_told_before_training(directory, tmp_path, capsys, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    assert run(directory, tmp_path / "out") == 2
    assert "MB are needed there and 0 MB are free" in capsys.readouterr().err
    assert not (tmp_path / "out" / "run.json").exists()


def test_a_model_of_another_kind_is_not_overwritten(directory, tmp_path, capsys):
    byte_target().save_pretrained(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert run(directory, tmp_path) == 2
    assert "holds a model of type 'llama' that would be overwritten" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
