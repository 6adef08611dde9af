from __future__ import annotations

import copy
import json
import logging
import shutil
import threading
import time
from dataclasses import replace

import pytest
import torch
from online_traffic import recorded, served
from published_drafters import adapted_drafter, train_on
from tiny_models import tiny_target
from tiny_online_trainer import make, make_buffer, published_weights, same

from adaflash_hf.errors import InvalidInputError, PublishedVersionError, ReplayBufferError
from adaflash_hf.online.round_training import RoundTrainer
from adaflash_hf.online.run_display import describe_in_a_line
from adaflash_hf.online.run_snapshot import RunSnapshots
from adaflash_hf.online.run_status import read_status


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama")


@pytest.fixture(scope="module")
def traffic(target):
    return served(target, 40)


@pytest.fixture(scope="module")
def trained(target, traffic):
    """A drafter that drafts well on this traffic, so that bad weights show."""
    return train_on(adapted_drafter(), target, traffic[:12], steps=40)


def test_rounds_publish_versions_that_draft_better(target, traffic, tmp_path):
    buffer = make_buffer(tmp_path, traffic)
    trainer = make(tmp_path, target, round_size=8, epochs=6, anchors_per_trajectory=512, tolerance=0.5)
    assert trainer.run(max_rounds=2) == 2
    first, second = trainer.progress.history
    assert (first["outcome"], first["version"], second["version"]) == ("published", 1, 2)
    assert second["loss"] < first["loss"]
    assert sum(first["trajectories"].values()) == 8
    assert first["served"] == {"math": 1.5}
    assert second["served"] == {}
    versions = trainer.publisher
    assert versions.numbers() == [0, 1, 2]
    assert same(published_weights(tmp_path, 0), adapted_drafter().state_dict())
    manifest = versions.latest().manifest
    assert (manifest.parent, manifest.round_id, manifest.trajectories) == (1, 2, {"math": 16})
    assert manifest.acceptance_after["all"] >= manifest.acceptance_before["all"] - 0.5
    assert manifest.settings["objective"] == "mixture"
    waiting = buffer.depth().waiting
    assert waiting == sum(one.prompt_hash >= 0.3 for one in traffic) - 16
    status = read_status(versions.directory, "trainer")
    assert (status["phase"], status["version"], len(status["history"])) == ("stopped", 2, 2)


def test_a_round_that_loses_is_taken_back(target, traffic, tmp_path, monkeypatch):
    make_buffer(tmp_path, traffic)
    trainer = make(tmp_path, target)
    taus = iter([2.0, 1.9, 2.0, 2.1])
    monkeypatch.setattr(
        RoundTrainer,
        "evaluate",
        lambda self, *a, **k: dict.fromkeys(("eval_acceptance_length", "eval_acceptance_length_math"), next(taus)),
    )
    trainer.run(max_rounds=1)
    assert trainer.progress.history[-1]["outcome"] == "rejected"
    assert trainer.publisher.numbers() == [0]
    assert same(dict(trainer.model.state_dict()), adapted_drafter().state_dict())
    assert not trainer.store.read_progress().manifest
    trainer.run(max_rounds=1)
    assert trainer.progress.history[-1]["outcome"] == "published"
    # It learned more slowly, which a trainer that was started anew would have known too.
    assert [entry["learning_rate_factor"] for entry in trainer.store.read_progress().history] == [1.0, 0.5]
    assert trainer.buffer.open_round() is None


def test_a_round_that_diverges_is_taken_back(target, traffic, tmp_path):
    make_buffer(tmp_path, traffic)
    trainer = make(tmp_path, target, learning_rate=1e30, max_grad_norm=0.0)
    trainer.run(max_rounds=1)
    assert trainer.progress.history[-1]["outcome"] == "diverged"
    assert same(dict(trainer.model.state_dict()), adapted_drafter().state_dict())
    assert trainer.publisher.numbers() == [0]


def test_an_adapter_is_published_merged(target, traffic, tmp_path):
    make_buffer(tmp_path, traffic)
    make(tmp_path, target, lora_rank=2, tolerance=3.0, learning_rate=5e-2).run(max_rounds=1)
    merged = published_weights(tmp_path, 1)
    assert merged.keys() == adapted_drafter().state_dict().keys()
    assert not merged["fc.weight"].equal(adapted_drafter().fc.weight)
    # And the next trainer goes on with the adapter, not with a new one on the merged weights.
    trainer = make(tmp_path, target, lora_rank=2, tolerance=3.0)
    trainer.resume()
    assert any("lora_B" in name and bool(p.any()) for name, p in trainer.model.named_parameters())
    trainer.run(max_rounds=1)
    assert trainer.publisher.numbers() == [0, 1, 2]


