"""Responses of a tiny target to prompts of two domains, and a drafter that has learned some of them."""

from __future__ import annotations

from pathlib import Path

from published_drafters import adapted_drafter, train_on
from tiny_trajectories import make_trajectories
from transformers import PreTrainedModel

from adaflash_hf import DFlashDrafterModel
from adaflash_hf.evaluation.domain_traffic import DomainResponses


NEW_TOKENS = 16


def domain_responses(
    directory: Path,
    target: PreTrainedModel,
    count: int = 12,
    layer_ids: list[int] | None = None,
    max_new_tokens: int = NEW_TOKENS,
    **settings: object,
) -> DomainResponses:
    """`count` responses of up to 16 tokens, half of them `math`, half `code`; with features if layers are given."""
    if layer_ids is not None:
        settings["capture_layer_ids"] = tuple(layer_ids)
    make_trajectories(directory, target, count, max_new_tokens=NEW_TOKENS, **settings)
    return DomainResponses([directory], max_new_tokens, layer_ids)


def trained_drafter(target: PreTrainedModel, responses: DomainResponses, domain: str = "math") -> DFlashDrafterModel:
    """Knows the first half of the responses of one domain by heart."""
    indices = responses.of_domain(domain)
    known = [responses.recorded(index) for index in indices[: len(indices) // 2]]
    return train_on(adapted_drafter(), target, known).eval()
