from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_target
from tiny_trajectories import make_trajectories

from adaflash_hf.errors import InvalidInputError
from adaflash_hf.training.features import compute_target_features, features_path
from adaflash_hf.training.trajectories import find_trajectory_shards
from adaflash_hf.training.trajectory_dataset import (
    TrajectoryDataset,
    add_target_features,
    cache_target_features,
    check_stored_features,
    split_by_prompt,
)


LAYER_IDS = (0, 2)


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama")


@pytest.fixture(scope="module")
def directory(target, tmp_path_factory):
    path = tmp_path_factory.mktemp("trajectories")
    return make_trajectories(path, target, teacher_top_k=4, capture_layer_ids=LAYER_IDS)


def test_rows_come_with_their_teacher_and_features(target, directory):
    dataset = TrajectoryDataset(directory, feature_layer_ids=LAYER_IDS)
    assert len(dataset) == 12 and dataset.domains == ["code", "math"]
    assert dataset.teacher_top_k == 4 and dataset.has_features and dataset.num_response_tokens == 120
    for index in (0, 5, 11):
        row = dataset[index]
        ids, start = row["input_ids"], row["prompt_length"]
        assert row["index"] == index and len(ids) == start + 10 and not row["finished"]
        assert ids[:start].tolist() == dataset.prompt_ids(index).tolist()
        assert row["teacher_ids"][:, 0].tolist() == ids[start:].tolist()
        expected = compute_target_features(target, ids[None], LAYER_IDS).context[0, :-1]
        # Decoded step by step there, in one pass here.
        torch.testing.assert_close(row["context_hidden_states"], expected, atol=1e-5, rtol=1e-4)


def test_long_rows_are_cut(directory):
    dataset = TrajectoryDataset(directory, feature_layer_ids=LAYER_IDS, max_tokens=9)
    assert 0 < len(dataset) < 13
    for index in range(len(dataset)):
        row = dataset[index]
        assert len(row["input_ids"]) == 9 and len(row["context_hidden_states"]) == 8
        assert len(row["teacher_ids"]) == 9 - row["prompt_length"] >= 2


def test_features_cached_later_equal_those_captured(target, directory, tmp_path):
    later = make_trajectories(tmp_path, target, teacher_top_k=4)
    calls = []
    cache_target_features(target, [later], LAYER_IDS, batch_size=3, on_shard=lambda *done: calls.append(done))
    assert calls == [(1, 3), (2, 3), (3, 3)]
    one = TrajectoryDataset(directory, feature_layer_ids=LAYER_IDS)
    two = TrajectoryDataset(later, feature_layer_ids=LAYER_IDS)
    for index in range(12):
        torch.testing.assert_close(
            one[index]["context_hidden_states"], two[index]["context_hidden_states"], atol=1e-5, rtol=1e-4
        )


def test_where_features_come_from(target, directory, tmp_path):
    def source(directories, *features, max_tokens=None):
        dataset = TrajectoryDataset(directories, max_tokens=max_tokens)
        check_stored_features(dataset, *features)
        found = add_target_features(dataset, target, LAYER_IDS, *features)
        assert dataset.has_features == (found != "compute")
        assert dataset.has_features == ("context_hidden_states" in dataset[0])
        return found

    assert source([directory], max_tokens=9) == "stored"
    assert source([directory], "compute") == "compute"
    without = make_trajectories(tmp_path, target)
    # All or none: what one directory lacks would be missing in its rows.
    assert source([directory, without]) == "compute"
    assert source([without], "cache") == "cache"
    assert source([directory, without]) == "stored"


def test_stored_features_of_no_use_are_refused_before_there_is_a_target(target, directory, tmp_path):
    dataset = TrajectoryDataset([directory])
    for features in ("auto", "stored", "cache"):
        check_stored_features(dataset, features, LAYER_IDS)
        with pytest.raises(InvalidInputError, match=r"layers \[0, 2\]"):
            check_stored_features(dataset, features, (0, 1))
    check_stored_features(dataset, "compute", (0, 1))
    dataset = TrajectoryDataset(make_trajectories(tmp_path, target))
    for features in ("auto", "cache", "compute"):
        check_stored_features(dataset, features)
    with pytest.raises(InvalidInputError, match="without --features"):
        check_stored_features(dataset, "stored")


def test_features_of_other_layers_or_damaged_ones_are_refused(target, tmp_path):
    directory = make_trajectories(tmp_path, target, capture_layer_ids=LAYER_IDS)
    with pytest.raises(InvalidInputError, match=r"layers \[0, 2\]"):
        TrajectoryDataset(directory, feature_layer_ids=(0, 1))
    path = features_path(find_trajectory_shards(directory)[1])
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(InvalidInputError, match="cannot be read"):
        TrajectoryDataset(directory, feature_layer_ids=LAYER_IDS)


def test_damaged_trajectories_are_refused(target, tmp_path):
    directory = make_trajectories(tmp_path, target)
    find_trajectory_shards(directory)[0].write_bytes(b"not parquet")
    with pytest.raises(InvalidInputError, match="cannot be read"):
        TrajectoryDataset(directory)


def test_responses_too_short_to_learn_from_are_left_out(target, tmp_path):
    directory = make_trajectories(tmp_path, target, max_new_tokens=1)
    with pytest.raises(InvalidInputError, match="no response"):
        TrajectoryDataset(directory)


def test_several_directories_are_one_dataset(target, directory, tmp_path):
    dataset = TrajectoryDataset([directory, make_trajectories(tmp_path, target)])
    assert len(dataset) == 24
    # The second has no teacher, so the whole has none.
    assert dataset.teacher_top_k == 0 and "teacher_ids" not in dataset[0]


def test_split_keeps_rows_of_one_prompt_together(directory):
    dataset = TrajectoryDataset([directory, directory])
    train, held_out = split_by_prompt(dataset, 5)
    assert sorted(train + held_out) == list(range(24)) and len(held_out) == 6
    prompts = [{dataset.prompt_ids(index).tobytes() for index in side} for side in (train, held_out)]
    assert not prompts[0] & prompts[1]
    assert split_by_prompt(dataset, 0) == (list(range(24)), [])
    with pytest.raises(InvalidInputError, match="num_held_out"):
        split_by_prompt(dataset, 24)