def test_it_says_what_it_waits_for(target, traffic, tmp_path):
    buffer = make_buffer(tmp_path, [one for one in traffic if one.prompt_hash >= 0.3][:6])
    trainer = make(tmp_path, target, min_held_out=3)
    assert trainer.waiting_for() == "3 of 3 held-out trajectories"
    buffer.append([one for one in traffic if one.prompt_hash < 0.3][:3])
    assert trainer.waiting_for() is None
    assert make(tmp_path, target, round_size=9).waiting_for() == "3 of 9 new trajectories"


def test_the_status_foresees_the_end_of_a_round(target, traffic, tmp_path, monkeypatch):
    make_buffer(tmp_path, traffic)
    trainer, foreseen = make(tmp_path, target, tolerance=3.0), {}
    update = trainer.status.update

    def noted(**fields):
        update(**fields)
        foreseen.setdefault(trainer.status.fields["phase"], []).append(trainer.status.fields["expected_end_s"])

    monkeypatch.setattr(trainer.status, "update", noted)
    trainer.run(max_rounds=1)
    assert foreseen["judging before"] == [None]
    nothing, *after_updates = foreseen["training"]
    assert nothing is None
    assert len(after_updates) == 2 and all(end_s > 0 for end_s in after_updates)
    assert foreseen["judging after"][0] > 0
    assert foreseen["saving"][-1] is None


def test_a_round_does_not_begin_with_the_updates_of_the_one_before(target, traffic, tmp_path, monkeypatch):
    make_buffer(tmp_path, traffic)
    trainer, shown = make(tmp_path, target, tolerance=3.0), {}
    update = trainer.status.update

    def noted(**fields):
        update(**fields)
        line = describe_in_a_line(RunSnapshots(trainer.publisher.directory).take())
        if trainer.status.fields["phase"] == "training":
            shown.setdefault(trainer.status.fields["round"], line)

    monkeypatch.setattr(trainer.status, "update", noted)
    trainer.run(max_rounds=2)
    assert len(shown) == 2
    assert all("trainer: training  server" in line for line in shown.values()), shown


def test_stopping_leaves_the_round_for_the_next_trainer(target, traffic, tmp_path):
    buffer = make_buffer(tmp_path, traffic)
    trainer = make(tmp_path, target, epochs=1000)
    thread = threading.Thread(target=trainer.run)
    thread.start()
    while read_status(tmp_path / "published", "trainer").get("phase") != "training":
        assert thread.is_alive()
        time.sleep(0.01)
    trainer.stop()
    thread.join(300)
    assert not thread.is_alive()
    opened = buffer.open_round()
    assert len(opened.trajectory_ids) == 4
    following = make(tmp_path, target)
    following.run(max_rounds=1)
    assert following.progress.history[-1]["round"] == opened.id


def test_a_second_trainer_is_refused(target, traffic, tmp_path):
    buffer = make_buffer(tmp_path, traffic)
    with buffer.consumer_lock(), pytest.raises(ReplayBufferError, match="another trainer"):
        make(tmp_path, target).run(max_rounds=1)


def test_after_a_roll_back_it_goes_on_from_what_is_served(target, traffic, tmp_path):
    make_buffer(tmp_path, traffic)
    trainer = make(tmp_path, target, tolerance=3.0)
    trainer.run(max_rounds=2)
    trainer.publisher.rollback(to=0)
    trainer.run(max_rounds=1)
    manifest = trainer.publisher.latest().manifest
    assert (manifest.version, manifest.parent, manifest.trajectories) == (3, 0, {"math": 4})
    # The same holds for a trainer that was not running meanwhile.
    trainer.publisher.rollback(to=1)
    following = make(tmp_path, target, tolerance=3.0)
    following.resume()
    assert following.progress.version == 1
    assert same(dict(following.model.state_dict()), published_weights(tmp_path, 1))


def test_a_roll_back_during_a_round_gives_the_round_back(target, traffic, tmp_path, monkeypatch):
    buffer = make_buffer(tmp_path, traffic)
    trainer = make(tmp_path, target, tolerance=3.0)
    trainer.run(max_rounds=1)
    before = buffer.depth().waiting
    train = RoundTrainer.train

    def rolled_back_meanwhile(self, *args, **kwargs):
        result = train(self, *args, **kwargs)
        trainer.publisher.rollback(to=0)
        monkeypatch.setattr(RoundTrainer, "train", train)
        return result

    monkeypatch.setattr(RoundTrainer, "train", rolled_back_meanwhile)
    trainer.run(max_rounds=1)
    assert trainer.progress.history[-1]["outcome"] == "withdrawn"
    assert trainer.publisher.pointer().version == 0
    assert buffer.depth().waiting == before
    trainer.run(max_rounds=1)
    assert trainer.publisher.latest().manifest.parent == 0
    assert buffer.depth().waiting == before - 4


