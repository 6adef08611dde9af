"""What `adaflash train --lora-rank` does: an adapter on the drafter of `--init` in place of all its weights."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ..errors import InvalidInputError


if TYPE_CHECKING:
    from peft import PeftModel

    from ..modeling_dflash_drafter import DFlashDrafterModel
    from ..training.recipes import Decision


__all__ = ["LoraOptions", "lora_options"]

_HEADS = ("length_head", "confidence_head")


@dataclass(frozen=True)
class LoraOptions:
    """
    An adapter to train.

    Attributes:
        rank: Of its products.
        alpha: They are scaled by alpha / rank; None for twice the rank.
        target_modules: Names of the layers to adapt; None for every matrix.
    """

    rank: int
    alpha: float | None = None
    target_modules: tuple[str, ...] | None = None

    def decisions(self) -> list[Decision]:
        """What the run shows and records of it."""
        from ..training.lora import LORA_TARGET_MODULES
        from ..training.recipes import GIVEN, Decision

        alpha = Decision("lora_alpha", 2.0 * self.rank, "twice the rank")
        if self.alpha is not None:
            alpha = Decision("lora_alpha", self.alpha, GIVEN)
        modules = Decision("lora_target_modules", list(LORA_TARGET_MODULES), "every matrix of the drafter")
        if self.target_modules is not None:
            modules = Decision("lora_target_modules", list(self.target_modules), GIVEN)
        return [Decision("lora_rank", self.rank, GIVEN), alpha, modules]

    def put_on(self, drafter: DFlashDrafterModel, init: str) -> PeftModel:
        """
        The drafter with the adapter.

        Args:
            drafter (`DFlashDrafterModel`):
                Changed in place.
            init (`str`):
                Where it was loaded from; the adapter names it as its base.
        """
        from ..training.lora import add_lora

        # An adapter is read from other directories than the one that it was trained in.
        base = os.path.abspath(init) if Path(init).is_dir() else init
        return add_lora(drafter, self.rank, self.alpha, self.target_modules, base_name_or_path=base)

    def refuse_new_length_head(self, init: str) -> NoReturn:
        """For a drafter that would get a length head: the base that the adapter names has none."""
        raise InvalidInputError(
            f"`--lora-rank` is {self.rank} and the drafter {init!r} has no length head; a new one would be part of "
            "the adapter but not of its base, which could not load it. Give --only drafter or --length-head none now, "
            "and train a head on the result with --only length-head."
        )


def lora_options(
    rank: int | None,
    alpha: float | None,
    target_modules: str | None,
    *,
    start: str,
    given: Mapping[str, Any],
) -> LoraOptions | None:
    """
    What the three options come to; None without any of them.

    Args:
        rank (`int`, *optional*):
            `--lora-rank`.
        alpha (`float`, *optional*):
            `--lora-alpha`.
        target_modules (`str`, *optional*):
            `--lora-target-modules`, names with commas between them.
        start (`str`):
            What the run trains, see [`Situation`].
        given (`Mapping[str, Any]`):
            Other settings of the user.

    Raises:
        InvalidInputError: an adapter has no place in this run.
    """
    if rank is None:
        for option, value in (("--lora-alpha", alpha), ("--lora-target-modules", target_modules)):
            if value is not None:
                raise InvalidInputError(f"`{option}` is {value!r}, but there is no adapter; give --lora-rank too.")
        return None
    if start == "scratch":
        raise InvalidInputError(
            f"`--lora-rank` is {rank}, but an adapter changes a drafter that is there already; pass one with --init."
        )
    if start in _HEADS:
        raise InvalidInputError(
            f"`--lora-rank` is {rank}, but `--only` leaves the drafter as it is and trains a head as a whole; leave "
            "one of them out."
        )
    if given.get("draft_vocabulary"):
        raise InvalidInputError(
            f"`--lora-rank` is {rank}, but a draft vocabulary belongs to the adapter's base; leave "
            "`--draft-vocabulary` out, or train without an adapter."
        )
    names = None if target_modules is None else tuple(name.strip() for name in target_modules.split(","))
    return LoraOptions(rank, alpha, names)
