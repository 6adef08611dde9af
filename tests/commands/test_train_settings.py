from __future__ import annotations

import pytest
import torch
from stand_ins import byte_target
from tiny_models import tiny_drafter
from tiny_trajectories import byte_trajectories
from train_requests import make_request

from adaflash_hf.commands.train_settings import choose_device, read_data, settle, training_arguments
from adaflash_hf.commands.train_start import TrainStart
from adaflash_hf.errors import InvalidInputError


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return byte_trajectories(tmp_path_factory.mktemp("trajectories"))


def names_of(settings):
    return [setting.name for setting in settings]


def test_held_out_trajectories_are_apart(directory, tmp_path):
    data = read_data(make_request(directory, tmp_path))
    assert (len(data.dataset), len(data.train), len(data.held_out)) == (12, 9, 3)
    assert not data.dataset.has_features
    assert read_data(make_request(directory, tmp_path, held_out=0)).held_out is None


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_the_settings_that_apply_to_a_new_drafter_are_known_before_it_is_there(directory, tmp_path, device_type):
    request = make_request(directory, tmp_path, given={"anchors": 4})
    data = read_data(request)
    start = TrainStart(tiny_drafter(byte_target()), [])
    expected = names_of(settle(request, start, data, device_type))
    assert names_of(settle(request, None, data, device_type)) == expected
    with pytest.raises(InvalidInputError, match="`clip` is 'sum'"):
        settle(
            make_request(directory, tmp_path, given={"objective": "cross_entropy", "clip": "sum"}), None, data, "cpu"
        )


def test_arguments_follow_from_settings_and_data(directory, tmp_path):
    request = make_request(directory, tmp_path, steps=40, given={"batch_size": 4, "optimizer": "muon"})
    data = read_data(request)
    settings = settle(request, None, data, "cpu")
    assert "epochs" not in names_of(settings)
    arguments = training_arguments(request, settings, data, "cpu")
    assert (arguments.max_steps, arguments.use_muon, arguments.per_device_train_batch_size) == (40, True, 4)
    assert arguments.eval_steps == arguments.save_steps == 25 and arguments.eval_strategy.value == "steps"
    assert not arguments.eval_on_start and arguments.use_cpu
    request = make_request(directory, tmp_path, init="x", held_out=0, given={"vocabulary_size": 0})
    data = read_data(request)
    arguments = training_arguments(request, settle(request, None, data, "cpu"), data, "cpu")
    assert (arguments.max_steps, arguments.num_train_epochs, arguments.vocabulary_size) == (-1, 2, None)
    assert arguments.eval_strategy.value == "no" and not arguments.eval_on_start


def test_each_process_has_a_device_of_its_own(tmp_path, monkeypatch):
    assert choose_device(make_request(tmp_path, tmp_path)).type == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert choose_device(make_request(tmp_path, tmp_path, device=None)).type == "cpu"
    with pytest.raises(InvalidInputError, match="`device` is 'nowhere'"):
        choose_device(make_request(tmp_path, tmp_path, device="nowhere"))