def test_trajectories_of_another_vocabulary_are_left_out(target, traffic, tmp_path):
    buffer = make_buffer(tmp_path, traffic[:3], held_out_share=0.0)
    foreign = recorded(1)
    buffer.append([replace(foreign, token_ids=foreign.token_ids + 1000)])
    trainer = make(tmp_path, target, held_out=0, min_held_out=0)
    trainer.run(max_rounds=1)
    assert trainer.progress.history[-1]["trajectories"] == {"math": 3}
    buffer.append([replace(recorded(seed), token_ids=recorded(seed).token_ids + 1000) for seed in range(4)])
    trainer.run(max_rounds=1)
    assert trainer.progress.history[-1]["outcome"] == "unusable"
    assert buffer.depth().waiting == 0


def test_a_state_that_does_not_fit_costs_only_the_optimizer(target, traffic, tmp_path, caplog):
    make_buffer(tmp_path, traffic)
    trainer = make(tmp_path, target, tolerance=3.0)
    trainer.run(max_rounds=1)
    following = make(tmp_path, target, tolerance=3.0, use_muon=True)
    with caplog.at_level(logging.WARNING):
        following.resume()
    assert "begins with the latest published version" in caplog.text
    assert following.progress.version == 1
    assert following.progress.round_id == 1
    assert same(dict(following.model.state_dict()), published_weights(tmp_path, 1))
    following.run(max_rounds=1)
    assert following.publisher.numbers() == [0, 1, 2]


def test_a_new_buffer_in_the_old_place_is_not_taken_for_the_old_one(target, traffic, tmp_path):
    make_buffer(tmp_path, traffic)
    make(tmp_path, target, tolerance=3.0).run(max_rounds=2)
    for path in tmp_path.glob("buffer*"):
        path.unlink()
    buffer = make_buffer(tmp_path, traffic)
    opened = buffer.claim(4)  # round 1 again, which the state has done in the old buffer
    trainer = make(tmp_path, target, tolerance=3.0)
    trainer.run(max_rounds=1)
    assert trainer.progress.history[-1]["round"] == opened.id == 1
    assert trainer.publisher.pointer().version == 3


def test_settings_that_cannot_work_are_refused(target, traffic, tmp_path):
    make_buffer(tmp_path, traffic[:2], max_rows=7)
    with pytest.raises(InvalidInputError, match="round_size"):
        make(tmp_path, target)
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    make_buffer(tmp_path, traffic[:2], held_out_share=0.0)
    with pytest.raises(InvalidInputError, match="held_out_share"):
        make(tmp_path, target)


def worse_weights(model, target):
    model.load_state_dict(adapted_drafter(77).state_dict())


def weights_of_another_target(model, target):
    other = tiny_target("llama", seed=5)
    model.load_state_dict(train_on(adapted_drafter(), other, served(other, 4), steps=20).state_dict())


def not_finite(model, target):
    torch.nn.init.constant_(model.norm.weight, float("nan"))


@pytest.mark.parametrize(
    ("poison", "fields", "outcome"),
    [
        (worse_weights, {}, "rejected"),
        (weights_of_another_target, {}, "rejected"),
        (not_finite, {}, "rejected"),
        # Even where nobody judges.
        (not_finite, {"held_out": 0, "min_held_out": 0}, "refused"),
    ],
)
def test_a_poisoned_update_is_never_published(
    target, traffic, trained, tmp_path, monkeypatch, poison, fields, outcome
):
    buffer = make_buffer(tmp_path, traffic)
    trainer = make(tmp_path, target, copy.deepcopy(trained), **fields)
    train = RoundTrainer.train

    def poisoned(self, *args, **kwargs):
        result = train(self, *args, **kwargs)
        poison(self.model, target)
        return result

    monkeypatch.setattr(RoundTrainer, "train", poisoned)
    trainer.run(max_rounds=1)
    assert trainer.progress.history[-1]["outcome"] == outcome
    assert trainer.publisher.numbers() == [0]
    # The trainer itself is not poisoned either, nor is the next one; and the round is done with.
    for each in (trainer, make(tmp_path, target, **fields)):
        each.resume()
        assert same(dict(each.model.state_dict()), trained.state_dict())
    assert buffer.open_round() is None


def test_an_emptied_publish_directory_is_an_error_that_says_so(target, traffic, tmp_path):
    make_buffer(tmp_path, traffic)
    trainer = make(tmp_path, target, tolerance=3.0)
    trainer.run(max_rounds=1)
    shutil.rmtree(tmp_path / "published")
    (tmp_path / "published").mkdir()
    with pytest.raises(PublishedVersionError, match="emptied"):
        trainer.resume()
    assert json.dumps(trainer.progress.history)
