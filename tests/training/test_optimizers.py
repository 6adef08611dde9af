from __future__ import annotations

import copy

import torch
from torch import nn

from adaflash_hf.training.optimizers import MuonWithAdamW


def model_and_optimizer(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3))
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim != 2]
    groups = [
        {"params": matrices, "lr": 1e-2, "use_muon": True},
        {"params": vectors, "lr": 1e-3, "use_muon": False},
    ]
    return model, MuonWithAdamW(groups, weight_decay=0.01)


def train(model, optimizer, steps, scheduler=None):
    for step in range(steps):
        loss = model(torch.randn(4, 6, generator=torch.Generator().manual_seed(step))).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def test_it_does_what_the_two_optimizers_do():
    model, optimizer = model_and_optimizer()
    reference = copy.deepcopy(model)
    muon = torch.optim.Muon(
        [p for p in reference.parameters() if p.ndim == 2], lr=1e-2, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"
    )
    vectors = [p for p in reference.parameters() if p.ndim != 2]
    adamw = torch.optim.AdamW(vectors, lr=1e-3, weight_decay=0.01, betas=(0.9, 0.95))
    train(model, optimizer, 3)
    for step in range(3):
        loss = reference(torch.randn(4, 6, generator=torch.Generator().manual_seed(step))).square().mean()
        reference.zero_grad()
        loss.backward()
        muon.step()
        adamw.step()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_schedule_reaches_both_parts():
    model, optimizer = model_and_optimizer()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < 2 else 0.0)
    train(model, optimizer, 2, scheduler)
    before = [p.clone() for p in model.parameters()]
    train(model, optimizer, 2, scheduler)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert [group["lr"] for group in optimizer.param_groups] == [0, 0]


def test_a_loaded_state_continues_as_if_never_interrupted(tmp_path):
    whole_model, whole = model_and_optimizer()
    train(whole_model, whole, 5)
    model, optimizer = model_and_optimizer()
    train(model, optimizer, 3)
    torch.save([model.state_dict(), optimizer.state_dict()], tmp_path / "state")
    model, optimizer = model_and_optimizer(seed=9)
    weights, state = torch.load(tmp_path / "state", weights_only=True)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)

    for step in (3, 4):
        loss = model(torch.randn(4, 6, generator=torch.Generator().manual_seed(step))).square().mean()
        optimizer.zero_grad()
        loss.backward()
        assert optimizer.step(lambda: 1.5) == 1.5
    assert all(torch.equal(a, b) for a, b in zip(whole_model.parameters(), model.parameters(), strict=True))
