"""Muon for matrices and AdamW for everything else, behind one optimizer as schedulers and trainers expect it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


__all__ = ["LENGTH_HEAD_PREFIX", "MuonWithAdamW", "freeze_other_parts", "parameter_groups"]

LENGTH_HEAD_PREFIX = "length_head."


class MuonWithAdamW(torch.optim.Optimizer):
    """
    Two optimizers that share one list of parameter groups and one state, so that saving, loading and learning rate
    schedules work as with one.

    Muon's updates are scaled to the size of AdamW's (`match_rms_adamw`), so that learning rates mean the same in both.

    Args:
        params (`Iterable[dict]`):
            Parameter groups with `"params"`, `"lr"` and `"use_muon"`; groups with Muon hold matrices only.
        weight_decay (`float`, *optional*, defaults to 0.0):
            Decoupled weight decay of all groups.
        betas (`tuple[float, float]`, *optional*, defaults to `(0.9, 0.95)`):
            Of AdamW.
        eps (`float`, *optional*, defaults to 1e-8):
            Of AdamW.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        groups = list(params)
        super().__init__(groups, {})
        muon = [group for group in self.param_groups if group["use_muon"]]
        adamw = [group for group in self.param_groups if not group["use_muon"]]
        self._parts: list[torch.optim.Optimizer] = []
        # Both add their own defaults to the very dictionaries of `self.param_groups`.
        if muon:
            self._parts.append(torch.optim.Muon(muon, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"))
        if adamw:
            self._parts.append(torch.optim.AdamW(adamw, weight_decay=weight_decay, betas=betas, eps=eps))
        self._share()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict()` returned."""
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        """Loading replaces groups and state by new objects; the parts must work on those."""
        for part in self._parts:
            use_muon = isinstance(part, torch.optim.Muon)
            part.param_groups = [group for group in self.param_groups if group["use_muon"] == use_muon]
            part.state = self.state


def freeze_other_parts(model: torch.nn.Module, part: str) -> None:
    """
    Leave the length head out of training, or all but it.

    Args:
        model (`nn.Module`):
            A drafter, possibly wrapped; changed in place.
        part (`str`):
            `"length_head"`; anything else is what is not the length head.
    """
    for name, parameter in model.named_parameters():
        if (LENGTH_HEAD_PREFIX in name) != (part == "length_head"):
            parameter.requires_grad_(False)


def parameter_groups(
    model: torch.nn.Module,
    *,
    learning_rate: float,
    head_learning_rate: float,
    vector_learning_rate: float | None = None,
    use_muon: bool = False,
    head_prefix: str = LENGTH_HEAD_PREFIX,
) -> list[dict[str, Any]]:
    """
    One group each for matrices, other parameters of the drafter, and the head.

    Args:
        model (`nn.Module`):
            A drafter, possibly wrapped; what needs no gradient is left out.
        learning_rate (`float`), head_learning_rate (`float`):
            Of the drafter, and of the head.
        vector_learning_rate (`float`, *optional*):
            Of what is not a matrix; by default that of the drafter.
        use_muon (`bool`, *optional*, defaults to `False`):
            Whether Muon takes the drafter's matrices.
        head_prefix (`str`, *optional*, defaults to `"length_head."`):
            Part of the names that makes a parameter one of the head.
    """
    trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    drafter = [parameter for name, parameter in trainable if head_prefix not in name]
    vectors_at = learning_rate if vector_learning_rate is None else vector_learning_rate
    groups = (
        ([p for p in drafter if p.ndim == 2], learning_rate, use_muon),
        ([p for p in drafter if p.ndim != 2], vectors_at, False),
        ([parameter for name, parameter in trainable if head_prefix in name], head_learning_rate, False),
    )
    return [{"params": members, "lr": lr, "use_muon": muon} for members, lr, muon in groups if members]
