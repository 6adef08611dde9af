from __future__ import annotations

import random
import resource

import pytest
import torch
from online_traffic import in_fork, kill_after
from safetensors.torch import load_file, save_file
from torch import nn

from adaflash_hf.errors import DrafterCheckpointError
from adaflash_hf.online.training_state import TrainingProgress, TrainingStateStore
from adaflash_hf.training.optimizers import MuonWithAdamW


def make(seed=0, muon=False, width=4):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, width), nn.Linear(width, 2))
    matrices, vectors = ([p for p in model.parameters() if (p.ndim == 2) == two] for two in (True, False))
    if muon:
        groups = [
            {"params": matrices, "lr": 1e-2, "use_muon": True},
            {"params": vectors, "lr": 1e-2, "use_muon": False},
        ]
        return model, MuonWithAdamW(groups)
    return model, torch.optim.AdamW([{"params": vectors}, {"params": matrices}], lr=1e-2)


def step(model, optimizer, times=3, seed=0):
    for i in range(times):
        inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed + i))
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def same(one, other):
    return all(a.equal(b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("muon", [False, True])
def test_training_goes_on_as_if_nothing_had_happened(tmp_path, muon):
    model, optimizer = make(muon=muon)
    step(model, optimizer)
    progress = TrainingProgress("b", 3, 7, 12, {"math": 5}, {"version": 7}, [{"round": 3}])
    TrainingStateStore(tmp_path).save(model, optimizer, progress)
    step(model, optimizer, seed=10)
    other, other_optimizer = make(seed=9, muon=muon)
    assert TrainingStateStore(tmp_path).load(other, other_optimizer) == progress
    step(other, other_optimizer, seed=10)
    assert same(model, other)


def test_settings_may_change_between_two_runs(tmp_path):
    model, optimizer = make()
    step(model, optimizer)
    TrainingStateStore(tmp_path).save(model, optimizer, TrainingProgress())
    other, other_optimizer = make()
    other_optimizer.param_groups[0]["lr"] = 0.5
    TrainingStateStore(tmp_path).load(other, other_optimizer)
    assert other_optimizer.param_groups[0]["lr"] == 0.5


def test_an_optimizer_that_has_not_stepped_is_a_state_too(tmp_path):
    model, optimizer = make()
    TrainingStateStore(tmp_path).save(model, optimizer, TrainingProgress(round_id=1))
    other, other_optimizer = make(seed=3)
    assert TrainingStateStore(tmp_path).load(other, other_optimizer).round_id == 1
    assert same(model, other)


def test_without_a_state_nothing_changes(tmp_path):
    model, optimizer = make()
    assert TrainingStateStore(tmp_path / "none").load(model, optimizer) is None
    assert TrainingStateStore(tmp_path / "none").read_progress() is None


def change_tensor(path, name, change):
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"optimizer": "AdamW"})
    return name


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("weights", lambda t: t.pop("0.bias"), "another model"),
        ("weights", lambda t: t["0.bias"].fill_(float("nan")), "not finite"),
        ("optimizer", lambda t: t["0.bias/exp_avg"].fill_(float("inf")), "not finite"),
        ("optimizer", lambda t: t.update({"9.bias/exp_avg": torch.zeros(2)}), "not trained now"),
        ("optimizer", lambda t: t.update({"0.bias/exp_avg": torch.zeros(9)}), "shape"),
        ("optimizer", lambda t: [t.pop(n) for n in list(t) if n.startswith("0.bias")], "3 parameters, 4"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_whole(tmp_path, file, change, message):
    model, optimizer = make()
    step(model, optimizer)
    TrainingStateStore(tmp_path).save(model, optimizer, TrainingProgress())
    change_tensor(tmp_path / "state-00000001" / f"{file}.safetensors", "", change)
    other, other_optimizer = make(seed=1)
    with pytest.raises(DrafterCheckpointError, match=message):
        TrainingStateStore(tmp_path).load(other, other_optimizer)
    assert same(other, make(seed=1)[0])
    assert not other_optimizer.state


@pytest.mark.parametrize("text", ["", "[]", '{"format": 1, "colour": "red"}', '{"format": 9}'])
def test_unreadable_progress_is_refused(tmp_path, text):
    model, optimizer = make()
    TrainingStateStore(tmp_path).save(model, optimizer, TrainingProgress())
    (tmp_path / "state-00000001" / "progress.json").write_text(text)
    with pytest.raises(DrafterCheckpointError, match="progress|read|format|state"):
        TrainingStateStore(tmp_path).read_progress()


def test_another_optimizer_is_refused(tmp_path):
    model, optimizer = make()
    step(model, optimizer)
    TrainingStateStore(tmp_path).save(model, optimizer, TrainingProgress())
    with pytest.raises(DrafterCheckpointError, match="optimizer AdamW, not MuonWithAdamW"):
        TrainingStateStore(tmp_path).load(*make(muon=True))


def test_another_size_is_refused(tmp_path):
    model, optimizer = make()
    TrainingStateStore(tmp_path).save(model, optimizer, TrainingProgress())
    with pytest.raises(DrafterCheckpointError, match=r"shape \[4\], not \[6\]"):
        TrainingStateStore(tmp_path).load(*make(width=6))


def save_until_killed(directory):
    model, optimizer = make()
    store, number = TrainingStateStore(directory), 0
    while True:
        number += 1
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(number)
        store.save(model, optimizer, TrainingProgress(round_id=number))


def test_killed_at_random_instants_a_state_is_of_one_moment(tmp_path):
    rng = random.Random(1)
    for _ in range(6):
        with in_fork(save_until_killed, tmp_path) as process:
            while not list(tmp_path.glob("state-*")):
                assert process.is_alive()
            kill_after(process, rng.uniform(0, 0.05))
        model, optimizer = make()
        progress = TrainingStateStore(tmp_path).load(model, optimizer)
        assert all(bool((p == progress.round_id).all()) for p in model.parameters())
    # However many were killed before they had removed older ones, the next one removes them.
    TrainingStateStore(tmp_path).save(model, optimizer, progress)
    assert len(list(tmp_path.glob("state-*"))) == 2


def save_on_a_full_disk(directory):
    model, optimizer = make(width=4096)
    step(model, optimizer, 1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
    with pytest.raises(OSError, match="File too large|written|space"):
        TrainingStateStore(directory).save(model, optimizer, TrainingProgress(round_id=2))


def test_a_full_disk_leaves_the_state_before(tmp_path):
    model, optimizer = make(width=4096)
    TrainingStateStore(tmp_path).save(model, optimizer, TrainingProgress(round_id=1))
    with in_fork(save_on_a_full_disk, tmp_path) as process:
        process.join(600)
        assert process.exitcode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["state-00000001"]
    assert TrainingStateStore(tmp_path).read_progress().round_id == 1
